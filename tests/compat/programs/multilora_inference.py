"""Requests of one engine with several LoRA adapters and without; arguments: the model, folders of two adapters."""

import sys

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest


def create_test_prompts(paths: list[str]) -> list[tuple[str, SamplingParams, LoRARequest | None]]:
    """A prompt for the base, then two adapters, the first of them twice."""
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=8, seed=1)
    first, second = LoRARequest("sql-lora", 1, paths[0]), LoRARequest("sql-lora2", 2, paths[1])
    return [
        ("A robot may not injure a human being", greedy, None),
        ("To be or not to be,", drawn, None),
        ("Which table lists the games?", greedy, first),
        ("Which table lists the games?", greedy, second),
        ("Which table lists the games?", greedy, None),
        ("Name the nationality", drawn, first),
    ]


def process_requests(engine: LLMEngine, test_prompts: list[tuple[str, SamplingParams, LoRARequest | None]]) -> None:
    request_id = 0
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params, lora_request = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params, lora_request=lora_request)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for output in request_outputs:
            if output.finished:
                name = None if output.lora_request is None else output.lora_request.lora_name
                ids = list(output.outputs[0].token_ids)
                print(f"Finished: {[output.request_id, name, output.prompt_token_ids, ids]!r}")


def main() -> None:
    engine_args = EngineArgs(
        model=sys.argv[1], enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, max_num_seqs=256,
    )  # fmt: skip
    engine = LLMEngine.from_engine_args(engine_args)
    process_requests(engine, create_test_prompts(sys.argv[2:]))


if __name__ == "__main__":
    main()
