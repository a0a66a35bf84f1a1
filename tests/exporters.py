"""Tiny checkpoints as HQQ, torchao and Quark save them, each by a formula of its own (see tests/quantized.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.quantized import Form, Written, decoded, mx4, mx_scales, nearest, rounded, small_floats


def text(value: str) -> Tensor:
    return torch.tensor([ord(c) for c in value], dtype=torch.uint8)


def hqq(bits: int, size: int, axis: int = 1, *, as_float: bool = False, complete: bool = False) -> Form:
    """`complete`: with the tensors that only its own kernels read."""
    packing = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}[bits]
    per_word = 10 if bits == 3 else 8 // bits

    def packed(codes: Tensor) -> Tensor:
        short = torch.nn.functional.pad(codes.long(), (0, 0, 0, -len(codes) % per_word))
        total = torch.zeros_like(short[: len(short) // per_word])
        for band in short.split(len(total)):
            total = total << bits | band
        return total.to(torch.int32 if bits == 3 else torch.uint8)

    def write(weight: Tensor) -> Written:
        flat = weight.reshape(-1, size) if axis == 1 else weight.reshape(size, -1)
        low, high = flat.amin(axis, keepdim=True), flat.amax(axis, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).half()
        zero = (-low / scale.float() + 0.25).half()  # it need not be where the smallest number is
        codes = (flat / scale.float() + zero.float()).round().clamp(0, 2**bits - 1)
        means = ((codes - zero.float()) * scale.float()).view(weight.shape)
        stored = packed(codes)
        tensors = {
            "W_q": stored.view(torch.float16) if as_float else stored, "scale": scale, "zero": zero,
            "shape": torch.tensor(weight.shape), "packing": text(packing),
        }  # fmt: skip
        for name, number in (("nbits", bits), ("group_size", size), ("axis", axis)):
            tensors[name] = torch.tensor(number, dtype=torch.int32)
        if complete:
            flags = dict.fromkeys((*HQQ_ONLY, "quant_scale", "quant_zero"), False) | {"view_as_float": as_float}
            tensors |= {flag: torch.tensor(int(value), dtype=torch.uint8) for flag, value in flags.items()}
            tensors |= {"compute_dtype": text("torch.float16"), "unpack_view_dtype": text("torch.uint8")}
        return tensors, means

    params = {"nbits": bits, "group_size": size, "axis": axis, "channel_wise": True, "optimize": True}
    config = {"weight_quant_params": params, "scale_quant_params": None, "zero_quant_params": None}
    return Form({"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}, write)


HQQ_ONLY = (  # tensors that its own kernels read
    "compute_dtype", "unpack_view_dtype", "view_as_float", "offload_meta", "encoded_state_dict", "stores_quant_config",
    "channel_wise", "optimize", "round_zero",
)  # fmt: skip


def ao_dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def torchao(
    kind: str,
    write: Callable[[Tensor], Written],
    attributes: Callable[[Tensor], dict[str, Any]],
    names: tuple[str, ...] = ("qdata", "scale"),
    config: str = "",
) -> Form:
    """`write` names tensors as torchao's class does."""

    def flattened(weight: Tensor) -> Written:
        tensors, means = write(weight)
        return {f"_weight_{name}": tensor for name, tensor in tensors.items()}, means

    def describe(weight: Tensor) -> dict[str, Any]:
        data = {"dtype": ao_dtype("bfloat16"), **attributes(weight)}
        return {"_type": kind, "_data": data, "_tensor_data_names": list(names)}

    settings = {"quant_method": "torchao", "quant_type": {"default": {"_type": config, "_version": 2, "_data": {}}}}
    return Form({**settings, "modules_to_not_convert": None}, flattened, describe=describe)


def ao_inputs(kind: str, granularity: str) -> dict[str, Any]:
    return {"_type": kind, "_data": {"granularity": {"_type": granularity, "_data": {"dim": -1}}}}


