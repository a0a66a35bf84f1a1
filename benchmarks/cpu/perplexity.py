"""Perplexity of the embedded model, its blocks multiplied as stored against decoded to float32, on given texts.

python benchmarks/cpu/perplexity.py FILE [FILE ...]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from quire import LLM, SamplingParams

LENGTH = 1000  # tokens per piece


def perplexity(texts: list[str], **options: str) -> tuple[int, float]:
    llm = LLM(max_model_len=1024, kv_cache_memory_bytes=128 << 20, **options)
    encode = llm.get_tokenizer().encode
    pieces = [ids[at : at + LENGTH] for ids in map(encode, texts) for at in range(0, len(ids), LENGTH)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in pieces if len(ids) > 1], params, use_tqdm=False)
    found = [
        entry[token].logprob
        for out in outputs
        for token, entry in zip(out.prompt_token_ids, out.prompt_logprobs, strict=True)
        if entry
    ]
    llm.close()
    return len(found), math.exp(-sum(found) / len(found))


def main() -> None:
    texts = [Path(path).read_text(encoding="utf-8") for path in sys.argv[1:]]
    count, decoded = perplexity(texts, dtype="float32")
    _, stored = perplexity(texts, dtype="auto")
    print(f"{count} tokens: decoded {decoded:.3f}, as stored {stored:.3f} ({100 * (stored / decoded - 1):+.2f} %)")


if __name__ == "__main__":
    main()
