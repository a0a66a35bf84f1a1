"""The Triton kernels compile for Hopper, in the shapes models give them. Needs Triton, but no GPU."""

import itertools
import os
import re
from functools import partial

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)
if os.environ.get("COMPILE_KERNELS") != "1":
    pytest.skip("takes ten minutes, so `make kernels` does it", allow_module_level=True)

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.attention.triton import choose_tiles
from quire.ops import act as act_ops
from quire.ops import moe as moe_ops
from quire.ops.act import clamped_swiglu
from quire.ops.coded import CodedWeight
from quire.ops.coded_experts import ExpertCodes, run_coded_experts
from quire.ops.few import NormRule, linear_add, norm_linear, norm_linears
from quire.ops.kv_codes import CacheScales
from quire.ops.qkv import QkvPrep, prepare_qkv
from quire.ops.triton import (
    act,
    attention,
    attention_cache,
    attention_one,
    coded,
    coded_blocks,
    few,
    lora,
    mask,
    moe,
    moe_bytes,
    moe_coded,
    moe_coded_few,
    moe_few,
    moe_many,
    norm,
    parts,
    rope,
    texts,
)  # fmt: skip
from tests.coded_cases import Made, check, normal, weight_of
from tests.coded_expert_cases import as_mx, make_codes, sorted_pairs, summed
from tests.few_block_cases import FEW_BLOCKS, of_numbers, row_and_rest
from tests.fused_cases import Draw
from tests.gguf_blocks import TYPES, numbers_of, raw_blocks
from tests.gguf_blocks import weight_of as block_weight
from tests.ptx_on_numpy import Memory, Program, parse

HALF, WHOLE, WIDE = "*bf16", "*i32", "*fp32"
CODES = {  # of a KV cache: type, largest code, 1: a scale per layer, 2: per token and head
    "e4m3": ("*fp8e4nv", 448.0, 1), "e5m2": ("*fp8e5", 57344.0, 1), "int8": ("*i8", 127.0, 2),
}  # fmt: skip