def ao_float8(rows: int, columns: int, inputs: str | None = None, dtype: torch.dtype = torch.float8_e4m3fn) -> Form:
    """rows or columns 0: all of them."""

    def write(weight: Tensor) -> Written:
        made, means = small_floats(rows, columns, dtype, "scale")(weight)
        return {"qdata": made["weight"], "scale": made["scale"]}, means

    def attributes(weight: Tensor) -> dict[str, Any]:
        act = None if inputs is None else ao_inputs("QuantizeTensorToFloat8Kwargs", inputs)
        size = [rows or weight.shape[0], columns or weight.shape[1]]
        return {"block_size": size, "act_quant_kwargs": act, "mm_config": None}

    return torchao("Float8Tensor", write, attributes, config="Float8DynamicActivationFloat8WeightConfig")


def ao_integers(bits: int, size: int, symmetric: bool, inputs: bool = False) -> Form:
    """Codes of so many bits, a byte each; size 0: one group for a row."""
    half = 1 << bits - 1

    def write(weight: Tensor) -> Written:
        group = torch.arange(weight.shape[1]) // (size or weight.shape[1])
        codes, scales, zeros = rounded(weight, group, bits, symmetric)
        tensors = {"qdata": (codes - half).to(torch.int8), "zero_point": (zeros - half).to(torch.int8)}
        return {**tensors, "scale": scales}, decoded(codes, scales, zeros, group)

    def attributes(weight: Tensor) -> dict[str, Any]:
        about: dict[str, Any] = {"block_size": [1, size or weight.shape[1]]}
        if bits == 8:
            return about | {"act_quant_kwargs": ao_inputs("QuantizeTensorToInt8Kwargs", "PerRow") if inputs else None}
        by = "int8_asym_per_token" if inputs else None
        return about | {"target_dtype": ao_dtype(f"int{bits}"), "activation_quantization": by}

    kind = "Int8Tensor" if bits == 8 else "IntxUnpackedToInt8Tensor"
    return torchao(kind, write, attributes, ("qdata", "scale", "zero_point"), "Int8WeightOnlyConfig")


