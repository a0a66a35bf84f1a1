"""No, one or two pieces of audio in a prompt, with a prompt format per model type."""

import os
import wave
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from vllm import LLM, EngineArgs, SamplingParams
from vllm.assets.audio import AudioAsset  # noqa: F401
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

os.environ["TOKENIZERS_PARALLELISM"] = "false"
question_per_audio_count = {0: "What is 1+1?", 1: "What is recited here?", 2: "What do the two have in common?"}


class ModelRequestData(NamedTuple):
    engine_args: EngineArgs
    prompt: str | None = None
    prompt_token_ids: dict[str, list[int]] | None = None
    multi_modal_data: dict[str, Any] | None = None
    stop_token_ids: list[int] | None = None
    lora_requests: list[LoRARequest] | None = None


def run_qwen2_audio(model: str, question: str, audio_count: int) -> ModelRequestData:
    engine_args = EngineArgs(
        model=model, max_model_len=512, max_num_seqs=5, dtype="float32", limit_mm_per_prompt={"audio": audio_count}
    )
    audio = "".join(f"Audio {i + 1}: <|audio_bos|><|AUDIO|><|audio_eos|>\n" for i in range(audio_count))
    return ModelRequestData(engine_args=engine_args, prompt=f"USER: {audio}{question}\nASSISTANT:")


def run_phi4mm(model: str, question: str, audio_count: int) -> ModelRequestData:
    placeholders = "".join("<|audio|>" for _ in range(audio_count))
    engine_args = EngineArgs(
        model=model, max_model_len=512, max_num_seqs=2, dtype="float32", limit_mm_per_prompt={"audio": audio_count}
    )
    return ModelRequestData(engine_args=engine_args, prompt=f"USER: {placeholders}{question}\nASSISTANT:")


model_example_map = {"qwen2_audio": run_qwen2_audio, "phi4_mm": run_phi4mm}


def read_audio(path: str) -> tuple[np.ndarray, int]:
    with wave.open(path) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return samples.astype(np.float32) / 32768, file.getframerate()


def main() -> None:
    parser = FlexibleArgumentParser(description="Audio language models")
    parser.add_argument("--model-type", "-m", choices=model_example_map.keys(), default="qwen2_audio")
    parser.add_argument("--model", required=True)
    parser.add_argument("--audio", nargs="*", default=[])
    parser.add_argument("--num-prompts", type=int, default=1)
    parser.add_argument("--num-audios", type=int, default=1, choices=[0, 1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=None)
    args = parser.parse_args()

    audio_count = args.num_audios
    req_data = model_example_map[args.model_type](args.model, question_per_audio_count[audio_count], audio_count)
    default_limits = {"image": 0, "video": 0, "audio": 0}
    req_data.engine_args.limit_mm_per_prompt = default_limits | dict(req_data.engine_args.limit_mm_per_prompt or {})
    engine_args = asdict(req_data.engine_args) | {"seed": args.seed}
    if args.tensor_parallel_size:
        engine_args["tensor_parallel_size"] = args.tensor_parallel_size
    llm = LLM(**engine_args)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=req_data.stop_token_ids)

    mm_data = {"audio": [read_audio(path) for path in args.audio[:audio_count]]} if audio_count > 0 else {}
    inputs: dict[str, Any] = {"multi_modal_data": mm_data, "prompt": req_data.prompt}
    batch = [inputs] * args.num_prompts if args.num_prompts > 1 else inputs
    lora_request = req_data.lora_requests * args.num_prompts if req_data.lora_requests else None
    for output in llm.generate(batch, sampling_params=sampling_params, lora_request=lora_request):
        print(f"Generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
