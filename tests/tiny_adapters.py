"""LoRA adapters for the tiny models, in the form in which PEFT writes them, and the models that they amount to.

`write_adapter(model, folder, ...)` draws A and B for modules of a transformers model and writes a folder;
`merge(model, adapter)` is a copy of the model whose weights are W + scale * B A: what an engine must compute without
merging. Modules are found by the last part of their names, experts (stacked in transformers) as '3.gate_proj'.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Low:
    """One module's part of an adapter."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float


@dataclass(frozen=True)
class TinyAdapter:
    path: str
    parts: dict[str, Low]  # by the module's name


def linear_modules(model: nn.Module, targets: Iterable[str] | None) -> dict[str, tuple[int, int]]:
    """name -> (out, in) of every matmul whose last name is among the targets; None: of all but the head."""
    wanted = None if targets is None else set(targets)
    found = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if (last == "lm_head") if wanted is None else (last not in wanted):
            continue
        if isinstance(module, nn.Linear):
            found[name] = (module.out_features, module.in_features)
        elif type(module).__name__ == "Conv1D":
            found[name] = (module.weight.shape[1], module.weight.shape[0])
    return found


def expert_modules(model: nn.Module, experts: Iterable[int]) -> dict[str, tuple[int, int]]:
    """Per-expert names of mixtures whose experts transformers stacks: [E, 2 ffn, width] and [E, width, ffn]."""
    found = {}
    for name, module in model.named_modules():
        if not name.endswith(".experts") or not hasattr(module, "gate_up_proj"):
            continue
        ffn, width = module.gate_up_proj.shape[1] // 2, module.gate_up_proj.shape[2]
        for expert in experts:
            found[f"{name}.{expert}.gate_proj"] = found[f"{name}.{expert}.up_proj"] = (ffn, width)
            found[f"{name}.{expert}.down_proj"] = (width, ffn)
    return found


def write_adapter(
    model: nn.Module,
    folder: Path,
    *,
    targets: Iterable[str] | None = None,
    rank: int = 4,
    alpha: float = 6.0,
    seed: int = 1,
    rslora: bool = False,
    strength: float = 0.3,
    modules: dict[str, tuple[int, int]] | None = None,
    config: dict[str, Any] | None = None,
    as_bin: bool = False,
) -> TinyAdapter:
    draw = torch.Generator().manual_seed(seed)
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    parts, tensors = {}, {}
    for name, (rows, width) in (linear_modules(model, targets) if modules is None else modules).items():
        a = torch.randn((rank, width), generator=draw) * width**-0.5
        b = torch.randn((rows, rank), generator=draw) * strength
        parts[name] = Low(a, b, scale)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    if as_bin:
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        save_file(tensors, str(folder / "adapter_model.safetensors"))
    written = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "use_rslora": rslora, "bias": "none",
        "task_type": "CAUSAL_LM", "target_modules": sorted({name.rpartition(".")[2] for name in parts}), 
        "base_model_name_or_path": "tiny",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(written | (config or {})))
    return TinyAdapter(str(folder), parts)


def merge(model: Any, adapter: TinyAdapter) -> Any:
    merged = copy.deepcopy(model)
    modules = dict(merged.named_modules())
    with torch.no_grad():
        for name, low in adapter.parts.items():
            delta = low.scale * (low.b @ low.a)
            module = modules.get(name)
            if module is None:
                _merge_expert(modules, name, delta)
            elif type(module).__name__ == "Conv1D":
                module.weight += delta.t()
            else:
                module.weight += delta
    return merged


def _merge_expert(modules: dict[str, Any], name: str, delta: Tensor) -> None:
    path, expert, part = name.rsplit(".", 2)
    experts = modules[path]
    if part == "down_proj":
        experts.down_proj[int(expert)] += delta
        return
    ffn = experts.gate_up_proj.shape[1] // 2
    rows = slice(0, ffn) if part == "gate_proj" else slice(ffn, 2 * ffn)
    experts.gate_up_proj[int(expert), rows] += delta


@torch.no_grad()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers goes on with, computed anew at every step."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