def with_minima(weight: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes 0 to 15, scales and what is added to scale * (code - 8), [rows, groups] in bfloat16; what they mean."""
    flat = weight.unflatten(1, (-1, size))
    low, high = flat.amin(-1, keepdim=True), flat.amax(-1, keepdim=True)
    scale = ((high - low) / 15).bfloat16()
    added = (low + scale * 8).bfloat16()
    codes = ((flat - added.float()) / scale.float() + 8).round().clamp(0, 15)
    means = ((codes - 8) * scale.float() + added.float()).flatten(1)
    return codes.flatten(1).long(), scale.squeeze(-1), added.squeeze(-1), means


def ao_int4(size: int, *, signed: bool = True) -> Form:
    def write(weight: Tensor) -> Written:
        codes, scale, added, means = with_minima(weight, size)
        each = codes - 8 & 15
        packed = (each[:, ::2] | each[:, 1::2] << 4).to(torch.uint8)
        stored = packed.view(torch.int8) if signed else packed
        return {"qdata": stored, "scale": scale.t(), "zero_point": added.t()}, means

    def attributes(weight: Tensor) -> dict[str, Any]:
        return {"block_size": [1, size], "shape": list(weight.shape), "activation_dtype": ao_dtype("bfloat16")}

    return torchao("Int4Tensor", write, attributes, ("qdata", "scale", "zero_point"), "Int4WeightOnlyConfig")


def tile_packed(codes: Tensor) -> Tensor:
    """[rows, columns] -> [rows / 8, columns / 128, 32, 4], word by word."""
    rows, columns = codes.shape
    tiles = codes.view(rows // 8, 8, columns // 128, 128)
    lanes, inner = torch.arange(32)[:, None], torch.arange(4) * 32
    words = torch.zeros(32, 4, rows // 8, columns // 128, dtype=torch.long)
    for at, place in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):  # of a lane's columns, from the low end of a word
        words |= tiles[:, lanes // 4, :, inner + lanes % 4 * 2 + place] << 4 * at
    words = words.permute(2, 3, 0, 1).contiguous()
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def ao_tiles(size: int) -> Form:
    """Padded to 1024 columns."""

    def write(weight: Tensor) -> Written:
        rows, width = weight.shape
        codes, scale, added, means = with_minima(weight, size)
        wide = torch.nn.functional.pad(codes, (0, -width % 1024, 0, -rows % 8), value=5)
        pairs = torch.nn.functional.pad(torch.stack((scale, added), -1), (0, 0, 0, -width % 1024 // size, 0, -rows % 8))
        return {"qdata": tile_packed(wide), "scale_and_zero": pairs.transpose(0, 1)}, means

    def attributes(weight: Tensor) -> dict[str, Any]:
        return {"block_size": [1, size], "shape": list(weight.shape)}

    kind = "Int4TilePackedTo4dTensor"
    return torchao(kind, write, attributes, ("qdata", "scale_and_zero"), "Int4WeightOnlyConfig")


def quark(
    write: Callable[[Tensor], Written],
    weight: dict[str, Any],
    inputs: dict[str, Any] | None = None,
    layers: dict[str, Any] | None = None,
    pack_method: str = "reorder",
) -> Form:
    """`layers`: schemes by patterns of modules."""
    scheme = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    config = {
        "quant_method": "quark", "global_quant_config": scheme, "layer_quant_config": layers or {},
        "layer_type_quant_config": {}, "kv_cache_quant_config": {}, "exclude": ["lm_head"], "quant_mode": "eager_mode",
        "export": {"kv_cache_group": [], "weight_format": "real_quantized", "pack_method": pack_method},
    }  # fmt: skip
    return Form(config, write)


def quark_spec(dtype: str, by: str, *, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": by, "is_dynamic": dynamic, "symmetric": True, "ch_axis": 0, **more}


def quark_int8(by_row: bool) -> Callable[[Tensor], Written]:
    """Symmetric, with zero points that are 0."""

    def write(weight: Tensor) -> Written:
        most = weight.abs().amax(1) if by_row else weight.abs().max()
        scale = most / 127
        codes = (weight / (scale[:, None] if by_row else scale)).round()
        tensors = {"weight": codes.to(torch.int8), "weight_scale": scale}
        tensors["weight_zero_point"] = torch.zeros_like(scale).to(torch.int8)
        return tensors, codes * (scale[:, None] if by_row else scale)

    return write


def quark_mx4(weight: Tensor) -> Written:
    made, means = mx4(weight)
    return {"weight": made["weight_packed"], "weight_scale": made["weight_scale"]}, means


def six_bits(exponent_bits: int) -> Tensor:
    """All numbers of a sign, an exponent and a mantissa, by their codes."""
    mantissa_bits, bias = 5 - exponent_bits, 2 ** (exponent_bits - 1) - 1
    numbers = []
    for sign in (1.0, -1.0):
        for exponent in range(2**exponent_bits):
            for mantissa in range(2**mantissa_bits):
                part, power = mantissa / 2**mantissa_bits, max(exponent, 1) - bias
                numbers.append(sign * (part + (exponent > 0)) * 2.0**power)
    return torch.tensor(numbers)


def quark_mx6(exponent_bits: int) -> Callable[[Tensor], Written]:
    table = six_bits(exponent_bits)

    def write(weight: Tensor) -> Written:
        exponents, scale = mx_scales(weight, table.max().item())
        codes = nearest(weight / scale, table)
        four = codes.unflatten(1, (-1, 4))
        total = four[..., 0] + (four[..., 1] << 6) + (four[..., 2] << 12) + (four[..., 3] << 18)
        packed = torch.stack([total % 256, total // 256 % 256, total // 65536], -1).flatten(1).to(torch.uint8)
        return {"weight": packed, "weight_scale": exponents}, table[codes] * scale

    return write


def quark_int4(size: int, *, signed: bool, reorder: bool = True) -> Callable[[Tensor], Written]:
    order = (0, 2, 4, 6, 1, 3, 5, 7) if reorder else range(8)

    def in_words(codes: Tensor) -> Tensor:
        total = sum((codes.long()[:, column::8] & 15) << 4 * at for at, column in enumerate(order))
        assert isinstance(total, Tensor)
        return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)

    def write(weight: Tensor) -> Written:
        group, less = torch.arange(weight.shape[1]) // size, 8 if signed else 0
        codes, scales, zeros = rounded(weight, group, 4, False)
        tensors = {"weight": in_words((codes - less).t()), "weight_zero_point": in_words((zeros - less).t())}
        return {**tensors, "weight_scale": scales.t().half()}, decoded(codes, scales, zeros, group)

    return write
