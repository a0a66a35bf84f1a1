"""Tiny quantized checkpoints of every format, each written by a formula of its own: nothing of Quire's loaders is used.

A writer takes a matrix [rows, width] and gives the tensors that the format stores for it, by the end of their names,
and the numbers that those mean. `write(folder, arch, form)` turns a checkpoint of tests/tiny_models.py into one of the
format, and returns transformers' model of the numbers it means, in float32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny_models import write_tiny

Written = tuple[dict[str, Tensor], Tensor]
LINEARS = r"(proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\.weight$"
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
BNB_FP4 = torch.tensor([0, 0.0052083333, 2 / 3, 1, 1 / 3, 0.5, 1 / 6, 0.25])
BNB_FP4 = torch.cat((BNB_FP4, -BNB_FP4))


@dataclass(frozen=True)
class Form:
    """One format as a checkpoint has it."""

    config: dict[str, Any]
    write: Callable[[Tensor], Written]
    matrices: str = LINEARS  # names of tensors that are coded
    extra: dict[str, str] = field(default_factory=dict)  # further files: name -> text
    describe: Callable[[Tensor], dict[str, Any]] | None = None  # what the file's metadata says of a coded matrix


def stream(codes: Tensor, bits: int) -> Tensor:
    """[n, k] codes as one stream of bits per row, low bits first, in words of 32: int32 [n, k * bits / 32]."""
    each = codes.long()[:, :, None] >> torch.arange(bits) & 1
    return words(each.flatten(1).unflatten(1, (-1, 32)))


def words(bits: Tensor) -> Tensor:
    total = (bits.long() << torch.arange(32)).sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def rounded(weight: Tensor, group: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, width], scales (float16) and zero points [rows, groups], for columns in these groups."""
    count, top = int(group.max()) + 1, (1 << bits) - 1
    scales, zeros = torch.empty(len(weight), count), torch.empty(len(weight), count)
    for index in range(count):
        part = weight[:, group == index]
        if symmetric:
            scales[:, index], zeros[:, index] = part.abs().amax(1) / (top // 2 + 0.5), top // 2 + 1
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, index] = (high - low) / top
            zeros[:, index] = (-low / scales[:, index].half().float()).round().clamp(1, top)
    scales = scales.half().float()
    codes = (weight / scales[:, group] + zeros[:, group]).round().clamp(0, top)
    return codes, scales, zeros


def decoded(codes: Tensor, scales: Tensor, zeros: Tensor, group: Tensor) -> Tensor:
    return (codes - zeros[:, group]) * scales[:, group]


