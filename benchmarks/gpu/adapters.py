"""Decodes with LoRA adapters beside the same decodes without, in turns: `bs32` of offline.py, requests spread over the
adapters.

    python benchmarks/gpu/adapters.py FOLDER [--adapters 8] [--rank 16] [--requests 32] [--rounds 3]
                                      [--modules q_proj,v_proj] [--no-plain] [--profile]

FOLDER: one of those that models.py writes. Prints output tokens a second of the base model and of the adapters on one
engine, and, unless --no-plain, of an engine without enable_lora. Adapters are random, of every matmul.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from quire import LLM, LoRARequest, SamplingParams

OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 10240, "gpu_memory_utilization": 0.9,
    "seed": 0,
}  # fmt: skip
KERNELS = 14


def modules_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """name within a layer -> (rows, width), of the dense models of models.py."""
    width, ffn, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        "self_attn.q_proj": (heads, width), "self_attn.k_proj": (kv_heads, width),
        "self_attn.v_proj": (kv_heads, width), "self_attn.o_proj": (width, heads),
        "mlp.gate_proj": (ffn, width), "mlp.up_proj": (ffn, width), "mlp.down_proj": (width, ffn),
    }  # fmt: skip


def write_adapter(config: dict[str, Any], folder: Path, rank: int, modules: list[str], seed: int) -> None:
    draw, tensors = torch.Generator("cuda").manual_seed(seed), {}

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=draw, device="cuda") * scale).bfloat16().cpu()

    for layer in range(config["num_hidden_layers"]):
        for name, (rows, width) in modules_of(config).items():
            if not modules or name.rpartition(".")[2] in modules:
                stem = f"base_model.model.model.layers.{layer}.{name}.lora_"
                tensors[f"{stem}A.weight"] = normal(rank, width, scale=width**-0.5)
                tensors[f"{stem}B.weight"] = normal(rows, rank, scale=0.01)
    folder.mkdir()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(about))


class Load:
    """Requests of 128 + 256 tokens."""

    def __init__(self, requests: int) -> None:
        self.requests, self._dice = requests, random.Random(0)
        self._params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=256, detokenize=False)

    def prompts(self) -> list[Any]:
        ids = [[self._dice.randrange(10, 150_000) for _ in range(128)] for _ in range(self.requests)]
        return [{"prompt_token_ids": each} for each in ids]

    def run(self, llm: LLM, loras: list[LoRARequest | None] | None) -> float:
        """Output tokens a second."""
        prompts, began = self.prompts(), time.perf_counter()
        llm.generate(prompts, self._params, lora_request=loras, use_tqdm=False)
        return 256 * self.requests / (time.perf_counter() - began)

    def kernels(self, llm: LLM, loras: list[LoRARequest | None]) -> None:
        """The kernels of ten decode steps."""
        engine = llm.llm_engine
        for number, (prompt, lora) in enumerate(zip(self.prompts(), loras, strict=True)):
            engine.add_request(f"profiled-{number}", prompt, self._params, lora_request=lora)
        for _ in range(60):
            engine.step()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(10):
                engine.step()
            torch.cuda.synchronize()
        while engine.has_unfinished_requests():
            engine.step()
        for event in sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:KERNELS]:
            print(f"  {event.self_device_time_total / 1e4:8.3f} ms a step, {event.count / 10:5.1f} x {event.key[:90]}")


def show(kind: str, found: list[float], base: float) -> None:
    middle, each = statistics.median(found), " ".join(f"{one:.0f}" for one in found)
    print(f"{kind:28} {middle:6.0f} tokens/s, {middle / base:.3f} of base with enable_lora ({each})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("adapters", 8), ("rank", 16), ("requests", 32), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--modules", default="")
    parser.add_argument("--options", default="{}", type=json.loads)
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    config = json.loads((Path(asked.model) / "config.json").read_text())
    load, options = Load(asked.requests), OPTIONS | asked.options
    with tempfile.TemporaryDirectory() as folder:
        names, modules = [f"a{n}" for n in range(asked.adapters)], [m for m in asked.modules.split(",") if m]
        for number, name in enumerate(names):
            write_adapter(config, Path(folder) / name, asked.rank, modules, number)
        torch.cuda.empty_cache()
        loras: list[LoRARequest | None] = [
            LoRARequest(names[n % len(names)], 1 + n % len(names), str(Path(folder) / names[n % len(names)]))
            for n in range(asked.requests)
        ]
        llm = LLM(asked.model, enable_lora=True, max_loras=asked.adapters, max_lora_rank=asked.rank, **options)
        kinds = {"base, with enable_lora": None, f"{asked.adapters} adapters of rank {asked.rank}": loras}
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(asked.rounds + 1):
            for kind, given in kinds.items():
                speed = load.run(llm, given)
                if turn:  # the first one warms up, reads adapters and captures graphs
                    found[kind].append(speed)
        base = statistics.median(found[next(iter(kinds))])
        for kind, speeds in found.items():
            show(kind, speeds, base)
        if asked.profile:
            load.kernels(llm, loras)
        llm.close()
    if not asked.no_plain:
        llm = LLM(asked.model, **options)
        speeds = [load.run(llm, None) for _ in range(asked.rounds + 1)][1:]
        show("base, without enable_lora", speeds, base)
        llm.close()


if __name__ == "__main__":
    main()