def compiled(kernel, kinds, constants, *, warps=4, stages=3, unaligned=(), even=(), early=False):
    """`kinds`: types of the arguments that are no constants; 'none': None is given. `even`: strides by another name."""
    names = kernel.arg_names
    constants = constants | {name: None for name, kind in kinds.items() if kind == "none"}
    kinds = {name: kind for name, kind in kinds.items() if kind != "none"}
    assert set(names) == set(kinds) | set(constants), set(names) ^ (set(kinds) | set(constants))
    aligned = [
        name
        for name, kind in kinds.items()
        if (kind.startswith("*") or "stride" in name or name in even) and name not in unaligned
    ]
    source = ASTSource(
        fn=kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages} | ({"launch_pdl": True} if early else {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dtype", [HALF, "*fp16", WIDE])
def test_parts_added_up(dtype, early):
    kinds = {"sums": WIDE, "out": dtype, "part_stride": "i32"}
    constants = {"WIDTH": 1024, "PARTS": 4, "BLOCK": 512, "EARLY": early}
    made = compiled(parts._sum_kernel, kinds, constants, early=early)
    assert "ld.global.v4" in made.asm["ptx"]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("norm_kind", [0, 1, 2])
@pytest.mark.parametrize(
    "shape", [(1, 4096, 1024, False), (1, 3072, 1024, True), (2, 1024, 3072, False), (1, 100, 2880, True)]
)
@pytest.mark.parametrize("coded", [False, True])
def test_few(coded, shape, norm_kind, early):
    rows, n, k, gated = shape
    bn, bk, warps = few.config_of(rows, n, k, gated=gated, coded=coded)
    kinds = {
        "x": HALF, "norm_weight": HALF if norm_kind else "none", "w": "*fp8e4nv" if coded else HALF,
        "w_scale": WIDE if coded else "none", "bias": "none", "out": HALF,
        "stream": "none" if gated else HALF, "normed": "none" if gated else HALF, "x_stride": "i32",
        "w_stride": "i32", "eps": "fp32", "offset": "fp32", "alpha": "fp32", "limit": "fp32",
    }  # fmt: skip
    constants = {
        "M": rows, "N": n, "K": k, "BM": rows, "BN": bn, "BK": bk, "WHOLE": triton.next_power_of_2(k),
        "NORM": norm_kind, "GATED": gated, "ACT": 0, "BIAS": False, "ADD": not gated, "KEEP": not gated,
        "ROUND": True, "CODED": coded, "EARLY": early,
    }  # fmt: skip
    text = compiled(few._few_kernel, kinds, constants, warps=warps, early=early).asm["ptx"]
    assert ("griddepcontrol.wait" in text) == early


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_few_tokens_of_a_mixture(early, share):
    up, down = moe_few.MoeFewConfig()
    kinds = {
        "x": HALF, "index": WHOLE, "w": HALF, "bias": "none", "out": HALF, "x_stride": "i32", "w_stride_e": "i32",
        "w_stride_n": "i32", "alpha": "fp32", "limit": "fp32",
    }  # fmt: skip
    constants = {
        "N": 768, "K": 2048, "TOP_K": 8, "GATED": True, "ACT": 0, "BIAS": False, "SHARE": share, "EARLY": early,
    }  # fmt: skip
    compiled(moe_few._up_kernel, kinds, constants | {"BN": up[0], "BK": up[1]}, warps=up[2], early=early)
    kinds = {
        "h": HALF, "index": WHOLE, "weights": WIDE, "w": HALF, "bias": "none", "stream": HALF, "out": HALF,
        "w_stride_e": "i32", "w_stride_n": "i32",
    }  # fmt: skip
    for top_k, block in ((8, 8), (6, 8)):
        constants = {
            "N": 2048, "K": 768, "TOP_K": top_k, "BLOCK_K": block, "BIAS": False, "SHARE": share,
            "ADD": True, "BN": down[0], "BK": down[1], "EARLY": early,
        }  # fmt: skip
        compiled(moe_few._down_kernel, kinds, constants, warps=down[2], early=early)


@pytest.mark.parametrize(("experts", "share"), [(8, False), (128, False), (512, False), (1, True), (16, True)])
@pytest.mark.parametrize("config", [moe.FEW_PAIRS, moe.MANY_PAIRS])
def test_sorting(config, experts, share):
    block = moe.bins_of(experts)
    kinds = dict.fromkeys(("index", "counts", "order", "tile_expert", "tile_start", "end"), WHOLE)
    kinds |= dict.fromkeys(("pairs", "chunks", "placers", "most_tiles", "bm"), "i32")
    constants = {
        "EXPERTS": experts, "BLOCK_E": block, "CHUNK": config.chunk, "PIECE": config.piece, "WIDTH": config.width,
        "TILES": moe._TILE_ROWS, "INLINE": not config.chunk, "SHARE": share, "EARLY": True,
    }  # fmt: skip
    compiled(moe._sort_kernel, kinds, constants, warps=config.warps, early=True)
    if config.chunk:
        kinds = {"index": WHOLE, "counts": WHOLE, "pairs": "i32"}
        constants = {"BLOCK_E": block, "CHUNK": config.chunk, "SHARE": share, "EARLY": True}
        compiled(moe._count_kernel, kinds, constants, early=True)
        rows, columns = moe._SCAN
        constants = {"BLOCK_E": block, "ROWS": rows, "COLUMNS": columns, "EARLY": True}
        compiled(moe._scan_kernel, {"counts": WHOLE, "chunks": "i32"}, constants, early=True)


@pytest.mark.parametrize("score", [0, 1, 2])
@pytest.mark.parametrize(("experts", "top_k", "bias"), [(128, 8, False), (60, 6, True)])
def test_routing(experts, top_k, bias, score):
    kinds = {
        "logits": WIDE, "bias": WIDE if bias else "none", "weights": WIDE, "index": WHOLE, "tokens": "i32",
        "scale": "fp32",
    }  # fmt: skip
    constants = {
        "EXPERTS": experts, "BLOCK_E": triton.next_power_of_2(experts), "TOP_K": top_k, "BLOCK_K": 8, "BLOCK_T": 1,
        "SCORE": score, "RENORM": True, "BIAS": bias, "EARLY": True,
    }  # fmt: skip
    compiled(moe._route_kernel, kinds, constants, warps=1, early=True)
    kinds = {"y": HALF, "weights": WIDE, "index": "none", "stream": HALF if bias else "none", "out": HALF}
    constants = {"DIM": 2048, "TOP_K": top_k, "SHARE": False, "ADD": bias, "BLOCK": 1024, "EARLY": True}
    compiled(moe._combine_kernel, kinds, constants, early=True)
    compiled(moe._combine_kernel, kinds | {"index": WHOLE}, constants | {"SHARE": True}, early=True)


@pytest.mark.parametrize("each", [1, 16, 64, 1000])
@pytest.mark.parametrize("first", [True, False])
def test_grouped_products(first, each):
    config = moe.configs_of(128 * each, 128, moe.torch.bfloat16)[0 if first else 1]
    kinds = {
        "a": HALF, "w": HALF, "bias": "none", "out": HALF, "order": WHOLE, "tile_expert": WHOLE, "tile_start": WHOLE,
        "end": WHOLE, "pairs": "i32", "most_tiles": "i32", "a_stride": "i32", "w_stride_e": "i32", "w_stride_n": "i32",
        "alpha": "fp32", "limit": "fp32",
    }  # fmt: skip
    constants = {
        "N": 768 if first else 2048, "K": 2048 if first else 768, "TOP_K": 8, "ACT": 0, "BIAS": False, "FIRST": first,
        "GATED": first, "DIRECT": False, "PRECISION": "tf32", "BM": config.bm, "BN": config.bn, "BK": config.bk,
        "GROUP": 8, "EARLY": True,
    }  # fmt: skip
    found = compiled(moe._experts_kernel, kinds, constants, warps=config.warps, stages=config.stages, early=True)
    assert found.metadata.shared <= 227 * 1024
    assert "wgmma" in found.asm["ptx"] or config.bm < 64


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("each", [1, 16, 64, 200, 1000])
def test_grouped_products_by_descriptors(each, first, bias):
    config = moe.tma_configs_of(128 * each, 128)[0 if first else 1]
    if isinstance(config, moe.MoeTileConfig):
        assert first and each < 26
        return
    parts = 2 if first else 1
    kinds = {
        "a": HALF if first else f"tensordesc<bf16[{config.bm},{config.bk}]>",
        "w": f"tensordesc<bf16[{parts},{config.bn},{config.bk}]>", "bias": HALF if bias else "none", "out": HALF,
        "order": WHOLE, "tile_expert": WHOLE, "tile_start": WHOLE, "end": WHOLE, "programs": "i32", "a_stride": "i32",
        "alpha": "fp32", "limit": "fp32",
    }  # fmt: skip
    constants = {
        "EXPERTS": 128, "N": 768 if first else 2048, "K": 2048 if first else 768, "TOP_K": 8, "ACT": 0, "BIAS": bias,
        "FIRST": first, "BM": config.bm, "BN": config.bn, "BK": config.bk, "GROUP": config.group,
        "FLAT": config.flat and config.resident, "EARLY": True,
    }  # fmt: skip
    found = compiled(moe_many._many_kernel, kinds, constants, warps=config.warps, stages=config.stages, early=True)
    assert found.metadata.shared <= 227 * 1024
    assert ("wgmma" in found.asm["ptx"] or config.bm < 64) and "cp.async.bulk.tensor" in found.asm["ptx"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("each", [1, 16, 64, 200, 1000])
def test_grouped_products_of_bytes(each, first, blocks, bias):
    """Hopper's 8-bit instructions for all tiles, whose weights never go through registers."""
    shape = torch.empty((128, 1536, 2048), dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.empty(1, device="meta")
    side = ExpertCodes("e4m3", shape, 2048, scale if blocks else None, row_scale=None if blocks else scale)
    configs = moe_bytes.configs_of(128 * each, side, side)
    config = configs[0 if first else 1]._replace(bm=configs[0].bm)
    rounds = first and config.rounds
    steps = blocks or (config.steps if first else configs[0].rounds or config.steps)
    parts = 2 if first and not steps and not config.swap else 1
    kinds = {
        "a": "*fp8e4nv" if first else f"tensordesc<fp8e4nv[{config.bm},{config.bk}]>", "a_scale": WIDE,
        "w": f"tensordesc<fp8e4nv[{parts},{config.bn},{config.bk}]>", "w_scale": WIDE, "bias": HALF if bias else "none",
        "out": "*fp8e4nv" if rounds else HALF, "out_scale": WIDE if rounds else "none", "order": WHOLE,
        "tile_expert": WHOLE, "tile_start": WHOLE, "end": WHOLE, "programs": "i32", "alpha": "fp32", "limit": "fp32",
    }  # fmt: skip
    constants = {
        "EXPERTS": 128, "N": 768 if first else 2048, "K": 2048 if first else 768, "TOP_K": 8, "ACT": 0, "BIAS": bias,
        "FIRST": first, "STEPS": steps, "BLOCKS": blocks, "ROUND": rounds, "SWAP": config.swap, "BM": config.bm,
        "BN": config.bn, "BK": config.bk, "GROUP": config.group, "FLAT": config.flat and config.resident > 0,
        "EARLY": True,
    }  # fmt: skip
    found = compiled(moe_bytes._bytes_kernel, kinds, constants, warps=config.warps, stages=config.stages, early=True)
    assert found.metadata.shared <= 227 * 1024
    text = found.asm["ptx"]
    assert "cp.async.bulk.tensor" in text and "wgmma.mma_async" in text and "e4m3.e4m3" in text
    assert not re.search(r"wgmma.mma_async[^;]*\}, *\{", text)  # the left operand would be registers


@pytest.mark.parametrize("experts", [0, 16])
@pytest.mark.parametrize(("size", "groups"), [(128, 6), (768, 1)])
def test_rounded_tokens(size, groups, experts):
    """Of a rank's own pairs, whose number is read, or all rows."""
    kinds = {"x": HALF, "end": WHOLE if experts else "none", "codes": "*fp8e4nv", "scale": WIDE, "total": "i32"}
    block = triton.next_power_of_2(size)
    constants = {
        "K": 768, "GROUPS": groups, "SIZE": size, "EXPERTS": experts, "ROWS": 4096 // block, "BLOCK": block,
        "EARLY": True,
    }  # fmt: skip
    compiled(moe_bytes._round_kernel, kinds, constants, early=True)


CODED = {  # as 128 experts of 2048 x 768 have them; mxfp4: 32 of 2880 x 2880
    "fp8-rows": ({"w": "*fp8e4nv", "row_scale": WIDE}, {"FORM": 0, "BY_ROW": True}),
    "fp8-blocks": ({"w": "*fp8e4nv", "scale": WIDE}, {"FORM": 0, "SCALED": True, "BLOCK_N": 128, "BLOCK_K": 128}),
    "w4a16": ({"w": "*u8", "scale": HALF, "zero": "*u8"}, {"FORM": 2, "SCALED": True, "ZERO": True, "BLOCK_K": 128}),
    "w4a16-between": (
        {"w": "*u8", "scale": HALF, "zero": WIDE},
        {"FORM": 2, "SCALED": True, "ZERO": True, "BLOCK_K": 64},
    ),
    "mxfp4": ({"w": "*u8", "scale": "*u8"}, {"FORM": 1, "SCALED": True, "BLOCK_K": 32}),
    "nvfp4": (
        {"w": "*u8", "scale": "*fp8e4nv", "row_scale": WIDE},
        {"FORM": 1, "SCALED": True, "BY_ROW": True, "BLOCK_K": 16},
    ),
}


def expert_codes(name, first):
    """Types and constants of a matrix of experts, and how many results it has."""
    pointers, numbers = CODED[name]
    n, k = (
        ((2880, 2880) if name == "mxfp4" else (768, 2048))
        if first
        else (2880, 2880)
        if name == "mxfp4"
        else (2048, 768)
    )
    whole = -(-k // 128) * 128 if numbers["FORM"] else k
    constants = {"SCALED": False, "ZERO": False, "BY_ROW": False, "BLOCK_N": 1, "BLOCK_K": whole, **numbers}
    constants |= {
        "K": k, "BYTES": whole // 2 if numbers["FORM"] else k, "GRID_K": -(-whole // constants["BLOCK_K"]),
        "GRID_N": -(-(2 * n if first else n) // constants["BLOCK_N"]), "TOP_K": 4 if name == "mxfp4" else 8,
        "BIAS": name == "mxfp4",
    }  # fmt: skip
    kinds = {"scale": "none", "zero": "none", "row_scale": "none", "bias": "none", "out": HALF, **pointers}
    return kinds | ({"bias": HALF} if name == "mxfp4" else {}), constants, n


@pytest.mark.parametrize(("each", "first"), [(8, True), (8, False), (64, True), (200, True), (200, False)])
@pytest.mark.parametrize("name", CODED)
def test_grouped_matmuls_of_codes(name, first, each):
    """Weights are the left operand, out of registers, even of the smallest tiles; and 8 bits times 8 bits."""
    kinds, constants, n = expert_codes(name, first)
    rounded = each > moe_coded.ROUND_FROM and name.startswith("fp8")
    kinds |= {
        "a": "*fp8e4nv" if rounded else HALF, "a_scale": WIDE if rounded else "none", "order": WHOLE,
        "tile_expert": WHOLE, "tile_start": WHOLE, "end": WHOLE, "most_tiles": "i32", "alpha": "fp32", "limit": "fp32",
    }  # fmt: skip
    config = moe_coded.configs_of(each * 128, 128, torch.bfloat16)[not first]
    if rounded:
        tiles = moe_coded.ROUNDED_BLOCKS if "scale" in CODED[name][0] else moe_coded.ROUNDED_ROWS
        config = tiles[not first]
    constants |= {
        "N": n, "ROUNDED": rounded, "ACT": 0, "FIRST": first, "GATED": first, "DIRECT": False, "PRECISION": "tf32",
        "SWAP": config.swap, "BM": config.bm, "BN": config.bn, "BK": config.bk, "TILES": 8,
    }  # fmt: skip
    found = compiled(moe_coded._coded_kernel, kinds, constants, warps=config.warps, stages=config.stages)
    assert found.metadata.shared <= 227 * 1024
    assert "wgmma" in found.asm["ptx"] and "cp.async.cg" in found.asm["ptx"]
    assert ("e4m3.e4m3" in found.asm["ptx"]) == rounded


@pytest.mark.parametrize(("early", "share"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", CODED)
def test_a_few_rows_of_codes(name, early, share):
    few_config = moe_coded_few.CodedFewConfig()
    kinds, constants, n = expert_codes(name, True)
    bn, size, warps = few_config.up
    kinds |= {"x": HALF, "index": WHOLE, "x_stride": "i32", "alpha": "fp32", "limit": "fp32"}
    constants |= {"SHARE": share, "EARLY": early}
    constants |= {"N": n, "ROWS": 2 * n, "GATED": True, "ACT": 0, "BN": bn, "B": size}
    compiled(moe_coded_few._up_kernel, kinds, constants, warps=warps, early=early)
    kinds, constants, n = expert_codes(name, False)
    bn, size, warps = few_config.down
    kinds |= {"h": HALF, "index": WHOLE, "weights": WIDE, "stream": HALF}
    constants |= {"N": n, "SHARE": share, "ADD": True, "BN": bn, "B": size, "EARLY": early}
    compiled(moe_coded_few._down_kernel, kinds, constants, warps=warps, early=early)


@pytest.mark.parametrize("early", [False, True])
def test_rows(early):
    kinds = {
        "x": HALF, "delta": HALF, "weight": HALF, "bias": "none", "out": HALF, "scales": "none", "rows": "i32",
        "x_stride": "i32", "x_head_stride": "i32", "delta_stride": "i32", "part_stride": "i32", "weight_stride": "i32",
        "eps": "fp32", "offset": "fp32", "factors": "none",
    }  # fmt: skip
    constants = {
        "WIDTH": 4096, "HEADS": 1, "BLOCK": 4096, "ROWS": 1, "ADD": True, "LAYER": False, "WIDE": False,
        "WEIGHT": True, "BIAS": False, "PARTS": 1, "FACTORS": False, "LARGEST": 0.0, "GROUP": 4096, "EARLY": early,
    }  # fmt: skip
    compiled(norm._norm_kernel, kinds | {"delta": "*fp32"}, constants | {"PARTS": 4}, warps=16, early=early)
    compiled(norm._norm_kernel, kinds, constants, warps=16, early=early)
    weighted = constants | {"WIDTH": 2048, "BLOCK": 2048, "PARTS": 8, "FACTORS": True}
    compiled(norm._norm_kernel, kinds | {"factors": WIDE}, weighted, warps=8, early=early)
    coded_kinds = kinds | {"out": "*fp8e4nv", "scales": WIDE}
    compiled(norm._norm_kernel, coded_kinds, constants | {"LARGEST": 448.0, "GROUP": 128}, warps=16, early=early)
    kinds = {"x": HALF, "out": HALF, "stride": "i32", "alpha": "fp32", "limit": "fp32"}
    constants = {"WIDTH": 3072, "ACT": 0, "BLOCK": 2048, "EARLY": early}
    compiled(act._gated_kernel, kinds, constants, warps=8, early=early)
    constants = {"WIDTH": 12288, "ACT": 0, "BLOCK": 16384, "LARGEST": 448.0, "GROUP": 128, "EARLY": early}
    compiled(act._rounded_kernel, kinds | {"out": "*fp8e4nv", "scales": WIDE}, constants, warps=16, early=early)
    pointers = ("qkv", "q_out", "keys", "values", "q_weight", "k_weight", "cos", "sin")
    strides = (
        "stride",
        "part_stride",
        "k_block",
        "k_slot",
        "k_head",
        "v_block",
        "v_slot",
        "v_head",
        "q_weight_stride",
        "k_weight_stride",
        "scale_page",
        "scale_head",
    )
    kinds = dict.fromkeys(pointers, HALF) | dict.fromkeys(strides, "i32")
    kinds |= {"slots": "*i64", "eps": "fp32", "offset": "fp32", "k_scales": "none", "v_scales": "none"}
    constants = {
        "HQ": 32, "HKV": 4, "D": 128, "HALF": 64, "BLOCK_SIZE": 64, "BH": 8, "PAIR_TILE": 64, "REST_TILE": 1,
        "NORM": True, "WIDE": False, "PAIRS": False, "KEEP": False, "PARTS": 1, "LARGEST": 0.0, "CODING": 0,
        "EARLY": early,
    }  # fmt: skip
    compiled(rope._prepare_kernel, kinds, constants, warps=2, early=early)
    compiled(rope._prepare_kernel, kinds | {"qkv": "*fp32"}, constants | {"PARTS": 4}, warps=2, early=early)
    for kind, largest, coding in CODES.values():
        coded = kinds | {"keys": kind, "values": kind, "k_scales": WIDE, "v_scales": WIDE}
        more = constants | {"LARGEST": largest, "CODING": coding, "KEEP": True}
        compiled(rope._prepare_kernel, coded, more, warps=2, early=early)


@pytest.mark.parametrize("kind", [WIDE, HALF])
def test_allowed_words(kind):
    kinds = {
        "logits": kind, "rows": "*i64", "words": WHOLE, "num_words": "i32", "vocab": "i32", "logits_stride": "i32",
        "words_stride": "i32",
    }  # fmt: skip
    compiled(mask._allow_kernel, kinds, {"BLOCK": mask._BLOCK})


@pytest.mark.parametrize("kind", [WIDE, HALF])
@pytest.mark.parametrize(("group", "ranks"), [(2, 1), (24, 1), (24, 4)])
def test_attention_of_large_heads(group, ranks, kind):
    """Heads of 512 entries with values of their own, also where ranks divide contexts: tiles fit shared memory."""
    dtype = moe.torch.float32 if kind == WIDE else moe.torch.bfloat16
    chosen = choose_tiles(dtype, 512, 512, latent=False, group=group)
    lists = ("tables", "items", "counters", "info")
    floats = ("partial", "sums", "partial2", "sums2")
    strides = (
        "q_token", "q_head", "page_stride", "k_head", "v_head", "scale_page", "scale_head", "table_stride", "held",
        "rank",
    )  # fmt: skip
    kinds = dict.fromkeys(("out", "q", "keys", "values"), kind) | dict.fromkeys(lists, WHOLE)
    kinds |= dict.fromkeys(floats, WIDE) | dict.fromkeys(strides, "i32") | {"scale": "fp32", "cap": "fp32"}
    kinds |= dict.fromkeys(("k_scales", "v_scales", "k_pages", "v_pages", "sinks", "slopes", "totals"), "none")
    if ranks > 1:
        kinds |= {"out": WIDE, "totals": WIDE}
    for tiles in {chosen.few, chosen.many}:
        constants = {
            "GROUP": group, "DK": 512, "DV": 512, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_D": 512,
            "BLOCK_V": 512, "BLOCK_R": 16, "PAGE": 16, "WINDOW": 0, "CHUNK": 0, "SOFTCAP": False, "SINKS": False,
            "ALIBI": False, "LATENT": False, "TWO_LOOPS": tiles.two_loops, "AHEAD": False, "TMA": False, "SPLIT": True,
            "SHARED_M": chosen.shared.block_m, "CODING": 0, "EARLY": False,
            "PRECISION": "ieee" if kind == WIDE else "tf32", "PAIRS": 0, "RANKS": ranks, "INTERLEAVE": 1,
        }  # fmt: skip
        made = compiled(
            attention._attend_kernel, kinds, constants, warps=tiles.num_warps, stages=tiles.num_stages,
            unaligned=("tables", "items", "info"),
        )  # fmt: skip
        assert made.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    ("group", "size", "value", "latent"), [(2, 128, 128, False), (4, 64, 64, False), (16, 576, 512, True)]
)
def test_attention_over_a_cache_in_8_bits(code, group, size, value, latent):
    """Every tile that such a cache is read with, rows that share a prefix among them: it fits shared memory."""
    kind, _, coding = CODES[code]
    chosen = choose_tiles(moe.torch.bfloat16, size, value, latent=latent, group=group)
    wide, rest = attention.width_of(value if latent else size), attention.width_of(size - value) if latent else 16
    common = {"q": HALF, "keys": kind, "values": kind, "k_scales": WIDE, "v_scales": WIDE, "scale": "fp32",
              "cap": "fp32", "tables": WHOLE, "info": WHOLE, "partial": WIDE, "sums": WIDE}  # fmt: skip
    common |= dict.fromkeys(
        ("q_token", "q_head", "page_stride", "k_head", "v_head", "scale_page", "scale_head", "table_stride", "rank"),
        "i32",
    )
    common |= dict.fromkeys(("k_pages", "v_pages", "slopes"), "none")
    unaligned = ("tables", "items", "info", "members", "starts", "contexts", "k_scales", "v_scales")
    for tiles in {chosen.few, chosen.crowd, chosen.many, chosen.shared}:
        constants = {
            "GROUP": group, "DK": size, "DV": value, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
            "BLOCK_D": wide, "BLOCK_V": attention.width_of(value), "BLOCK_R": rest, "PAGE": 64, "SOFTCAP": False,
            "ALIBI": False, "LATENT": latent, "AHEAD": False, "TMA": False, "CODING": coding, "EARLY": True,
            "PRECISION": "tf32", "RANKS": 1, "INTERLEAVE": 1,
        }  # fmt: skip
        how = {"warps": tiles.num_warps, "stages": tiles.num_stages, "unaligned": unaligned, "early": True}
        if tiles is chosen.shared:
            kinds = common | dict.fromkeys(("members", "starts", "contexts"), WHOLE)
            made = compiled(attention._shared_kernel, kinds, constants, **how)
        else:
            kinds = common | {"out": HALF, "items": WHOLE, "counters": WHOLE, "partial2": WIDE, "sums2": WIDE,
                              "sinks": "none", "totals": "none", "held": "i32"}  # fmt: skip
            pairs = coding == 1 and tiles.block_m == 16 and not latent
            kinds |= {"values": "*i16"} if pairs else {}
            constants |= {"WINDOW": 0, "CHUNK": 0, "SINKS": False, "TWO_LOOPS": tiles.two_loops or pairs, "SPLIT": True,
                          "SHARED_M": chosen.shared.block_m, "PAIRS": 2 if pairs else 0}  # fmt: skip
            how["stages"] = max(tiles.num_stages, attention._PAIR_STAGES) if pairs else tiles.num_stages
            made = compiled(attention._attend_kernel, kinds, constants, **how)
            assert not pairs or "ld.shared.b8" not in made.asm["ptx"]  # values are not read byte by byte
        assert made.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("code", CODES)
def test_writing_a_cache_in_8_bits(code):
    kind, largest, coding = CODES[code]
    strides = ("scale_page", "scale_head", "k_token", "k_head", "v_token", "v_head", "page_stride", "cache_k_head",
               "cache_v_head")  # fmt: skip
    kinds = {"k": HALF, "v": HALF, "keys": kind, "values": kind, "k_scales": WIDE, "v_scales": WIDE, "slots": "*i64"}
    constants = {"HEADS": 8, "DK": 128, "DV": 128, "PAGE": 64, "BLOCK_H": 8, "BLOCK_D": 128, "BLOCK_V": 128,
                 "LARGEST": largest, "CODING": coding}  # fmt: skip
    text = compiled(
        attention_cache._write_kernel, kinds | dict.fromkeys(strides, "i32"), constants,
        unaligned=("slots", "k_scales", "v_scales"),
    ).asm["ptx"]  # fmt: skip
    if code != "int8":
        assert f"satfinite.{code}x2" in text  # the hardware's own rounding


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("pieces", "rank"), [(3, 16), (1, 24)])
def test_adapters_of_rows(pieces, rank, early):
    constants = {"PIECES": pieces, "RANK": rank, "RANK_TILE": triton.next_power_of_2(rank), "EARLY": early}
    lists, sizes = (
        {"index": WHOLE, "spans": WHOLE, "h": WIDE},
        ("width", "x_stride", "num_rows", "y_stride", "b_row", "b_slot"),
    )
    kinds = lists | {"x": HALF, "a": HALF, "width": "i32", "x_stride": "i32"}
    share, at_once, rows = lora.tiles_of(constants["RANK_TILE"])
    more = constants | {"WIDTH": at_once, "SHARE": share}
    made = [compiled(lora._shrink_kernel, kinds, more, unaligned=sizes, early=early)]
    kinds = lists | {
        "y": HALF,
        "b": HALF,
        "scales": WIDE,
        "num_rows": "i32",
        "y_stride": "i32",
        "b_row": "i32",
        "b_slot": "i32",
    }
    more = constants | {"ROWS": rows, "SHARES": 12, "SHARE_TILE": 16}
    made += [compiled(lora._expand_kernel, kinds, more, unaligned=sizes, early=early)]
    assert made[-1].asm["ptx"].count("ld.global.v4") >= 4  # B, 16 bytes at a time
    kinds = {"index": WHOLE, "scales": WIDE, "h": HALF, "out": HALF, "num_rows": "i32"}
    more = {"SLOTS": 8, "PIECES": pieces, "RANK": rank, "ROWS": 8, "COLUMNS": 256, "EARLY": early}
    made += [compiled(lora._own_kernel, kinds, more, unaligned=("index",), early=early)]
    for each in made:
        assert ("griddepcontrol.wait" in each.asm["ptx"]) == early and ".local" not in each.asm["ptx"]


@pytest.mark.parametrize("rank", [0, 8, 16, 64])
@pytest.mark.parametrize("rows", [16, 32])
def test_products_of_some_rows(rows, rank):
    """Gluon kernels, which compile for Hopper alone; with adapters of this rank, or none."""
    skinny = pytest.importorskip("quire.ops.triton.skinny")
    source = pytest.importorskip("triton.experimental.gluon._runtime").GluonASTSource
    layout = pytest.importorskip("triton.experimental.gluon.language").NVMMASharedLayout(128, 16, 2)
    low = ("low", "h", "index", "scales")
    for kernel, ring, box, more, pieces in (
        (skinny._parts_kernel, skinny.WIDE, skinny.TILE.value, {"sums": WIDE}, 3),
        (skinny._parts_kernel, skinny.NARROW, skinny.TILE.value, {"sums": WIDE}, 1),
        (skinny._silu_kernel, skinny.NARROW, skinny.TILE.value // 2, {"out": HALF}, 2),
        (skinny._shrink_kernel, skinny.WIDE, skinny.TILE.value, {"h": WIDE, "index": WHOLE}, 3),
    ):
        matrix = f"tensordesc<bf16[{box},{ring.entries}],{layout!r}>"
        constants = {"ROWS": rows, "ENTRIES": ring.entries, "BUFFERS": ring.buffers, "EARLY": True}
        kinds = {"matrix": matrix, "rows": f"tensordesc<bf16[{rows},{ring.entries}],{layout!r}>", "bias": HALF, **more}
        if kernel is skinny._shrink_kernel:
            constants |= {"OF_SLOT": pieces * max(rank, 1)}
        else:
            splits = skinny.shrink_shape_of(4096, rank)[1] if rank else 0
            constants |= {"BIAS": True, "PIECES": pieces if rank else 0, "RANK": rank, "SPLITS": splits}
            constants |= {} if rank else dict.fromkeys(low)
            kinds |= {"low": matrix, "h": WIDE, "index": WHOLE, "scales": WIDE}
        signature = {
            param.name: "constexpr" if param.name in constants else kinds.get(param.name, "i32")
            for param in kernel.params
        }
        places = {(list(signature).index(name),): value for name, value in constants.items()}
        made = triton.compile(
            source(kernel, signature, places), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
        )
        assert made.metadata.shared * ring.programs <= 227 << 10  # so many share a multiprocessor
        assert ".local" not in made.asm["ptx"]
        # A constant of two modules makes Triton's name of a kept kernel depend on which kernel came first.
        constants_read = [name for name, _ in kernel.used_global_vals]
        assert len(constants_read) == len(set(constants_read))


def by_roles(kernel, kinds, constants):
    """The PTX of a Gluon kernel whose warps have roles, which takes a multiprocessor for itself and spills nothing."""
    source = pytest.importorskip("triton.experimental.gluon._runtime").GluonASTSource
    signature = {
        param.name: "constexpr" if param.is_constexpr else kinds.get(param.name, "i32") for param in kernel.params
    }
    names = list(signature)
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in names if str(signature[name])[0] == "*" or name in ("q_token", "q_head")]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    made = triton.compile(
        source(kernel, signature, places, attrs), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "launch_pdl": True},
    )  # fmt: skip
    assert made.metadata.shared <= 227 << 10
    text = made.asm["ptx"]
    assert "wgmma.mma_async" in text and "cp.async.bulk.tensor" in text and "setmaxnreg" in text
    assert ".local" not in text
    return text


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("group", [1, 5, 8])
def test_prompts_by_roles(group, half):
    prompts = pytest.importorskip("quire.ops.triton.attention_prompts")
    layout = pytest.importorskip("triton.experimental.gluon.language").NVMMASharedLayout(128, 16, 2)
    pages = f"tensordesc<{half}[64,128],{layout!r}>"
    kinds = {
        "out": f"*{half}", "q": f"*{half}", "k_pages": pages, "v_pages": pages, "tables": WHOLE, "items": WHOLE,
        "scale": "fp32",
    }  # fmt: skip
    constants = {"GROUP": group, "PAGE": 64, "BUFFERS": prompts._BUFFERS, "EARLY": True}
    assert "cp.async.cg.shared.global" in by_roles(prompts._prompts_kernel, kinds, constants)


@pytest.mark.parametrize("rows", [3, 17, 50, 200])
@pytest.mark.parametrize("name", ["fp8", "fp8-blocks", "int8-groups", "int4", "int4-rows", "fp4"])
def test_codes_times_some_rows(name, rows):
    """As above; codes reach `wgmma` in registers, without a detour through shared or local memory."""
    skinny = pytest.importorskip("quire.ops.triton.skinny_coded")
    source = pytest.importorskip("triton.experimental.gluon._runtime").GluonASTSource
    language = pytest.importorskip("triton.experimental.gluon.language")
    kind = name.partition("-")[0]
    packed, padded, half = "4" in kind, skinny._padded(rows), "bf16" if rows != 17 else "fp16"
    out = {"out": f"*{half}"}
    for kernel, more in (
        (skinny._parts_kernel, {"sums": "*fp32"}),
        (skinny._silu_kernel, out),
        (skinny._whole_kernel, out),
    ):
        is_gated = kernel is skinny._silu_kernel
        ring = skinny.ring_of(rows, 4096, gated=is_gated)
        box = ring.tile // 2 if is_gated else ring.tile
        codes, staged = (language.NVMMASharedLayout(swizzle, 16, 2) for swizzle in (64 if packed else 128, 128))
        flat = f"tensordesc<fp32[1,{box}],{language.NVMMASharedLayout(0, 32, 2)!r}>"
        is_grouped = name not in ("fp8", "int4-rows")
        kinds = {
            "matrix": f"tensordesc<i16[{box},{32 if packed else 64}],{codes!r}>",
            "rows": f"tensordesc<{half}[{padded},128],{staged!r}>", "bias": f"*{half}",
            "scale": flat if is_grouped else "*fp32", **more,
        }  # fmt: skip
        constants = {
            "TILE": ring.tile, "ROWS": padded, "PIECES": ring.pieces, "BUFFERS": ring.buffers,
            "CODING": skinny._KINDS[kind], "GROUPED": is_grouped, "BIAS": True, "EARLY": True,
        }  # fmt: skip
        signature = {
            param.name: "constexpr" if param.is_constexpr else kinds.get(param.name, "i32") for param in kernel.params
        }
        places = {(list(signature).index(name),): value for name, value in constants.items()}
        options = {"num_warps": ring.tile // 16}
        even = {(list(signature).index(name),): [["tt.divisibility", 16]] for name in ("columns", *more)}
        made = triton.compile(
            source(kernel, signature, places, even), target=GPUTarget("cuda", 90, 32), options=options
        )
        text = made.asm["ptx"]
        assert "wgmma.mma_async" in text and "griddepcontrol.wait" in text and ".local" not in text
        if kernel is skinny._whole_kernel:
            assert not re.search(r"st\.global\.(b16|b32|v2)", text) and "st.global.v4" in text
        loop = text[text.index("mbarrier.try_wait") : text.rindex("wgmma.mma_async")]
        assert "st.shared" not in loop  # what is widened stays in registers
        assert made.metadata.shared <= 227 << 10
        # TMA writes scales to multiples of 128 bytes, or the kernel ends in an illegal instruction.
        scales = [int(offset or 0) for offset in re.findall(r"ld\.shared\.b32\s+%r\d+, \[%r\d+(?:\+(\d+))?]", loop)]
        assert bool(scales) == is_grouped and all(offset % 128 in (0, 32) for offset in scales)


@pytest.mark.parametrize("rows", [40, 100, 150, 200])
@pytest.mark.parametrize("columns", [4096, 6144, 24576, 151936])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_codes_times_rounded_rows(kind, columns, rows):
    """As above; nothing is widened, and no way leads around the loop, or ptxas would let no two matmuls overlap."""
    skinny = pytest.importorskip("quire.ops.triton.skinny_rounded")
    source = pytest.importorskip("triton.experimental.gluon._runtime").GluonASTSource
    layout = pytest.importorskip("triton.experimental.gluon.language").NVMMASharedLayout(128, 8, 2)
    sums, codes = WIDE if rows == 100 else HALF, torch.int8 if kind == "int8" else torch.float8_e4m3fn
    of, product = ("i8", "s8.s8") if kind == "int8" else ("fp8e4nv", "e4m3.e4m3")
    for kernel, more in ((skinny._parts_kernel, {"sums": sums}), (skinny._silu_kernel, {"out": HALF})):
        ring = skinny.ring_of(rows, columns, 4096, 132, gated="out" in more, whole=columns == 151936)
        given, share = skinny._arguments(None, ring, codes, True), 2 if "out" in more else 1
        inputs = given["ROWS"], given["BESIDE"] or given["ROWS"]
        assert given["ROWS"] + given["BESIDE"] == ring.rows
        boxes = {"matrix": given["TILE"], "narrow": given["ADDED"] or given["TILE"]}
        boxes |= {"rows": share * inputs[0], "others": share * inputs[1]}
        kinds = {
            **{name: f"tensordesc<{of}[{box // share},128],{layout!r}>" for name, box in boxes.items()},
            "scale": "*fp32", "row_scale": "*fp32", **more,
        }  # fmt: skip
        options = {name: given.pop(name) for name in ("num_warps", "launch_pdl")}
        signature = {
            param.name: "constexpr" if param.is_constexpr or param.name == "bias" else kinds.get(param.name, "i32")
            for param in kernel.params
        }
        places = {(list(signature).index(name),): value for name, value in (given | {"bias": None}).items()}
        even = {(list(signature).index(name),): [["tt.divisibility", 16]] for name in ("columns", *more)}
        made = triton.compile(
            source(kernel, signature, places, even), target=GPUTarget("cuda", 90, 32), options=options
        )
        text = made.asm["ptx"]
        assert "wgmma.mma_async" in text and product in text and ".local" not in text and "griddepcontrol.wait" in text
        assert made.metadata.shared <= 227 << 10
        assert not re.search(r"st\.global\.(b16|b32|f32)", text) and re.search(r"st\.global\.v4", text)


def compiled_few(kernel, constants, absent, half, registers):
    """`absent`: names of pointers that are None."""
    source = pytest.importorskip("triton.experimental.gluon._runtime").GluonASTSource
    pointers = dict.fromkeys(("x", "gains", "bias", "stream", "out"), f"*{half}")
    kinds = pointers | {"codes": "*i32", "scale": "*fp32", "following": "*u8", "following_size": "i32"}
    kinds |= {"eps": "fp32", "offset": "fp32"}
    constants = constants | dict.fromkeys(absent)
    signature = {param.name: "constexpr" if param.name in constants else kinds[param.name] for param in kernel.params}
    names = list(signature)
    places = {(names.index(name),): value for name, value in constants.items()}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in names if signature[name].startswith("*")}
    options = {"num_warps": constants["WARPS"], "maxnreg": registers, "launch_pdl": True}
    return triton.compile(source(kernel, signature, places, attrs), target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", ["qkv", "up", "down", "odd"])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "fp4"])
def test_one_row_of_coded_weights(kind, shape, half):
    """As above; codes go from memory to registers and stay there, and begin to before the previous kernel ends."""
    few_coded = pytest.importorskip("quire.ops.triton.few_coded")
    n, k, gated = {"qkv": (6144, 4096, False), "up": (12288, 4096, True), "down": (4096, 12288, False),
                   "odd": (100, 640, True)}[shape]  # fmt: skip
    packed, with_norm = "4" in kind, shape != "down"
    config = few_coded.config_of(n, k, packed=packed, gated=gated)
    constants = {
        "N": n, "K": k, "GROUP": 128 if packed else k, "CODING": few_coded._KINDS[kind], "NORM": 1 if with_norm else 0,
        "GATED": gated, "BIAS": shape == "odd", "ADD": not with_norm, "WARPS": config.warps, "AHEAD": config.ahead,
        "REPEAT": config.repeat if n % (16 * config.repeat) == 0 else 1, "EARLY": True,
    }  # fmt: skip
    absent = {"gains": not with_norm, "bias": shape != "odd", "stream": with_norm, "following": shape != "down"}
    absent = {name for name, is_absent in absent.items() if is_absent}
    made = compiled_few(few_coded._few_coded_kernel, constants, absent, half, config.registers)
    text = made.asm["ptx"]
    before, after = text.split("griddepcontrol.wait")
    assert "mma.sync" not in before and after.count("mma.sync") >= 4 and ".local" not in text
    assert len(re.findall(r"ld\.global\.v4", before)) >= 2  # 16 bytes a thread and row
    loop = after[after.index("mma.sync") : after.rindex("mma.sync")]
    between = 2 * (constants["REPEAT"] - 1)  # sums of a tile of rows, of the gate and of those beside it
    assert loop.count("bar.sync") <= between and loop.count("st.shared") <= between
    assert made.metadata.shared <= 50 << 10  # so that several programs share a multiprocessor
    fetches = 1 if shape == "down" else 0  # behind the loop, where all codes of a program are on their way
    assert text.count("cp.async.bulk.prefetch.L2") == after.count("cp.async.bulk.prefetch.L2") == fetches


class FewOnNumpy:
    """In the place of a kernel: compiled for Hopper, and run there."""

    def __init__(self, kernel):
        self._kernel = kernel

    def __getitem__(self, grid):
        def launch(*given, num_warps, maxnreg, **constants):
            names = [param.name for param in self._kernel.params][: len(given)]
            absent = {name for name, value in zip(names, given, strict=True) if value is None}
            made = compiled_few(self._kernel, constants, absent, "bf16", maxnreg)
            memory, params = Memory(), []
            for value in given:
                if isinstance(value, torch.Tensor):
                    value = memory.add(value.view(-1).view(torch.uint8).numpy())
                if value is not None:
                    params.append(int(np.float32(value).view(np.uint32)) if isinstance(value, float) else value)
            code, labels = parse(made.asm["ptx"])
            for place in range(grid[0]):
                Program(32 * num_warps, params, memory, made.metadata.shared, (place, 0)).run(code, labels)

        return launch


@pytest.mark.parametrize("config", [(4, 2, 128, 1), (8, 1, 128, 1), (4, 4, 128, 2), (16, 1, 64, 1)])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "fp4"])
def test_compiled_matmuls_of_one_row_of_codes_are_right(monkeypatch, kind, config):
    """In the layouts of the compiled kernel, whose instructions numpy runs."""
    few_coded = pytest.importorskip("quire.ops.triton.few_coded")
    monkeypatch.setattr(few_coded, "_few_coded_kernel", FewOnNumpy(few_coded._few_coded_kernel))
    rows, width = 64, 1024
    weight = weight_of(Made(kind, rows, width, 128 if "4" in kind else width), "cpu")
    x, stream = normal(1, width, dtype=torch.bfloat16), normal(1, rows, seed=2, dtype=torch.bfloat16)
    rule = NormRule(normal(width, seed=3, dtype=torch.bfloat16), 1e-6, 0.0, False)
    given = {"config": few_coded.FewCodedConfig(*config)}
    check(few_coded.few_coded_linear(x, weight, stream=stream, **given), linear_add(x, weight, None, stream), 1e-2)
    found = few_coded.few_coded_linear(x, weight, norm=rule, gated=True, **given)
    check(found, norm_linear(x, rule, weight, None, act_ops.GATED["silu"].reference), 1e-2)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "fp4"])
def test_one_row_of_codes_of_zeros_is_zeros(monkeypatch, kind):
    """In the row, in the gains of its norm, or in both; as checkpoints have them in layers that are to do nothing."""
    few_coded = pytest.importorskip("quire.ops.triton.few_coded")
    monkeypatch.setattr(few_coded, "_few_coded_kernel", FewOnNumpy(few_coded._few_coded_kernel))
    rows, width = 32, 512
    weight = weight_of(Made(kind, rows, width, 128 if "4" in kind else width), "cpu")
    x, gains = normal(1, width, dtype=torch.bfloat16), normal(width, seed=3, dtype=torch.bfloat16)
    given = {"config": few_coded.FewCodedConfig(4, 1, 128)}
    for row, by in ((0, 0), (0, 1), (1, 0)):
        for rule in (NormRule(gains * by, 1e-6, 0.0, False), NormRule(gains * by, 1e-12, 0.0, True)):
            found = few_coded.few_coded_linear(x * row, weight, norm=rule, gated=True, **given)
            assert torch.equal(found, torch.zeros_like(found))
    found = few_coded.few_coded_linear(x * 0, weight, **given)
    assert torch.equal(found, torch.zeros_like(found))


POINTED = {
    torch.bfloat16: HALF, torch.float16: "*fp16", torch.float32: WIDE, torch.int32: WHOLE, torch.uint8: "*u8",
}  # fmt: skip


def compiled_for(kernel, given, constants, registers):
    """A Gluon kernel with these arguments, of which None and numbers are constants too."""
    source = pytest.importorskip("triton.experimental.gluon._runtime").GluonASTSource
    names = [param.name for param in kernel.params]
    values = dict(zip(names, given, strict=False))
    constants = constants | {name: value for name, value in values.items() if value is None}
    kinds = {name: POINTED[value.dtype] if isinstance(value, torch.Tensor) else "fp32" for name, value in values.items()
             if value is not None}  # fmt: skip
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = [n for n, value in values.items() if isinstance(value, torch.Tensor) and value.data_ptr() % 16 == 0]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    options = {"num_warps": constants["WARPS"], "maxnreg": registers, "launch_pdl": constants["EARLY"]}
    return triton.compile(source(kernel, signature, places, attrs), target=GPUTarget("cuda", 90, 32), options=options)


class RunOnNumpy:
    """In the place of a kernel: compiled for Hopper, and run there. `made`: the last one."""

    def __init__(self, kernel):
        self.kernel, self.made, self.given = kernel, None, ()

    def __getitem__(self, grid):
        def launch(*given, num_warps, maxnreg, launch_pdl=False, **constants):
            self.made, self.given = compiled_for(self.kernel, given, constants, maxnreg), given
            self.run(grid[0], 32 * num_warps)

        return launch

    def run(self, programs, threads):
        memory, params = Memory(), []
        for value in self.given:
            if isinstance(value, torch.Tensor):
                value = memory.add(value.view(-1).view(torch.uint8).numpy())
            if value is not None:
                params.append(int(np.float32(value).view(np.uint32)) if isinstance(value, float) else value)
        code, labels = parse(self.made.asm["ptx"])
        for place in range(programs):
            Program(threads, params, memory, self.made.metadata.shared, (place, 0)).run(code, labels)


class OnlyCompiled(RunOnNumpy):
    def run(self, programs, threads):
        """Nothing."""


@pytest.fixture
def few_blocks(monkeypatch):
    module = pytest.importorskip("quire.ops.triton.few_blocks")
    monkeypatch.setattr(module, "_few_blocks_kernel", RunOnNumpy(module._few_blocks_kernel))
    return module


def empty_blocks(name, rows, width):
    """As `block_weight`; of large matrices, whose numbers are not read."""
    weight = block_weight(name, 16, width)
    chunked = {key: torch.empty((len(t), rows, t.shape[2]), dtype=t.dtype) for key, t in weight.tensors().items()
               if t.ndim == 3}  # fmt: skip
    codes = chunked.pop("codes", torch.empty((rows, width), dtype=torch.int8))
    return weight._replace(rows=rows, codes=codes, **chunked)


@pytest.mark.parametrize(
    ("name", "shape", "half"),
    [("Q4_K", "up", torch.bfloat16), ("Q4_K", "down", torch.bfloat16), ("Q6_K", "qkv", torch.bfloat16),
     ("Q6_K", "qkv", torch.float16), ("Q6_K", "widest", torch.bfloat16), ("Q8_0", "up", torch.bfloat16),
     ("Q5_K", "up", torch.bfloat16), ("Q5_1", "odd", torch.bfloat16)],
)  # fmt: skip
def test_one_row_of_blocks(few_blocks, monkeypatch, name, shape, half):
    """Codes go from memory to registers and stay there, and begin to before the previous kernel ends; nothing is
    exchanged between warps while the matrix is read."""
    n, k, mode = {"qkv": (6144, 4096, "norm"), "up": (12288, 4096, "gated"), "down": (4096, 12288, "add"),
                  "widest": (8192, 28672, "add"), "odd": (100, 2560, "gated")}[shape]  # fmt: skip
    kernel = OnlyCompiled(few_blocks._few_blocks_kernel.kernel)
    monkeypatch.setattr(few_blocks, "_few_blocks_kernel", kernel)
    rule = NormRule(torch.empty(k, dtype=half), 1e-6, 0.0, False)
    given = {"stream": torch.empty((1, n), dtype=half)} if mode == "add" else {"norm": rule, "gated": mode == "gated"}
    weight = empty_blocks(name, 2 * n if mode == "gated" else n, k)
    assert few_blocks.fits_weight(weight)
    few_blocks.few_blocks_linear(torch.empty((1, k), dtype=half), weight, early=True, **given)
    text = kernel.made.asm["ptx"]
    before, after = text.split("griddepcontrol.wait")
    assert "mma.sync" not in before and after.count("mma.sync") >= 16 and ".local" not in text
    assert len(re.findall(r"ld\.global\.v4", before)) >= 4  # 16 bytes a thread, row and chunk
    matmul = after[after.index("mma.sync") : after.rindex("mma.sync")]
    assert "bar.sync" not in matmul and "st.shared" not in matmul and "cvt.rn" not in matmul
    for part in (after[: after.index("mma.sync")], after[after.rindex("mma.sync") :]):  # of the row, of warps' sums
        stores, loads = ([found.start() for found in re.finditer(pattern, part)] for pattern in
                         (r"st\.shared", r"ld\.shared|ldmatrix"))  # fmt: skip
        assert "bar.sync" in part[max(stores) : max(loads)]
    assert kernel.made.metadata.shared <= (24 << 10 if k <= 4096 else 80 << 10)


# Every type once; with them sizes, roundings and what is fused: rows (of a gate and beside it), columns, warps, turns
# that are ahead. 2560 columns are no whole turns of four warps, and 256 only one warp's.
RUN = {
    "Q4_K": (40, 2560, (4, 1), "norm", HALF), "Q5_K": (33, 256, (4, 1), "bias", HALF),
    "Q6_K": (50, 1024, (4, 1), "gated", HALF), "Q8_0": (16, 4096, (4, 2), "plain", HALF),
    "Q4_0": (24, 2048, (8, 1), "add", "*fp16"), "Q4_1": (16, 4096, (2, 4), "wide", HALF),
    "Q5_0": (34, 512, (2, 1), "gated", "*fp16"), "Q5_1": (7, 768, (4, 1), "add", HALF),
    "Q2_K": (16, 2048, (4, 2), "norm", "*fp16"), "Q3_K": (17, 1280, (2, 3), "plain", HALF),
}  # fmt: skip


@pytest.mark.parametrize("name", RUN)
def test_compiled_matmuls_of_one_row_of_blocks_are_right(few_blocks, name):
    """In the layouts of the compiled kernel, whose instructions numpy runs; against the numbers that the gguf package
    reads from the blocks. Nothing is read or written outside of the tensors."""
    rows, width, config, mode, kind = RUN[name]
    weight, half = block_weight(name, rows, width), {HALF: torch.bfloat16, "*fp16": torch.float16}[kind]
    x, given = row_and_rest(rows, width, mode, half)
    assert few_blocks.fits(x, weight)
    found = few_blocks.few_blocks_linear(
        x, weight, **given, config=few_blocks.FewBlocksConfig(*config, 168), early=mode != "bias"
    )
    numbers = numbers_of(name, raw_blocks(name, rows, width))
    check(found, of_numbers(x, numbers, **given).to(half), 1e-2 if half is torch.bfloat16 else 2e-3)


def test_every_type_that_one_row_has_a_kernel_for_is_among_those():
    few_blocks = pytest.importorskip("quire.ops.triton.few_blocks")
    assert (
        {name for name in TYPES if few_blocks.fits_weight(block_weight(name, 16, 256))} == set(FEW_BLOCKS) == set(RUN)
    )


def test_only_weights_are_read_before_the_kernel_waits(few_blocks):
    """The previous kernel may still write all else; so that has no address yet."""
    rows, width = 50, 1024
    x, given = row_and_rest(rows, width, "gated", torch.bfloat16)
    weight = block_weight("Q6_K", rows, width)
    few_blocks.few_blocks_linear(x, weight, **given, config=few_blocks.FewBlocksConfig(4, 1, 168), early=True)
    kernel = few_blocks._few_blocks_kernel
    code, labels = parse(kernel.made.asm["ptx"])
    (wait,) = [place for place, line in enumerate(code) if line.startswith("griddepcontrol.wait")]
    memory, params = Memory(), []
    names = [param.name for param in kernel.kernel.params]
    for name, value in zip(names, kernel.given, strict=False):
        is_weight = name in ("gains", "codes", "high", "scale", "least", "coarse")
        if isinstance(value, torch.Tensor):
            value = memory.add(value.view(-1).view(torch.uint8).numpy()) if is_weight else 1 << 60
        if value is not None:
            params.append(int(np.float32(value).view(np.uint32)) if isinstance(value, float) else value)
    for place in range(2):
        Program(128, params, memory, kernel.made.metadata.shared, (place, 0)).run(code[:wait], labels)
        with pytest.raises(IndexError):
            Program(128, params, memory, kernel.made.metadata.shared, (place, 0)).run(code, labels)


def test_rows_of_any_size_times_blocks(few_blocks):
    """Zeros, numbers near both ends of bfloat16, and such as are none."""
    rows, width = 16, 1280
    weight, numbers = block_weight("Q4_K", rows, width), numbers_of("Q4_K", raw_blocks("Q4_K", rows, width))
    config = few_blocks.FewBlocksConfig(4, 1, 168)
    x, stream = normal(1, width, dtype=torch.bfloat16), normal(1, rows, seed=2, dtype=torch.bfloat16)

    def run(row):
        return few_blocks.few_blocks_linear(row, weight, stream=stream, config=config, early=True)

    assert torch.equal(run(torch.zeros_like(x)), stream)
    for size in (1e-30, 1e30):
        stream = torch.zeros_like(stream)
        check(run(x * size), linear_add((x * size).float(), numbers, None, None).bfloat16(), 5e-3)
    x[0, 1024:] = 0  # whole groups
    check(run(x), linear_add(x.float(), numbers, None, None).bfloat16(), 5e-3)
    for none in (torch.nan, torch.inf, -torch.inf):
        x[0, 1100] = none
        assert run(x).isnan().all()


def test_one_row_of_blocks_of_zeros_is_zeros(few_blocks):
    """As of codes: in the row, in the gains of its norm, or in both."""
    rows, width = 40, 2560
    weight, config = block_weight("Q4_K", rows, width), few_blocks.FewBlocksConfig(4, 1, 168)
    x, given = row_and_rest(rows, width, "norm", torch.bfloat16)
    for row, by in ((0, 0), (0, 1), (1, 0)):
        rule = given["norm"]._replace(weight=given["norm"].weight * by)
        found = few_blocks.few_blocks_linear(x * row, weight, norm=rule, config=config, early=True)
        assert torch.equal(found, torch.zeros_like(found))


def test_matrices_that_are_blocks_of_several_types_side_by_side(few_blocks):
    """Every matmul writes its part of the row, at any place; nothing is copied."""
    few_forms = pytest.importorskip("quire.ops.triton.few_forms")
    shapes = {"Q4_K": 20, "Q6_K": 24}
    weights = [block_weight(name, rows, 512) for name, rows in shapes.items()]
    x, given = row_and_rest(sum(shapes.values()), 512, "gated", torch.bfloat16)
    rule, bias = given["norm"], given["bias"]
    for added in (bias, None):
        found = few_forms.norm_linears(x, rule, weights, added, early=True)
        check(found, norm_linears(x, rule, weights, added), 1e-2)
    assert few_forms.few_rows(512, torch.bfloat16, [*weights, torch.empty(8, 512)]) == 1
    assert few_forms.few_rows(512, torch.float32, weights) == 0
    assert few_forms.few_rows(512, torch.bfloat16, [*weights, block_weight("IQ4_XS", 16, 512)]) == 0


def compiled_mx(kernel, config, first, n, k, *, direct):
    source = pytest.importorskip("triton.experimental.gluon._runtime").GluonASTSource
    kinds = dict.fromkeys(("codes", "scale", "order", "tile_expert", "tile_start", "end"), WHOLE)
    kinds |= {"a": HALF, "bias": HALF, "out": HALF if config.parts == 1 else WIDE, "most_tiles": "i32"}
    kinds |= {"pairs": "i32", "alpha": "fp32", "limit": "fp32"}
    constants = {
        "N": n, "K": k, "TOP_K": 4, "ACT": act.CLAMPED, "BIAS": True, "FIRST": first, "GATED": first,
        "DIRECT": direct, "BM": config.bm, "WARPS": config.warps, "AHEAD": config.ahead, "PARTS": config.parts,
        "TILES": 8, "EARLY": True,
    }  # fmt: skip
    names = kernel.arg_names
    signature = {name: kinds.get(name, "constexpr") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in names if signature[name].startswith("*")}
    options = {"num_warps": config.warps, "launch_pdl": True, "maxnreg": config.registers or None}
    return triton.compile(source(kernel, signature, places, attrs), target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("tokens", [1, 32, 64, 128, 512, 2048])
def test_experts_in_mxfp4(tokens, first):
    """As above; codes go from memory to the registers of `wgmma`, 16 bytes a thread, and those of the next turn are
    asked for before this one's are multiplied."""
    moe_mx = pytest.importorskip("quire.ops.triton.moe_mx")
    config = moe_mx.configs_of(tokens, 4 * tokens, 32)[not first]
    made = compiled_mx(moe_mx._mx_kernel, config, first, 2880, 2880, direct=tokens == 1)
    text = made.asm["ptx"]
    assert "wgmma.mma_async" in text and ".local" not in text
    assert ("griddepcontrol.wait" in text.split("wgmma")[0]) and made.metadata.shared <= 113 << 10
    loop = text[text.index("wgmma.fence") : text.rindex("wgmma.wait_group")]
    assert "ld.shared" not in loop and "st.shared" not in loop
    asked = text[: text.index("wgmma.mma_async")]
    assert len(re.findall(r"ld\.global\.v4\.b32", asked)) >= min(2 * config.ahead, 2880 // 64 // config.parts)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("tokens", [1, 64, 128, 512, 2048])
def test_experts_in_mxfp4_of_small_models(tokens, first):
    """Widths of one, two and three turns of a program, of which only the last has a loop."""
    moe_mx = pytest.importorskip("quire.ops.triton.moe_mx")
    config = moe_mx.configs_of(tokens, 4 * tokens, 32)[not first]._replace(parts=1)
    for turns in (1, 2, 3):
        units = turns * config.ahead - config.ahead // 2  # the last turn is not whole
        text = compiled_mx(moe_mx._mx_kernel, config, first, 192, 64 * units, direct=tokens == 1).asm["ptx"]
        assert text.count("wgmma.mma_async") >= min(units, config.ahead) and ".local" not in text


class OnNumpy:
    """In the place of a kernel: compiled for Hopper, and run there."""

    def __init__(self, moe_mx):
        self._moe_mx, self._kernel = moe_mx, moe_mx._mx_kernel

    def __getitem__(self, grid):
        def launch(*given, num_warps, maxnreg, **constants):
            config = self._moe_mx.MxConfig(
                *(constants[name] for name in ("BM", "WARPS", "AHEAD", "PARTS")), maxnreg or 0
            )
            first, n, k = (constants[name] for name in ("FIRST", "N", "K"))
            made = compiled_mx(self._kernel, config, first, n, k, direct=constants["DIRECT"])
            memory, params = Memory(), []
            for value in given:
                if isinstance(value, torch.Tensor):
                    value = memory.add(value.view(-1).view(torch.uint8).numpy())
                params.append(int(np.float32(value).view(np.uint32)) if isinstance(value, float) else value)
            code, labels = parse(made.asm["ptx"])
            for place in itertools.product(*map(range, grid)):
                Program(32 * num_warps, params, memory, made.metadata.shared, place).run(code, labels)

        return launch


@pytest.mark.parametrize(
    ("tokens", "dim", "ffn", "bm", "warps", "ahead", "parts"),
    [(1, 320, 192, 8, 4, 4, 3), (7, 192, 320, 8, 4, 2, 1), (9, 320, 192, 16, 8, 2, 1), (12, 128, 192, 32, 8, 4, 1),
     (40, 192, 64, 64, 8, 2, 1), (70, 64, 128, 128, 8, 2, 1)],
)  # fmt: skip
def test_compiled_experts_in_mxfp4_are_right(monkeypatch, tokens, dim, ffn, bm, warps, ahead, parts):
    """In the layouts of the compiled kernel, whose instructions numpy runs."""
    moe_mx = pytest.importorskip("quire.ops.triton.moe_mx")
    experts, draw, clamps = 5, Draw(1, "cpu", torch.bfloat16), {"alpha": 1.702, "limit": 2.0}
    w1, w2 = make_codes("mxfp4", draw, experts, 2 * ffn, dim), make_codes("mxfp4", draw, experts, dim, ffn)
    x, stream = draw.normal(tokens, dim), draw.normal(tokens, dim)
    rest = {"b1": draw.normal(experts, 2 * ffn), "b2": draw.normal(experts, dim), "stream": stream}
    weights, index = moe_ops.route(draw.normal(tokens, experts, dtype=torch.float32), 4)
    monkeypatch.setattr(moe_mx, "_mx_kernel", OnNumpy(moe_mx))
    monkeypatch.setattr(moe, "sort_pairs", lambda index, experts, bm, **_: sorted_pairs(index, experts, bm))
    monkeypatch.setattr(moe_mx, "combine", summed)
    config = moe_mx.MxConfig(bm, warps, ahead)
    found = moe_mx.run_experts(
        x, weights, index.int(), as_mx(w1, gated=True), as_mx(w2, gated=False), act=(act.CLAMPED, *clamps.values()),
        configs=(config, config._replace(parts=parts)), **rest,
    )  # fmt: skip
    wide = {name: value.float() for name, value in rest.items()}
    meant = partial(clamped_swiglu.reference, **clamps)
    wanted = run_coded_experts.reference(x.float(), weights, index, w1, w2, act=meant, **wide)
    assert (found.float() - wanted).norm() / (wanted - stream.float()).norm() < 1.5e-2


@pytest.mark.parametrize("name", ["fp8", "fp8-blocks", "int8", "int4", "int4-zeros", "int4-zeros-between", "fp4"])
def test_coded_weights(name):
    """Every tile that is chosen, for both dtypes; no local memory, and 8-bit inputs reach their tensor cores."""
    form = coded.HALVES if "4" in name else coded.WIDENED
    group = {"fp8": 4096, "int8": 4096, "fp4": 16}.get(name, 128)
    pointer = "*u8" if form == coded.HALVES else "*fp8e4nv" if "fp8" in name else "*i8"
    kind = "int4" if name.startswith("int4") else name
    zero = WIDE if "between" in name else "*u8" if "zeros" in name else "none"
    for rows, half in ((1, HALF), (1, "*fp16"), (24, HALF), (200, HALF)):
        weight = CodedWeight(kind, None, None, None, 4096, 4096, group)
        tile = coded.tile_for(rows, weight)
        kinds = {
            "x": half, "codes": pointer, "scale": WIDE, "zero": zero, "bias": "none", "out": half,
            "rows": "i32", "x_stride": "i32",
        }  # fmt: skip
        constants = {
            "N": 4096, "K": 4096, "GROUP": group, "HALF": (16 if group == 16 else 64) if form == coded.HALVES else 0,
            "FORM": form, "FLOAT": name == "fp4", "ZERO": "zeros" in name, "BIAS": False, "BM": tile.inputs,
            "BN": tile.columns, "BK": min(tile.depth, group), "ASM": True, "EARLY": True,
        }  # fmt: skip
        if tile.split:
            made = compiled(coded._few_coded_kernel, kinds, constants | {"SPLIT": tile.split}, warps=tile.warps,
                            stages=tile.stages, early=True)  # fmt: skip
        else:
            made = compiled(coded._coded_kernel, kinds | {"x_scale": "none"}, constants | {"BAND": 8},
                            warps=tile.warps, stages=tile.stages, early=True)  # fmt: skip
        assert "griddepcontrol.wait" in made.asm["ptx"] and "cp.async" in made.asm["ptx"]
        assert made.metadata.shared <= 227 << 10


@pytest.mark.parametrize(("pointer", "group"), [("*fp8e4nv", 4096), ("*fp8e4nv", 128), ("*i8", 4096)])
def test_rounded_inputs(pointer, group):
    tile = coded.ROUNDED_TILE
    kinds = {
        "x": pointer, "x_scale": WIDE, "codes": pointer, "scale": WIDE, "zero": "none", "bias": "none", "out": HALF,
        "rows": "i32", "x_stride": "i32",
    }  # fmt: skip
    constants = {
        "N": 24576, "K": 4096, "GROUP": group, "HALF": 0, "FORM": coded.DIRECT, "FLOAT": False, "ZERO": False,
        "BIAS": False, "BM": tile.inputs, "BN": tile.columns, "BK": min(tile.depth, group), "BAND": 8, "ASM": True,
        "EARLY": False,
    }  # fmt: skip
    text = compiled(coded._coded_kernel, kinds, constants, warps=tile.warps, stages=tile.stages).asm["ptx"]
    assert "wgmma.mma_async" in text and ("e4m3" in text if pointer == "*fp8e4nv" else "s8.s8" in text)
    for dtype, largest in (("*fp8e4nv", 448.0), ("*i8", 127.0)):
        kinds = {"x": HALF, "out": dtype, "scales": WIDE, "rows": "i32", "x_stride": "i32"}
        constants = {
            "K": 4096, "GROUP": group, "GROUPS": 4096 // group, "BLOCK": group, "LARGEST": largest, "EARLY": True,
        }  # fmt: skip
        compiled(coded._quantize_kernel, kinds, constants, early=True)


@pytest.mark.parametrize("grouped", [False, True])
def test_what_the_library_multiplies_is_tried_first(grouped, monkeypatch):
    """A start must survive a library that refuses, in whatever way, or that means something else by its scales."""
    cpu = torch.device("cpu")

    def multiply(a, b, a_scale, b_scale, **options):
        assert a_scale.shape == (256, 4 if grouped else 1) and b_scale.shape == (4 if grouped else 1, 256)
        left, right = (each.float().unflatten(1, (b_scale.shape[0], -1)) for each in (a, b.t()))
        numbers = [(left * a_scale[:, :, None]).flatten(1), (right * b_scale.t()[:, :, None]).flatten(1)]
        return (numbers[0] @ numbers[1].t()).to(options["out_dtype"])

    def refuse(kind):
        def scaled_mm(*args, **options):
            raise kind("Invalid scaling configuration")

        return scaled_mm

    def flipped(a, b, a_scale, b_scale, **options):
        return multiply(a, b, a_scale.flip(0), b_scale, **options)

    outcomes = {multiply: True, flipped: False} | {
        refuse(kind): False for kind in (RuntimeError, ValueError, TypeError)
    }
    for scaled_mm, outcome in outcomes.items():
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
        coded._library_multiplies.cache_clear()
        assert coded._library_multiplies(cpu, grouped=grouped) is outcome
    coded._library_multiplies.cache_clear()


@pytest.mark.parametrize("kind", [HALF, WIDE])
@pytest.mark.parametrize(("size", "window", "slopes"), [(64, 0, False), (80, 128, True)])
def test_attention_within_texts(size, window, slopes, kind):
    bm, bn, warps = texts.tiles_of(size, torch.float32 if kind == WIDE else torch.bfloat16)
    kinds = dict.fromkeys(("q", "k", "v", "out"), kind) | dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32")
    kinds |= {"slopes": WIDE if slopes else "none", "items": WHOLE, "scale": "fp32"}
    constants = {
        "HEADS": 12, "GROUP": 2, "SIZE": size, "WIDE": triton.next_power_of_2(size), "WINDOW": window,
        "SLOPES": slopes, "BM": bm, "BN": bn, "EXACT": kind == WIDE,
    }  # fmt: skip
    made = compiled(texts._texts_kernel, kinds, constants, warps=warps, stages=2, unaligned=("items",))
    assert made.metadata.shared <= 227 << 10
    kinds = {"x": kind, "out": WIDE, "ends": WHOLE, "counts": WHOLE, "width": "i32"}
    compiled(texts._sums_kernel, kinds, {"BLOCK": 128}, unaligned=("ends", "counts"))


BLOCKS = ["Q4_0", "Q4_K", "Q5_1", "Q6_K", "Q8_0", "IQ4_XS", "IQ2_S", "NVFP4"]
POINTERS = {torch.uint8: "*u8", torch.int8: "*i8", torch.float16: "*fp16"}


def pointer(tensor):
    return "none" if tensor is None else POINTERS[tensor.dtype]


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_gguf_files(name, half):
    weight = block_weight(name, 64, 1024)
    form = coded_blocks._Form.of(weight)
    kinds = {key: pointer(getattr(weight, key)) for key in ("codes", "high", "scale", "least", "coarse")}
    constants = coded_blocks._constants(weight, form)
    tiles = {coded_blocks.tile_for(rows) for rows in (1, 16, 32)} | {coded_blocks.FIXED}
    for tile in sorted(tiles)[:: 2 if half == "fp16" else 1]:
        made = compiled(
            coded_blocks._blocks_kernel,
            kinds | {"x": f"*{half}", "table": "none", "bias": f"*{half}", "out": f"*{half}", "rows": "i32",
                     "x_stride": "i32"},
            constants | {"BIAS": True, "BM": tile.inputs, "BN": tile.columns, "SPLIT": tile.split, "ASM": True,
                         "EARLY": True},
            warps=tile.warps, stages=tile.stages, early=True,
        )  # fmt: skip
        assert "mma" in made.asm["ptx"] and ".local" not in made.asm["ptx"]
    table = "*fp32" if weight.kind in coded_blocks._NUMBERS else "none"
    compiled(coded_blocks._decode_blocks_kernel, kinds | {"table": table, "out": f"*{half}"}, constants | {"BN": 64})
    compiled(
        coded_blocks._decode_rows_kernel,
        kinds | {"index": "*i64", "zero": "none", "table": table, "out": f"*{half}"},
        constants | {"TABLE": int(table != "none"), "ZERO": False, "CENTRE": 8, "BLOCK": 1024},
    )


@pytest.mark.parametrize("rows", [1, 17, 64, 200])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_times_some_rows(name, rows):
    """Blocks reach `wgmma` in registers, without a detour through shared or local memory; and every scale is read where
    TMA wrote it: words of rows that are 8 apart."""
    skinny = pytest.importorskip("quire.ops.triton.skinny_blocks")
    source = pytest.importorskip("triton.experimental.gluon._runtime").GluonASTSource
    language = pytest.importorskip("triton.experimental.gluon.language")
    weight, half = block_weight(name, 64, 1024), "bf16" if rows != 17 else "fp16"
    assert skinny.fits_weight(weight)
    padded, packed = skinny._padded(rows), weight.kind != "int8"

    def described(kind, shape, swizzle):
        return f"tensordesc<{kind}{shape},{language.NVMMASharedLayout(swizzle, int(kind[-2:]), 2)!r}>"

    for kernel, more in ((skinny._parts_kernel, {"sums": "*fp32"}), (skinny._silu_kernel, {"out": f"*{half}"})):
        if rows > skinny.MOST_GATED and "out" in more:
            continue
        ring = skinny.ring_of(rows, 1024)
        box = ring.tile // 2 if "out" in more else ring.tile
        words = {
            key: described("i32", f"[1,{box * skinny._words_of(values)}]", 0)
            for key in ("scale", "least", "coarse")
            if (values := getattr(weight, key)) is not None
        }
        high = {} if weight.high is None else {"high": described("i16", f"[{box},16]", 32)}
        kinds = {
            "matrix": described("i16", f"[{box},{32 if packed else 64}]", 64 if packed else 128), **words, **high,
            "rows": described(half, f"[{padded},128]", 128), "bias": f"*{half}", **more,
        }  # fmt: skip
        x = torch.zeros((rows, 1024), dtype=torch.bfloat16)
        given = skinny._arguments(x, weight, x, ring, True)
        constants = {key: value for key, value in given.items() if key not in ("num_warps", "launch_pdl")}
        constants |= {key: None for key in ("high", "scale", "least", "coarse") if key not in kinds}
        signature = {
            param.name: "constexpr" if param.name in constants else kinds.get(param.name, "i32")
            for param in kernel.params
        }
        places = {(list(signature).index(key),): value for key, value in constants.items()}
        made = triton.compile(
            source(kernel, signature, places), target=GPUTarget("cuda", 90, 32), options={"num_warps": ring.tile // 16}
        )
        text = made.asm["ptx"]
        assert "wgmma.mma_async" in text and "griddepcontrol.wait" in text and ".local" not in text
        loop = text[text.index("mbarrier.try_wait") : text.rindex("wgmma.mma_async")]
        assert "st.shared" not in loop
        assert made.metadata.shared <= 227 << 10


def compiled_one_row(tile, *, heads, kv_heads, size, page, most, code=None, early=True):
    """code: of a cache in 8 bits."""
    kinds = dict.fromkeys(("out", "qkv", "q_weight", "k_weight", "cos", "sin"), HALF)
    kinds |= dict.fromkeys(("keys", "values"), code or HALF)
    kinds |= dict.fromkeys(("k_scales", "v_scales"), WIDE if code else "none")
    kinds |= dict.fromkeys(("tables", "row_index", "contexts", "counters"), WHOLE) | {"slots": "*i64"}
    kinds |= {"partial": WIDE, "sums": WIDE} | dict.fromkeys(("eps", "offset", "scale"), "fp32")
    strides = ("qkv_stride", "page_stride", "k_head", "v_head", "table_stride")
    constants = {
        "HQ": heads, "HKV": kv_heads, "D": size, "BLOCK_M": 16, "BLOCK_N": tile.block_n, "PAGE": page,
        "GROUPS": triton.next_power_of_2(heads // kv_heads), "NORM": True, "WIDE": False, "MOST": most,
        "LEAST": tile.least, "AT_ONCE": 8, "LARGEST": {None: 0.0, "*fp8e4nv": 448.0, "*fp8e5": 57344.0}[code],
        "CODING": 1 if code else 0, "ASM": True, "EARLY": early,
    }  # fmt: skip
    lists = ("tables", "row_index", "contexts", "slots", "table_stride", "k_scales", "v_scales")
    return compiled(
        attention_one._one_kernel, kinds | dict.fromkeys(strides, "i32"), constants, warps=tile.warps, early=early,
        unaligned=lists, even=("k_head", "v_head"),
    )  # fmt: skip


@pytest.mark.parametrize("code", [None, "*fp8e4nv", "*fp8e5"])
@pytest.mark.parametrize(("group", "size", "page"), [(4, 128, 64), (8, 128, 16), (16, 64, 48)])
def test_one_row_of_attention_loads_its_keys_before_it_waits(group, size, page, code):
    tile = attention_one.TILES[size]
    text = compiled_one_row(tile, heads=8 * group, kv_heads=8, size=size, page=page, most=33, code=code).asm["ptx"]
    before = text[: text.index("griddepcontrol.wait")]
    loads = tile.block_n * size * 2 * (1 if code else 2) // (16 * 32 * tile.warps)
    assert before.count("ld.global.v4.b32") >= loads  # of 16 bytes a thread: keys and values
    assert ".local" not in text


@pytest.mark.parametrize("code", [None, "*fp8e4nv"])
@pytest.mark.parametrize("context", [1, 66, 400])
def test_one_row_of_compiled_attention_is_right(context, code):
    """Splits, and one with two tiles, over a cache in 16 bits or of codes; numpy runs the instructions."""
    heads, kv_heads, size, page, most = 8, 2, 128, 64, 5
    shape = {"heads": heads, "kv_heads": kv_heads, "size": size, "page": page, "most": most}
    made = compiled_one_row(attention_one.TILES[size], **shape, code=code)
    dtype = torch.float8_e4m3fn if code else torch.bfloat16
    scales = CacheScales(torch.tensor([0.02]), torch.tensor([0.03])) if code else None
    k_scale, v_scale = (0.02, 0.03) if code else (1.0, 1.0)
    make = torch.Generator().manual_seed(context)

    def draw(*shape):
        return torch.randn(shape, generator=make).bfloat16()

    blocks = -(-context // page) + 2
    order = torch.randperm(blocks, generator=make)
    tables = torch.full((3, blocks + 1), 1 << 28, dtype=torch.int32)
    tables[1, :blocks] = order
    pages = torch.full((blocks, 2, kv_heads, page, size), float("nan"), dtype=dtype)
    keys, values = pages[:, 0].transpose(1, 2), pages[:, 1].transpose(1, 2)
    at = torch.arange(context)
    where = order[at // page], at % page
    keys[where[0][:-1], where[1][:-1]] = (draw(context - 1, kv_heads, size) / k_scale).to(dtype)
    values[where[0][:-1], where[1][:-1]] = (draw(context - 1, kv_heads, size) / v_scale).to(dtype)
    qkv, weights = draw(1, (heads + 2 * kv_heads) * size), draw(2, size) * 0.2 + 1
    angle = torch.rand((1, 1, size // 2), generator=make) * 6
    turns = ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin()))
    cos, sin = (torch.cat(pair, -1).bfloat16() for pair in turns)
    prep = QkvPrep(heads, kv_heads, weights[0], weights[1], 1e-6, 0.0, False, cos, sin, False)
    slots = torch.tensor([int(where[0][-1]) * page + int(where[1][-1])])
    expected = pages.clone()
    k, v = expected[:, 0].transpose(1, 2), expected[:, 1].transpose(1, 2)
    q = prepare_qkv.reference(qkv.clone(), prep, k, v, slots, False, scales).float().view(kv_heads, -1, size)
    scores = torch.einsum("hgd,chd->hgc", q, k[where].float()) * size**-0.5 * k_scale
    wanted = torch.einsum("hgc,chd->hgd", scores.softmax(-1), v[where].float()).view(1, heads, size) * v_scale

    memory, out = Memory(), torch.full((1, heads, size), float("nan"), dtype=torch.bfloat16)
    counters = torch.zeros(kv_heads, dtype=torch.int32)

    def put(tensor):
        return memory.add(tensor.view(-1).view(torch.uint8).numpy())

    base = put(pages)
    given = [put(out), put(qkv), base, base + keys.element_size() * kv_heads * page * size]
    given += [put(scales.keys), put(scales.values)] if scales else []
    given += [
        put(tables), put(torch.ones(1, dtype=torch.int32)),
        put(torch.tensor([context], dtype=torch.int32)), put(slots), put(weights[0].clone()), put(weights[1].clone()),
        put(cos), put(sin), put(torch.empty(heads * most * size)), put(torch.empty(heads * most * size)), put(counters),
        qkv.stride(0), keys.stride(0), keys.stride(2), values.stride(2), tables.stride(0), 1e-6, 0.0,
        size**-0.5 * attention.LOG2E.value,
    ]  # fmt: skip
    params = [int(np.float32(value).view(np.uint32)) if isinstance(value, float) else value for value in given]
    program, labels = parse(made.asm["ptx"])
    for split, head in itertools.product(range(most), range(kv_heads)):
        Program(32 * attention_one.TILES[size].warps, params, memory, made.metadata.shared, (head, split, 0)).run(
            program, labels
        )
    assert (out.float() - wanted).norm() <= 6e-3 * wanted.norm()
    found, kept = keys.float().nan_to_num(7.0), k.float().nan_to_num(7.0)
    bound = 0.125 * kept.abs() + 2**-9 if code else 0.04
    assert ((found - kept).abs() <= bound).all()  # one rounding, which falls to another code rarely
    assert not code or (found != kept).sum() <= 0.1 * kv_heads * size
    assert values.float().nan_to_num(7.0).equal(v.float().nan_to_num(7.0)) and not counters.any()
