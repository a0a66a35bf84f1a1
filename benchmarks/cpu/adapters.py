"""One stream of the embedded model with a LoRA adapter of every matmul, beside the same stream without, in turns.

    python benchmarks/cpu/adapters.py [--rank 16] [--tokens 96] [--rounds 8] [--modules q_proj,v_proj]

Prints tokens a second of the best round, the ratio of the medians, and processor time. The adapter is random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.layers.linear import Linear


def write_adapter(llm: LLM, folder: Path, rank: int, modules: list[str]) -> int:
    """Returns how many matmuls it changes."""
    sizes: dict[str, tuple[int, int]] = {}

    def measure(model: Any) -> None:
        for layer in model.modules():
            if isinstance(layer, Linear) and ".layers." in layer.prefix:
                parts = {part: rows for part, rows in layer.parts.items() if not modules or part in modules}
                sizes.update({layer.prefix + part: (rows, layer.in_size) for part, rows in parts.items()})

    llm.apply_model(measure)
    draw, tensors = torch.Generator().manual_seed(0), {}
    for name, (rows, width) in sizes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn((rank, width), generator=draw) * width**-0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn((rows, rank), generator=draw) * 0.01
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return len(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--modules", default="")
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    prompt: Any = {"prompt_token_ids": list(range(10, 42))}
    options: dict[str, Any] = {"max_model_len": 512, "enable_prefix_caching": False, "kv_cache_memory_bytes": 1 << 27}
    with tempfile.TemporaryDirectory() as folder, LLM(enable_lora=True, max_lora_rank=64, **options) as llm:
        count = write_adapter(llm, Path(folder), args.rank, [one for one in args.modules.split(",") if one])
        kinds = {"base": None, "adapter": LoRARequest("a", 1, folder)}
        walls: dict[str, list[float]] = {kind: [] for kind in kinds}
        work: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(args.rounds + 1):
            for kind, lora in kinds.items():
                began, used = time.perf_counter(), time.process_time()
                llm.generate(prompt, params, lora_request=lora, use_tqdm=False)
                if turn:  # the first warms up
                    walls[kind].append(time.perf_counter() - began)
                    work[kind].append(time.process_time() - used)
    print(f"rank {args.rank}, {count} matmuls, {args.tokens} tokens, {args.rounds} rounds")
    for kind in kinds:
        print(f"  {kind:8} {args.tokens / min(walls[kind]):6.1f} tokens/s, {min(work[kind]):.2f} s of processor time")
    base, adapter = (statistics.median(walls[kind]) for kind in kinds)
    print(f"  ratio of medians {base / adapter:.3f}, of processor time {min(work['base']) / min(work['adapter']):.3f}")


if __name__ == "__main__":
    main()
