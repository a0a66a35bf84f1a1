"""LoRA adapters for the tiny models, in the form in which PEFT writes them, and the models that they amount to.

`write_adapter(model, folder, ...)` draws A and B for modules of a transformers model and writes a folder;
`merge(model, adapter)` is a copy of the model whose weights are W + scale * B A: what an engine must compute without
merging. A matrix that the embedding and the head share is two matrices in the copy. Modules are found by the last part
of their names, experts (stacked in transformers) as '3.gate_proj'; `write_stacked` adapts all experts at once.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Low:
    """One module's part of an adapter."""

    a: Tensor  # [rank, in]; of an embedding [rank, rows]
    b: Tensor  # [out, rank]; of an embedding [width, rank]
    scale: float

    def delta(self) -> Tensor:
        return self.scale * (self.b @ self.a)


@dataclass(frozen=True)
class StackedLow:
    """The part of a parameter [experts, ., .], as PEFT stores it."""

    a: Tensor  # [experts * rank, in]
    b: Tensor  # [out, rank * experts]
    scale: float
    experts: int
    axes: str  # of the result: 'e o i' or 'e i o'

    def delta(self) -> Tensor:
        a, b = self.a.reshape(self.experts, -1, self.a.shape[1]), self.b.reshape(len(self.b), -1, self.experts)
        return self.scale * torch.einsum(f"o r e, e r i -> {self.axes}", b, a)


@dataclass(frozen=True)
class TinyAdapter:
    path: str
    parts: dict[str, Any]  # Low or StackedLow, by the module's or the parameter's name


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
        elif isinstance(module, nn.Embedding) and wanted is not None:
            found[name] = (module.embedding_dim, module.num_embeddings)
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
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for name, (rows, width) in (linear_modules(model, targets) if modules is None else modules).items():
        a = torch.randn((rank, width), generator=draw) * (1.0 if name in tables else width**-0.5)
        b = torch.randn((rows, rank), generator=draw) * strength
        parts[name] = Low(a, b, scale)
        stem = f"base_model.model.{name}.lora_"
        spelled = ("embedding_A", "embedding_B") if name in tables else ("A.weight", "B.weight")
        tensors |= {f"{stem}{spelled[0]}": a, f"{stem}{spelled[1]}": b}
    written = {"r": rank, "lora_alpha": alpha, "use_rslora": rslora} | (config or {})
    write_folder(
        folder, tensors, {"target_modules": sorted({name.rpartition(".")[2] for name in parts})} | written, as_bin
    )
    return TinyAdapter(str(folder), parts)


def write_folder(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], as_bin: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if as_bin:
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        save_file(tensors, str(folder / "adapter_model.safetensors"))
    about = {"peft_type": "LORA", "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(about | config))


def stacked_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that hold a matrix of every expert."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 3 and "conv" not in name
    }


def write_stacked(
    model: nn.Module, folder: Path, *, leaves: Sequence[str] = ("gate_up_proj", "down_proj"), rank: int = 4,
    alpha: float = 6.0, seed: int = 1, axes: str = "e o i", strength: float = 0.3, config: dict[str, Any] | None = None,
) -> TinyAdapter:  # fmt: skip
    """`leaves`: which parameters, in the order in which PEFT wraps them: that of the module. `axes`: see StackedLow."""
    draw = torch.Generator().manual_seed(seed)
    parts, tensors = {}, {}
    for name, parameter in stacked_parameters(model).items():
        module, _, leaf = name.rpartition(".")
        if leaf not in leaves:
            continue
        sizes = dict(zip(axes.split(), parameter.shape, strict=True))
        a = torch.randn((sizes["e"] * rank, sizes["i"]), generator=draw) * sizes["i"] ** -0.5
        b = torch.randn((sizes["o"], rank * sizes["e"]), generator=draw) * strength
        parts[name] = StackedLow(a, b, alpha / rank, sizes["e"], axes)
        stem = f"base_model.model.{module}" + ".base_layer" * (len(leaves) - 1 - leaves.index(leaf))
        tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    targets = sorted({name.split(".", 3)[3] if name.count(".") > 3 else name for name in parts})
    written = {"r": rank, "lora_alpha": alpha, "target_modules": [], "target_parameters": targets}
    write_folder(folder, tensors, written | (config or {}))
    return TinyAdapter(str(folder), parts)


def merge(model: Any, adapter: TinyAdapter) -> Any:
    merged = copy.deepcopy(model)
    modules = dict(merged.named_modules())
    with torch.no_grad():
        for name, low in adapter.parts.items():
            module, delta = modules.get(name), low.delta()
            if isinstance(low, StackedLow):
                path, _, leaf = name.rpartition(".")
                getattr(modules[path], leaf).add_(delta)
            elif module is None:
                _merge_expert(modules, name, delta)
            else:
                is_turned = isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"
                module.weight = nn.Parameter(module.weight + (delta.t() if is_turned else delta))
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
