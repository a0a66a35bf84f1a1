"""A logits processor of one's own: requests say which tokens they do not want to see.

python examples/logits_processor.py
"""

import torch

from quire import LLM, SamplingParams
from quire.sampling.processors import BatchUpdate, LogitsProcessor, process_dict_updates


class Without(LogitsProcessor):
    """Bans the tokens of `extra_args["without"]`, request by request."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        banned = (params.extra_args or {}).get("without", [])
        if not isinstance(banned, list) or not all(isinstance(token, int) for token in banned):
            raise ValueError(f"without must be a list of token ids, got {banned!r}")

    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, list[int]] = {}  # row of the batch -> banned tokens

    def is_argmax_invariant(self) -> bool:
        return False  # greedy requests need it too

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Requests come, go and move between rows; this keeps the table right."""
        process_dict_updates(self.rows, batch_update, lambda params, _, __: (params.extra_args or {}).get("without"))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, banned in self.rows.items():
            logits[row, banned] = float("-inf")
        return logits


if __name__ == "__main__":
    llm = LLM(max_model_len=1024, logits_processors=[Without])
    prompt = "The capital of France is"
    plain = SamplingParams(temperature=0, max_tokens=6)
    first = llm.generate(prompt, plain, use_tqdm=False)[0].outputs[0]
    banned = SamplingParams(temperature=0, max_tokens=6, extra_args={"without": [first.token_ids[0]]})
    second = llm.generate(prompt, banned, use_tqdm=False)[0].outputs[0]
    print(f"{prompt}{first.text}")
    print(f"{prompt}{second.text}   (without the token {llm.get_tokenizer().decode(first.token_ids[:1])!r})")
    assert second.token_ids[0] != first.token_ids[0]
