"""One image per prompt, with a prompt format per model type; the same image again by its name, without its pixels."""

import os
from contextlib import contextmanager
from dataclasses import asdict
from time import perf_counter
from typing import NamedTuple

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

from PIL import Image
from vllm import LLM, EngineArgs, SamplingParams
from vllm.assets.image import ImageAsset  # noqa: F401
from vllm.assets.video import VideoAsset  # noqa: F401
from vllm.lora.request import LoRARequest
from vllm.multimodal.image import convert_image_mode
from vllm.utils.argparse_utils import FlexibleArgumentParser


class ModelRequestData(NamedTuple):
    engine_args: EngineArgs
    prompts: list[str]
    stop_token_ids: list[int] | None = None
    lora_requests: list[LoRARequest] | None = None


def run_llava(model: str, questions: list[str], modality: str) -> ModelRequestData:
    assert modality == "image"
    prompts = [f"USER: <image>\n{question}\nASSISTANT:" for question in questions]
    engine_args = EngineArgs(model=model, max_model_len=256, limit_mm_per_prompt={modality: 1})
    return ModelRequestData(engine_args=engine_args, prompts=prompts)


model_example_map = {"llava": run_llava}


@contextmanager
def time_counter(enable: bool):
    start = perf_counter()
    yield
    if enable:
        print(f"-- generate time = {perf_counter() - start:.3f}")


def main() -> None:
    parser = FlexibleArgumentParser(description="Vision language models")
    parser.add_argument("--model-type", "-m", choices=model_example_map.keys(), default="llava")
    parser.add_argument("--model", required=True)
    parser.add_argument("--image", required=True)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--modality", choices=["image", "video"], default="image")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disable-mm-processor-cache", action="store_true")
    parser.add_argument("--time-generate", action="store_true")
    parser.add_argument("--verify-mm-cache-hit-with-uuids", action="store_true")
    args = parser.parse_args()

    data = convert_image_mode(Image.open(args.image), "RGB")
    questions = ["What is the content of this image?", "Describe it."]
    req_data = model_example_map[args.model_type](args.model, questions, args.modality)
    default_limits = {"image": 0, "video": 0, "audio": 0}
    req_data.engine_args.limit_mm_per_prompt = default_limits | dict(req_data.engine_args.limit_mm_per_prompt or {})
    engine_args = asdict(req_data.engine_args) | {
        "seed": args.seed,
        "mm_processor_cache_gb": 0 if args.disable_mm_processor_cache else 4,
    }
    llm = LLM(**engine_args)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=req_data.stop_token_ids)

    inputs = [
        {
            "prompt": req_data.prompts[i % len(req_data.prompts)],
            "multi_modal_data": {args.modality: data},
            "multi_modal_uuids": {args.modality: f"uuid_{i % len(req_data.prompts)}"},
        }
        for i in range(args.num_prompts)
    ]
    with time_counter(args.time_generate):
        outputs = llm.generate(inputs, sampling_params=sampling_params, lora_request=req_data.lora_requests)
    for output in outputs:
        print(f"Generated text: {output.outputs[0].text!r}")

    if args.verify_mm_cache_hit_with_uuids:
        hit = [{**one, "multi_modal_data": {args.modality: None}} for one in inputs]
        for output in llm.generate(hit, sampling_params=sampling_params):
            print(f"Cached text: {output.outputs[0].text!r}")
        try:
            unknown = {**hit[0], "multi_modal_uuids": {args.modality: "uuid_never_sent"}}
            llm.generate(unknown, sampling_params=sampling_params)
        except ValueError as wrong:
            print(f"Missed: {'uuid_never_sent' in str(wrong)!r}")


if __name__ == "__main__":
    main()
