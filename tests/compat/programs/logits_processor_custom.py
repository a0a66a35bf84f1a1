"""A processor over the whole batch that forces a token, for the requests that ask for it."""

import sys

import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class DummyLogitsProcessor(LogitsProcessor):
    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        target_token = params.extra_args and params.extra_args.get("target_token")
        if target_token is not None and not isinstance(target_token, int):
            raise ValueError(f"target_token value {target_token} {type(target_token)} is not int")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def extract_extra_arg(params: SamplingParams) -> int | None:
            self.validate_params(params)
            return params.extra_args and params.extra_args.get("target_token")

        process_dict_updates(self.req_info, batch_update, lambda params, _, __: extract_extra_arg(params))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.req_info:
            return logits
        cols = torch.tensor(list(self.req_info.values()), dtype=torch.long, device=logits.device)
        rows = torch.tensor(list(self.req_info.keys()), dtype=torch.long, device=logits.device)
        values_to_keep = logits[rows, cols].clone()
        logits[rows] = float("-inf")
        logits[rows, cols] = values_to_keep
        return logits


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
    llm = LLM(model=sys.argv[1], logits_processors=[DummyLogitsProcessor])
    outputs = llm.generate(prompts, sampling_params_list)
    print("-" * 60)
    for output in outputs:
        print(
            f"Prompt: {output.prompt!r}\nOutput: {output.outputs[0].text!r}\nIds: {list(output.outputs[0].token_ids)}"
        )
    try:
        llm.generate(prompts[0], SamplingParams(extra_args={"target_token": "text"}))
    except ValueError as wrong:
        print(f"Refused: {wrong}")
    plain = LLM(model=sys.argv[1]).generate(prompts, SamplingParams(temperature=0.0))
    for output in plain:
        print(f"Plain: {list(output.outputs[0].token_ids)}")


if __name__ == "__main__":
    main()
