"""Kernels of tile registers and of pairs of bfloat16 with emulated instructions, as a library, and matrices for them.

Only the instructions are emulated (tests/ops/tiles.cpp), everything around them is real.
"""

import ctypes
import os
import shutil
import subprocess
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import pytest
import torch

from quire.ops import packed
from quire.ops.cpu.native import kernels
from tests.shared import make_once

ROOT = Path(__file__).resolve().parents[1]
COMPILER = os.environ.get("CXX", "c++").split()
MORE_FLAGS = os.environ.get("QUIRE_BUILD_FLAGS", "").split()  # as setup.py takes them
CANNOT_BUILD = [
    pytest.mark.skipif(kernels() is None, reason="no compiled kernels"),
    pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="no compiler"),
    pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="no sources beside the tests"),
]


def build(factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compiled once for all the files and processes of a run: it takes as long as many of the tests."""
    native, found = kernels(), ctypes.CDLL(str(make_once(factory, "tiles", _compile) / "libtiles.so"))
    assert native is not None
    found.tiles_packed.argtypes = native.qc_linear_packed.argtypes
    plain = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 4)
    found.tiles_plain.argtypes = found.pairs_plain.argtypes = plain
    found.tiles_texts.argtypes = native.qc_attend_texts.argtypes
    found.tiles_threads.argtypes = (c_int,)
    found.tiles_open.argtypes = (c_int, c_void_p, c_void_p)
    found.tiles_block.argtypes = (*[c_void_p] * 6, c_int)
    found.tiles_in_use.argtypes = (c_void_p,)
    return found


def _compile(folder: Path) -> None:
    source = ROOT / "csrc" / "cpu"
    by_machine = ["-mavx2", "-mfma", "-mf16c"] if os.uname().machine == "x86_64" else []
    flags = ["-Og", "-std=c++20", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-math-errno"]
    names = ["-DQC_ISA=emulated", "-DQC_EMULATE_AMX", "-DQC_EMULATE_BF16", "-DQC_SECOND_CACHE=4096", f"-I{source}"]
    files = [str(ROOT / "tests" / "ops" / "tiles.cpp"), str(source / "pool.cpp"), str(source / "ranks.cpp")]
    out = ["-o", str(folder / "libtiles.so")]
    # Under `make sanitize` the sanitizer comes first into Python, not into the compiler, which it makes slow and large.
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(
        [*COMPILER, *flags, *MORE_FLAGS, *by_machine, *names, *files, *out], check=True, env=own, timeout=1800
    )


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_panels(kind, rows, width, seed):
    """Any bytes are numbers of a kind; only the scales must be sane. Rows beyond the last are zero."""
    form, gen = packed.FORMS[kind], torch.Generator().manual_seed(seed)
    blocks = -(-rows // 16) * (width // 32)
    data = torch.randint(0, 256, (blocks, form.num_bytes), generator=gen, dtype=torch.uint8)
    halves = 64 if kind in ("Q4M", "Q5M", "Q6Z") else 32
    scales = torch.rand(blocks, halves // 2, generator=gen) * 0.01 + 0.001
    data[:, :halves] = scales.half().view(torch.uint8)
    return packed.Packed(data.flatten(), kind, rows, width)


def laid(rows, width, seed, dtype=torch.bfloat16):
    weight = draw(rows, width, seed=seed, dtype=dtype)
    packed.lay_panels(weight)
    return packed.Packed(weight.view(-1).view(torch.uint8), packed.panel_kind(dtype), rows, width)