def gptq(bits: int, size: int, symmetric: bool, *, shuffled: bool = False, v2: bool = False, order: bool = True):
    def write(weight: Tensor) -> Written:
        width = weight.shape[1]
        group = torch.arange(width) // (width if size == -1 else size)
        if shuffled:
            group = group[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
        codes, scales, zeros = rounded(weight, group, bits, symmetric)
        tensors = {
            "qweight": stream(codes, bits).t().contiguous(),
            "qzeros": stream((zeros - (0 if v2 else 1)).t(), bits),
            "scales": scales.t().half().contiguous(),
        }
        if order:
            tensors["g_idx"] = group.int()
        return tensors, decoded(codes, scales, zeros, group)

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": shuffled}
    return Form({**config, **({"checkpoint_format": "gptq_v2"} if v2 else {})}, write)


def awq(size: int) -> Form:
    def packed(codes: Tensor) -> Tensor:
        """[n, k] -> [n, k / 8]: the low half byte is column 0, then 2, 4, 6, 1, 3, 5, 7."""
        total = sum(codes.long()[:, column::8] << 4 * at for at, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
        return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)

    def write(weight: Tensor) -> Written:
        group = torch.arange(weight.shape[1]) // size
        codes, scales, zeros = rounded(weight, group, 4, False)
        tensors = {"qweight": packed(codes.t()), "qzeros": packed(zeros.t()), "scales": scales.t().half().contiguous()}
        return tensors, decoded(codes, scales, zeros, group)

    return Form(
        {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": ["lm_head"]}, write,
    )  # fmt: skip


def auto_round(form: Form, packing: str) -> Form:
    config = {key: value for key, value in form.config.items() if key != "checkpoint_format"}
    return replace(form, config={**config, "quant_method": "auto-round", "packing_format": packing})


def blocks_of(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The largest number of each block, and the block's value for every number of the matrix."""
    down, across = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    most = torch.empty(down, across)
    for i in range(down):
        for j in range(across):
            most[i, j] = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].abs().max()
    index = torch.arange(weight.shape[0]) // rows, torch.arange(weight.shape[1]) // columns
    return most, index[0][:, None] * across + index[1]


def small_floats(rows: int, columns: int, dtype: torch.dtype, scale: str, *, shape: tuple[int, ...] | None = None):
    """rows or columns 0: all of them."""

    def write(weight: Tensor) -> Written:
        most, at = blocks_of(weight, rows or weight.shape[0], columns or weight.shape[1])
        scales = most / torch.finfo(dtype).max
        codes = (weight / scales.view(-1)[at]).to(dtype)
        stored = scales.reshape(shape) if shape is not None else scales
        return {"weight": codes, scale: stored}, codes.float() * scales.view(-1)[at]

    return write


def nearest(values: Tensor, table: Tensor) -> Tensor:
    return (values[..., None] - table).abs().argmin(-1)


def half_bytes(codes: Tensor) -> Tensor:
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def mx_scales(weight: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Per 32 columns: the exponents as bytes, and the powers of two themselves spread over the columns."""
    most = weight.unflatten(1, (-1, 32)).abs().amax(-1)
    exponents = torch.ceil(torch.log2(most / largest)) + 127
    return exponents.to(torch.uint8), (2 ** (exponents - 127)).repeat_interleave(32, 1)


def mx8(weight: Tensor) -> Written:
    exponents, scale = mx_scales(weight, 448)
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": exponents}, codes.float() * scale


def powers(write: Callable[[Tensor], Written], scale: str) -> Callable[[Tensor], Written]:
    """Scales that are powers of two, in a type of their own."""

    def both(weight: Tensor) -> Written:
        tensors, means = write(weight)
        return {**tensors, scale: tensors[scale].view(torch.float8_e8m0fnu)}, means

    return both


def blocks_of_powers(rows: int, columns: int, scale: str) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        most, at = blocks_of(weight, rows, columns)
        exponents = torch.ceil(torch.log2(most / 448)) + 127
        each = (2 ** (exponents - 127)).view(-1)[at]
        codes = (weight / each).to(torch.float8_e4m3fn)
        return {"weight": codes, scale: exponents.to(torch.uint8)}, codes.float() * each

    return powers(write, scale)


def mx4(weight: Tensor) -> Written:
    exponents, scale = mx_scales(weight, 6)
    codes = nearest(weight / scale, FP4)
    return {"weight_packed": half_bytes(codes), "weight_scale": exponents}, FP4[codes] * scale


def nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed codes, scales of 16 columns as float8, the scale of the whole, and what they mean."""
    whole = weight.abs().max() / (448 * 6)
    scales = (weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    each = (scales.float() * whole).repeat_interleave(16, 1)
    codes = nearest(weight / each, FP4)
    return half_bytes(codes), scales, whole, FP4[codes] * each


def nvfp4_modelopt(weight: Tensor) -> Written:
    packed, scales, whole, means = nvfp4(weight)
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole, "input_scale": torch.tensor(0.5)}, means


def nvfp4_compressed(weight: Tensor) -> Written:
    packed, scales, whole, means = nvfp4(weight)
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": (1 / whole)[None]}, means


def static(write: Callable[[Tensor], Written], **more: Tensor) -> Callable[[Tensor], Written]:
    """With a scale for inputs."""

    def both(weight: Tensor) -> Written:
        tensors, means = write(weight)
        return {**tensors, **(more or {"input_scale": torch.tensor(0.25)})}, means

    return both


def int8_rows(symmetric: bool) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        codes, scales, zeros = rounded(weight, torch.zeros(weight.shape[1], dtype=torch.long), 8, symmetric)
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, (codes - zeros) * scales

    return write


def int4_in_bytes(size: int) -> Callable[[Tensor], Written]:
    """Codes of 4 bits, each in a byte of its own."""

    def write(weight: Tensor) -> Written:
        group = torch.arange(weight.shape[1]) // size
        codes, scales, zeros = rounded(weight, group, 4, True)
        return {"weight": (codes - 8).to(torch.int8), "weight_scale": scales}, decoded(codes, scales, zeros, group)

    return write


def packed_ints(
    bits: int, size: int, symmetric: bool, *, shuffled: bool = False, spare: bool = False
) -> Callable[[Tensor], Written]:
    """`spare`: a word holds whole codes only, as older versions of the format have it."""
    per_word = 32 // bits

    def in_words(codes: Tensor) -> Tensor:
        """Along the last axis."""
        if not spare:
            whole = stream(torch.nn.functional.pad(codes, (0, -codes.shape[1] % 32)), bits)
            return whole[:, : -(-codes.shape[1] * bits // 32)]
        short = -codes.shape[1] % per_word
        padded = torch.nn.functional.pad(codes.long(), (0, short)).unflatten(1, (-1, per_word))
        total = (padded << bits * torch.arange(per_word)).sum(-1)
        return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)

    def write(weight: Tensor) -> Written:
        width = weight.shape[1]
        group = torch.arange(width) // (width if size == -1 else size)
        if shuffled:
            group = group[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
        codes, scales, zeros = rounded(weight, group, bits, symmetric)
        tensors = {
            "weight_packed": in_words(codes),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        scales = tensors["weight_scale"].float()
        if not symmetric:
            tensors["weight_zero_point"] = in_words(zeros.t()).t().contiguous()
        if shuffled:
            tensors["weight_g_idx"] = group.int()
        return tensors, decoded(codes, scales, zeros, group)

    return write


def bnb_table(name: str, table: Tensor, nested: bool, run: int = 64) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % run)).view(-1, run)
        most = flat.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": name, "blocksize": run, "dtype": "bfloat16", "shape": list(weight.shape)}  # fmt: skip
        tensors = {"weight.absmax": most, "weight.quant_map": table}
        if nested:
            offset, inner = most.mean(), torch.linspace(-1, 1, 256)
            run2 = 16
            short = torch.nn.functional.pad(most - offset, (0, -len(most) % run2)).view(-1, run2)
            outer = short.abs().amax(1)
            at = nearest(short / outer[:, None], inner)
            most = (inner[at] * outer[:, None]).flatten()[: len(most)] + offset
            tensors["weight.absmax"] = at.flatten()[: len(most)].to(torch.uint8)
            tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": inner}
            state |= {"nested_blocksize": run2, "nested_offset": offset.item(), "nested_dtype": "float32"}
        codes = nearest(flat / most[:, None], table)
        means = (table[codes] * most[:, None]).flatten()[: weight.numel()].view(weight.shape)
        each = codes.flatten()[: weight.numel()]
        tensors["weight"] = (each[::2] << 4 | each[1::2]).to(torch.uint8)[:, None]
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{name}"] = torch.tensor(list(text), dtype=torch.uint8)
        return tensors, means

    return write


def bnb_int8(weight: Tensor) -> Written:
    most = weight.abs().amax(1)
    codes = (weight / most[:, None] * 127).round()
    tensors = {"weight": codes.to(torch.int8), "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes * most[:, None] / 127


def compressed(form: str, write: Callable[[Tensor], Written], weights: dict[str, Any], inputs: Any = None) -> Form:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return Form(
        {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme},
         "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}, write,
    )  # fmt: skip


def write(
    folder: Path, arch: str, form: Form, *, tamper: Callable[[dict[str, Tensor]], None] | None = None, **sizes: Any
):
    """The checkpoint in `folder`; the model of the numbers it means. `tamper` changes tensors after they were made."""
    coded, means, notes = _coded(folder, arch, form, sizes)
    return finish(folder, form, coded, means, tamper, notes)


def write_files(
    folder: Path, arch: str, form: Form, *, tamper: Callable[[dict[str, Tensor]], None] | None = None, **sizes: Any
) -> None:
    """As `write`, for those who want no model."""
    coded, _, notes = _coded(folder, arch, form, sizes)
    save(folder, form, coded, tamper, notes)


def _coded(folder: Path, arch: str, form: Form, sizes: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A checkpoint as it is written by transformers, its tensors in the form and as the numbers that those mean, and
    what the file's metadata says of each."""
    write_tiny(arch, folder, **sizes)
    plain = load_file(folder / "model.safetensors")
    coded, means = {}, {}
    for name, tensor in plain.items():
        if not re.search(form.matrices, name) or tensor.ndim != 2:
            coded[name] = means[name] = tensor
            continue
        made, means[name] = form.write(tensor.float())
        coded |= {name.removesuffix("weight") + ending: one.clone().contiguous() for ending, one in made.items()}
    notes = {} if form.describe is None else {
        name: form.describe(tensor) if name not in coded else {"_type": "Tensor"} for name, tensor in plain.items()
    }  # fmt: skip
    return coded, means, notes


def write_gpt_oss(folder: Path, *, tamper: Any = None, **sizes: Any):
    """All experts of a layer in two tensors of blocks and two of scales; rows of gate and up take turns."""
    write_tiny("GptOssForCausalLM", folder, **sizes)
    coded, means = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            coded[name] = means[name] = tensor
            continue
        made = [mx4(expert.t().float()) for expert in tensor]  # the file has [experts, width, rows]
        packed = torch.stack([one["weight_packed"] for one, _ in made])
        coded[f"{name}_blocks"] = packed.unflatten(2, (-1, 16)).contiguous()
        coded[f"{name}_scales"] = torch.stack([one["weight_scale"] for one, _ in made])
        means[name] = torch.stack([numbers.t() for _, numbers in made])
    return finish(folder, Form({"quant_method": "mxfp4", "modules_to_not_convert": []}, mx4), coded, means, tamper)


def write_gpt_oss_stacked(folder: Path, form: Form, endings: dict[str, str], *, inputs_first: bool):
    """All experts of a layer in one tensor for each side, rows of gate and up in turn; `endings`: as write_stacked."""
    write_tiny("GptOssForCausalLM", folder)
    coded, means = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            coded[name] = means[name] = tensor
            continue
        made = [form.write(expert.t().float()) for expert in tensor]  # the file has [experts, width, rows]
        for ending, stored in endings.items():
            whole = torch.stack([one[ending] for one, _ in made])
            turned = inputs_first and whole.dim() == 3
            coded[name + stored] = (whole.transpose(1, 2) if turned else whole).contiguous()
        means[name] = torch.stack([numbers.t() for _, numbers in made])
    return finish(folder, form, coded, means)


def write_stacked(
    folder: Path, form: Form, endings: dict[str, str], *, inputs_first: bool, tamper: Any = None, **sizes: Any
):
    """All experts of a layer of Qwen3-MoE in one tensor for each side; `endings`: of `form` -> of a stack."""
    write_tiny("Qwen3MoeForCausalLM", folder, **sizes)
    plain = load_file(folder / "model.safetensors")
    coded, means = {}, dict(plain)
    for name, tensor in plain.items():
        if ".experts." not in name:
            coded[name] = tensor
    stacks: dict[str, list[dict[str, Tensor]]] = {}
    for first in [name for name in plain if re.search(r"experts\.\d+\.gate_proj", name)]:
        up, down = (first.replace("gate_proj", other) for other in ("up_proj", "down_proj"))
        prefix = first.split(".experts.")[0] + ".experts."
        both = torch.cat((plain[first], plain[up])).float()
        for side, matrix in (("gate_up_proj", both), ("down_proj", plain[down].float())):
            made, meant = form.write(matrix)
            stacks.setdefault(prefix + side, []).append(made)
            if side == "down_proj":
                means[down] = meant
            else:
                means[first], means[up] = (half.contiguous() for half in meant.chunk(2))
    for name, made in stacks.items():
        for ending, stored in endings.items():
            whole = torch.stack([one[ending] for one in made])
            turned = inputs_first and whole.dim() == 3
            coded[name + stored] = (whole.transpose(1, 2) if turned else whole).contiguous()
    return finish(folder, form, coded, means, tamper)


def finish(
    folder: Path, form: Form, coded: dict[str, Tensor], means: dict[str, Tensor], tamper: Any = None, notes: Any = None
):
    """The model of the numbers, whose files lie beside."""
    model = twin(folder, means)
    save(folder, form, coded, tamper, notes)
    return model


def save(folder: Path, form: Form, coded: dict[str, Tensor], tamper: Any = None, notes: Any = None) -> None:
    """`notes`: what the file's metadata says of each tensor, by its name."""
    if tamper is not None:
        tamper(coded)
    about = {"tensor_names": json.dumps(list(notes))} if notes else {}
    for name, note in (notes or {}).items():
        about[name] = json.dumps(note)
    save_file(coded, folder / "model.safetensors", metadata={"format": "pt", **about})
    config = json.loads((folder / "config.json").read_text())
    if form.config:
        config["quantization_config"] = form.config
    (folder / "config.json").write_text(json.dumps(config))
    for name, text in form.extra.items():
        (folder / name).write_text(text)


def save_again(tensors: dict[str, Tensor], path: Path) -> None:
    """Other tensors in a file, whose metadata stays."""
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    save_file(tensors, path, metadata=about)


def twin(folder: Path, means: dict[str, Tensor]):
    """transformers' model of these numbers; its files lie beside."""
    other = folder / "twin"
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    save_file({name: one.float().contiguous() for name, one in means.items()}, other / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32, attn_implementation="eager")
    return model.eval()
