"""A processor of one request, wrapped for the batch."""

import sys
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

logger = init_logger(__name__)


class DummyPerReqLogitsProcessor:
    """Masks every logit but the target's."""

    def __init__(self, target_token: int) -> None:
        self.target_token = target_token

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        val_to_keep = logits[self.target_token].item()
        logits[:] = float("-inf")
        logits[self.target_token] = val_to_keep
        return logits


class WrappedPerReqLogitsProcessor(AdapterLogitsProcessor):
    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        target_token: Any | None = params.extra_args and params.extra_args.get("target_token")
        if target_token is not None and not isinstance(target_token, int):
            raise ValueError(f"target_token value {target_token} is not int")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        target_token: Any | None = params.extra_args and params.extra_args.get("target_token")
        if target_token is None:
            return None
        return DummyPerReqLogitsProcessor(target_token)


prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params_list = [
    SamplingParams(temperature=0.0, extra_args={"target_token": 128}),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, extra_args={"target_token": 67}),
    SamplingParams(temperature=0.0),
]


def main() -> None:
    logger.info_once("one wrapped processor")
    llm = LLM(model=sys.argv[1], logits_processors=[WrappedPerReqLogitsProcessor])
    outputs = llm.generate(prompts, sampling_params_list)
    print("-" * 60)
    for output in outputs:
        print(
            f"Prompt: {output.prompt!r}\nOutput: {output.outputs[0].text!r}\nIds: {list(output.outputs[0].token_ids)}"
        )
    plain = LLM(model=sys.argv[1]).generate(prompts, SamplingParams(temperature=0.0))
    for output in plain:
        print(f"Plain: {list(output.outputs[0].token_ids)}")


if __name__ == "__main__":
    main()
