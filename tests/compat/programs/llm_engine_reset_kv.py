"""The prefix cache is reset while requests run; they are computed again and end as they would have."""

import argparse
import json

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def create_test_prompts() -> list[tuple[str, SamplingParams]]:
    return [
        ("A robot may not injure a human being " * 5, SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.0, top_k=5, presence_penalty=0.2)),
        ("What is the meaning of life?", SamplingParams(n=2, temperature=0.0, top_p=0.95, frequency_penalty=0.1)),
    ]


def process_requests(engine: LLMEngine, test_prompts: list[tuple[str, SamplingParams]], reset_at: int) -> None:
    request_id = 0
    step_id = 0
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        if step_id == reset_at:
            print(f"Reset: {engine.reset_prefix_cache(reset_running_requests=True)}")
        request_outputs: list[RequestOutput] = engine.step()
        for output in request_outputs:
            if output.finished:
                prompt_logprobs = output.prompt_logprobs and [
                    entry and sorted((token, round(p.logprob, 3)) for token, p in entry.items())
                    for entry in output.prompt_logprobs
                ]
                ids = [list(completion.token_ids) for completion in output.outputs]
                print(json.dumps([output.request_id, ids, prompt_logprobs]))
        step_id += 1


def main(args: argparse.Namespace) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    process_requests(engine, create_test_prompts(), args.reset_at)


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="Reset the cache in the middle")
    parser = EngineArgs.add_cli_args(parser)
    parser.add_argument("--reset-at", type=int, default=10)
    main(parser.parse_args())
