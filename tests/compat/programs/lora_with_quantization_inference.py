"""Adapters of quantized models, one engine after another; arguments: an adapter, then METHOD=MODEL for each engine."""

import gc
import sys
import weakref

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest

PROMPT = "my name is"


def create_test_prompts(lora_path: str) -> list[tuple[str, SamplingParams, LoRARequest | None]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    adapters = [LoRARequest("lora-test-1", 1, lora_path), LoRARequest("lora-test-2", 2, lora_path)]
    return [(PROMPT, params, None), *((PROMPT, params, one) for one in adapters)]


def process_requests(
    name: str, engine: LLMEngine, test_prompts: list[tuple[str, SamplingParams, LoRARequest | None]]
) -> None:
    request_id = 0
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params, lora_request = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params, lora_request=lora_request)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for output in request_outputs:
            if output.finished:
                adapter = None if output.lora_request is None else output.lora_request.lora_name
                ids = list(output.outputs[0].token_ids)
                print(f"Finished: {[name, output.request_id, adapter, output.prompt_token_ids, ids]!r}")


def initialize_engine(model: str, quantization: str) -> LLMEngine:
    args = EngineArgs(
        model=model, quantization=quantization, dtype="float32", enable_lora=True, max_lora_rank=64, max_loras=4,
    )  # fmt: skip
    return LLMEngine.from_engine_args(args)


def main() -> None:
    lora_path = sys.argv[1]
    for argument in sys.argv[2:]:
        quantization, _, model = argument.partition("=")
        engine = initialize_engine(model, quantization)
        process_requests(quantization, engine, create_test_prompts(lora_path))
        watched = weakref.ref(engine)
        del engine
        gc.collect()
        print(f"Freed: {watched() is None!r}")


if __name__ == "__main__":
    main()
