"""A checkpoint in safetensors, rounded to nearest, in the formats that exporters write.

    python benchmarks/cpu/make_quantized.py SOURCE FOLDER --format FORMAT [--group 64] [--head]

SOURCE is a folder with plain weights (export.py makes one of the embedded model). Every matrix of attention and MLP is
coded, and the head with --head; embeddings and norms stay as they are. Nothing is calibrated: what is measured on the
result is the format and its kernels, not a method of choosing codes.

    gptq    4 bits, symmetric, a scale for each group of columns; zero points stored minus one
    awq     4 bits with zero points, gemm order
    int8    compressed-tensors W8A8: a scale for each row; inputs are rounded for each token
    fp8     compressed-tensors: e4m3, a scale for each row
    int8-head  plain numbers, those of the head rounded as `quantization_config={"lm_head": "int8"}` does on a GPU
    fp8-head   the same with "fp8"
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns each nibble of a word holds
Tensors = dict[str, Tensor]
HEAD = "lm_head.weight"


def in_words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[..., 8 n] of 0 to 15 -> int32 [..., n]: eight nibbles a word, the lowest first."""
    eights = codes.long().unflatten(-1, (-1, 8))
    word = sum(eights[..., column] << (4 * place) for place, column in enumerate(order))
    assert isinstance(word, Tensor)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32).contiguous()


def gptq(name: str, weight: Tensor, group: int) -> Tensors:
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, group)
    scales = (grouped.abs().amax(-1) / 7).clamp(min=1e-6).half()  # [rows, groups]
    codes = (grouped / scales.float()[..., None]).round().clamp(-8, 7) + 8
    return {
        f"{name}.qweight": in_words(codes.view(rows, columns)).t().contiguous(),
        f"{name}.qzeros": in_words(torch.full((columns // group, rows), 7)),
        f"{name}.scales": scales.t().contiguous(),
        f"{name}.g_idx": (torch.arange(columns) // group).int(),
    }


def awq(name: str, weight: Tensor, group: int) -> Tensors:
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = ((grouped / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return {
        f"{name}.qweight": in_words(codes.view(rows, columns).t(), AWQ_ORDER),
        f"{name}.qzeros": in_words(zeros.t(), AWQ_ORDER),
        f"{name}.scales": scales.t().contiguous(),
    }


def int8(name: str, weight: Tensor, group: int) -> Tensors:
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
    return {f"{name}.weight": (weight / scale).round().to(torch.int8), f"{name}.weight_scale": scale}


def fp8(name: str, weight: Tensor, group: int) -> Tensors:
    scale = (weight.abs().amax(1, keepdim=True) / 448).clamp(min=1e-8)
    return {f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn), f"{name}.weight_scale": scale}


def compressed(form: str, kind: str) -> Callable[[int], dict[str, Any]]:
    def config(group: int) -> dict[str, Any]:
        numbers = {"num_bits": 8, "type": kind, "symmetric": True}
        scheme = {"targets": ["Linear"], "weights": numbers | {"strategy": "channel", "dynamic": False},
                  "input_activations": numbers | {"strategy": "token", "dynamic": True}}  # fmt: skip
        return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
                "config_groups": {"group_0": scheme}, "kv_cache_scheme": None}  # fmt: skip

    return config


FORMATS: dict[str, tuple[Callable[[str, Tensor, int], Tensors], Callable[[int], dict[str, Any]]]] = {
    "gptq": (gptq, lambda group: {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True,
                                  "desc_act": False, "checkpoint_format": "gptq"}),
    "awq": (awq, lambda group: {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True,
                                "version": "gemm"}),
    "int8": (int8, compressed("int-quantized", "int")),
    "fp8": (fp8, compressed("float-quantized", "float")),
}  # fmt: skip
ROUNDED_HEADS = {"int8-head": int8, "fp8-head": fp8}


def round_head(source: Path, folder: Path, form: str) -> None:
    """Numbers of 8 bits and a scale for each row, beside embeddings that are as they were."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    coded = ROUNDED_HEADS[form]("lm_head", tensors.get(HEAD, tensors["model.embed_tokens.weight"]).float(), 0)
    tensors[HEAD] = coded["lm_head.weight"].float() * coded["lm_head.weight_scale"]
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for file in source.glob("tokenizer*.json"):
        shutil.copy(file, folder)


def make(source: Path, folder: Path, form: str, group: int = 64, *, head: bool = False) -> None:
    """`head`: coded as well, beside embeddings that are not, as GGUF files have it."""
    if form in ROUNDED_HEADS:
        round_head(source, folder, form)
        return
    folder.mkdir(parents=True, exist_ok=True)
    code, config_of = FORMATS[form]
    tensors: Tensors = {}
    given = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": config_of(group)}
    if head:
        given.setdefault(HEAD, given["model.embed_tokens.weight"])
        config["tie_word_embeddings"] = False
    for name, tensor in given.items():
        if (name.endswith("_proj.weight") and ".layers." in name) or (head and name == HEAD):
            if form in ("gptq", "awq") and tensor.shape[1] % group:
                raise SystemExit(f"{name} has {tensor.shape[1]} columns, which groups of {group} do not divide")
            tensors |= code(name.removesuffix(".weight"), tensor.float(), group)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for file in source.glob("tokenizer*.json"):
        shutil.copy(file, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", required=True, choices=(*FORMATS, *ROUNDED_HEADS))
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--head", action="store_true")
    args = parser.parse_args()
    make(args.source, args.folder, args.format, args.group, head=args.head)


if __name__ == "__main__":
    main()
