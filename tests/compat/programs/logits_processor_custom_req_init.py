"""A wrapped processor that reads the engine's configuration when it is made, and the prompt when it runs."""

import sys

import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class EchoPrompt:
    """Forces the prompt's own tokens, one after the other."""

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        token = prompt_ids[len(output_ids) % len(prompt_ids)]
        kept = logits[token].item()
        logits[:] = float("-inf")
        logits[token] = kept
        return logits


class WrappedEcho(AdapterLogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.is_cuda = device.type == "cuda"
        self.max_len = vllm_config.model_config.max_model_len

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        if not (params.extra_args and params.extra_args.get("echo")):
            return None
        if self.is_cuda or self.max_len < 1:
            raise ValueError("wrong configuration")
        return EchoPrompt()


def main() -> None:
    llm = LLM(model=sys.argv[1], logits_processors=[WrappedEcho])
    params = [SamplingParams(temperature=0.0, max_tokens=6, extra_args={"echo": echo}) for echo in (True, False)]
    prompts = ["the old stone bridge while seven children"] * 2
    for output in llm.generate(prompts, params):
        print(f"Prompt ids: {list(output.prompt_token_ids)}")
        print(f"Ids: {list(output.outputs[0].token_ids)}")


if __name__ == "__main__":
    main()
