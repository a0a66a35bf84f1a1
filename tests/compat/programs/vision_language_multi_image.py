"""Several images in one prompt, by generate and by chat; images come from URLs."""

from dataclasses import asdict
from typing import NamedTuple

from PIL.Image import Image
from transformers import AutoProcessor, AutoTokenizer  # noqa: F401
from vllm import LLM, EngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.utils import fetch_image
from vllm.utils.argparse_utils import FlexibleArgumentParser

QUESTION = "What is the content of each image?"


class ModelRequestData(NamedTuple):
    engine_args: EngineArgs
    prompt: str
    image_data: list[Image]
    stop_token_ids: list[int] | None = None
    chat_template: str | None = None
    lora_requests: list[LoRARequest] | None = None
    sampling_params: list[SamplingParams] | None = None


def load_llava(model: str, question: str, image_urls: list[str]) -> ModelRequestData:
    engine_args = EngineArgs(
        model=model, max_model_len=256, max_num_seqs=16, limit_mm_per_prompt={"image": len(image_urls)}
    )
    placeholders = "".join("<image>\n" for _ in image_urls)
    return ModelRequestData(
        engine_args=engine_args,
        prompt=f"user: {placeholders}{question}\nassistant:",
        image_data=[fetch_image(url) for url in image_urls],
    )


def run_generate(model: str, question: str, image_urls: list[str], seed: int) -> None:
    req_data = load_llava(model, question, image_urls)
    llm = LLM(**(asdict(req_data.engine_args) | {"seed": seed}))
    sampling_params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=req_data.stop_token_ids)
    outputs = llm.generate(
        {"prompt": req_data.prompt, "multi_modal_data": {"image": req_data.image_data}},
        sampling_params=sampling_params,
        lora_request=req_data.lora_requests,
    )
    for output in outputs:
        print(f"Generated text: {output.outputs[0].text!r}")


def run_chat(model: str, question: str, image_urls: list[str], seed: int) -> None:
    req_data = load_llava(model, question, image_urls)
    req_data.engine_args.limit_mm_per_prompt = {"image": len(image_urls), "video": 0}
    req_data.engine_args.allowed_local_media_path = "/"
    llm = LLM(**(asdict(req_data.engine_args) | {"seed": seed}))
    sampling_params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=req_data.stop_token_ids)
    outputs = llm.chat(
        [
            {
                "role": "user",
                "content": [
                    *({"type": "image_url", "image_url": {"url": url}} for url in image_urls),
                    {"type": "text", "text": question},
                ],
            }
        ],
        sampling_params=sampling_params,
        chat_template=req_data.chat_template,
        lora_request=req_data.lora_requests,
    )
    for output in outputs:
        print(f"Generated text: {output.outputs[0].text!r}")


def main() -> None:
    parser = FlexibleArgumentParser(description="Several images")
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", choices=["generate", "chat"], default="generate")
    parser.add_argument("--images", nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    run = run_generate if args.method == "generate" else run_chat
    run(args.model, QUESTION, args.images, args.seed)


if __name__ == "__main__":
    main()
