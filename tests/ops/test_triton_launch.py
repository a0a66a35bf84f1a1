"""The short way to launch a kernel hands its stub the same as Triton's own way; and a list of kernels made without
launching any is enough for other processes to compile them. Runs without a GPU: a fake driver, the real compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not launched", allow_module_level=True)

from triton import knobs

from quire.attention import triton as triton_attention
from quire.attention.library import Library
from quire.ops.triton import attention_one, launch, norm, rows, warm
from tests.fake_triton import without_gpu


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple]]:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    with without_gpu() as launches:
        yield launches


def tensors(width: int, dtype: torch.dtype = torch.bfloat16, skip: int = 0) -> tuple[torch.Tensor, ...]:
    x = torch.zeros(4 * width + skip, dtype=dtype)[skip:].view(4, width)
    return x, torch.zeros_like(x), torch.zeros(width, dtype=dtype)


def cases() -> Iterator[tuple[Any, ...]]:
    """What Triton compiles differently, and what it does not."""
    yield tensors(64)
    yield tensors(64)[:1] + tensors(64)[1:]
    yield tensors(64, skip=1)  # not aligned
    yield tensors(64, torch.float16)
    yield tensors(72)  # a stride that 16 does not divide
    yield tensors(64)


def test_the_short_way_hands_over_the_same(fake: list[tuple]) -> None:
    for x, delta, weight in cases():
        norm.add_rms_norm(x, delta, weight, 1e-6)
        norm.rms_norm(x, weight, 1e-5)
    first, fake[:] = list(fake), []
    launchers = launch.install([norm], lambda: 7)
    kept = list(cases())  # alive, so that addresses stay
    for turn in range(3):
        for x, delta, weight in kept:
            norm.add_rms_norm(x, delta, weight, 1e-6)
            norm.rms_norm(x, weight, 1e-5)
        if turn == 0:
            slow = list(fake)
    assert all(launcher.kernel.run is launcher for launcher in launchers)
    own = next(launcher for launcher in launchers if launcher.kernel is norm._norm_kernel)
    used = [known for _, known in own._readers.values()]
    assert sum(map(len, used)) == 8  # four kinds of tensors, with and without the addition

    def plain(calls: list[tuple]) -> list[tuple]:
        """Without addresses, which differ from run to run: those are the large integers."""
        return [(*call[:9], [a for a in call[9] if not (isinstance(a, int) and a > 1 << 20)]) for call in calls]

    assert plain(slow) == plain(first)
    assert plain(fake[len(slow) : 2 * len(slow)]) == plain(first) == plain(fake[2 * len(slow) :])
    for call, (x, delta, weight) in zip(fake[2 * len(slow) :: 2], kept, strict=True):
        assert call[9][:3] == [x.data_ptr(), delta.data_ptr(), weight.data_ptr()]


def test_an_integer_beyond_32_bits_is_another_kernel(fake: list[tuple]) -> None:
    x, _, weight = tensors(64)
    (launcher,) = [one for one in launch.install([norm], lambda: 7) if one.kernel is norm._norm_kernel]

    given = {"WIDTH", "HEADS", "BLOCK", "ROWS", "ADD", "LAYER", "WIDE", "WEIGHT", "BIAS", "PARTS", "GROUP"}
    more = {param.name: False for param in norm._norm_kernel.params if param.is_constexpr and param.name not in given}

    def run(num_rows: int) -> None:
        norm._norm_kernel[(1,)](
            x, None, weight, None, x, None, num_rows, 64, 0, 0, 0, 0, 1e-6, 0.0, None, WIDTH=64, HEADS=1, BLOCK=64,
            ROWS=16, ADD=False, LAYER=False, WIDE=False, WEIGHT=True, BIAS=False, PARTS=1, GROUP=64, **more,
            num_warps=4,
        )  # fmt: skip

    for count in (4, 5, 1 << 31, 1 << 33):
        run(count)
    (known,) = [known for _, known in launcher._readers.values()]
    assert len(known) == 2
    assert [call[9][6] for call in fake] == [4, 5, 1 << 31, 1 << 33]


def test_recording_launches_and_compiles_nothing(fake: list[tuple], tmp_path: Path) -> None:
    launchers = launch.install([norm, rows], lambda: 7)
    note = warm.Recorder(launch.arch())
    with launch.recorded(launchers, note):
        for x, delta, weight in cases():
            norm.add_rms_norm(x, delta, weight, 1e-6)
    assert not fake and len(note.jobs) == 4 and not list(tmp_path.iterdir())
    json.dumps(list(note.jobs.values()))
    x, delta, weight = tensors(64)
    norm.add_rms_norm(x, delta, weight, 1e-6)
    assert len(fake) == 1 and knobs.runtime.jit_cache_hook is None


def test_children_compile_what_was_recorded(fake: list[tuple], tmp_path: Path) -> None:
    """Afterwards this process finds every kernel in the cache."""
    launchers = launch.install([norm, rows], lambda: 7)
    note = warm.Recorder(launch.arch())
    x, delta, weight = tensors(64)
    with launch.recorded(launchers, note):
        norm.add_rms_norm(x, delta, weight, 1e-6)
        norm.layer_norm(x, weight, None, 1e-6)
    compilers = warm.Compilers(2, str(tmp_path))
    try:
        compilers.submit(note.jobs.values())
        compilers.submit(note.jobs.values())  # not twice
        compilers.wait()
    finally:
        compilers.close()
    hits: list[bool] = []
    knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    try:
        norm.add_rms_norm(x, delta, weight, 1e-6)
        norm.layer_norm(x, weight, None, 1e-6)
    finally:
        knobs.compilation.listener = None
    assert hits == [True, True] and len(fake) == 2


_KEYS = """
import importlib, json, sys
from quire.ops.triton import compile_child
sys.meta_path.insert(0, compile_child.StandInFinder())
sys.setrecursionlimit(10000)
modules = [importlib.import_module("quire.ops.triton." + name) for name in sys.argv[2:]]
from triton.runtime.jit import JITFunction
from quire.ops.triton.cache_keys import settle
kernels = {(k.module, k.fn.__name__): k for m in modules for k in vars(m).values() if isinstance(k, JITFunction)}
found = {}
for name in sorted(kernels, reverse=sys.argv[1] == "reversed"):
    settle(kernels[name])
    found[".".join(name)] = kernels[name].cache_key
print(json.dumps(found))
"""


def test_keys_of_kernels_do_not_depend_on_what_a_process_met_before() -> None:
    """Else one process does not find what another compiled. The version of Triton that torch brings is what matters."""
    folder = Path(warm.__file__).parent
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "launch", "register"))
    found = [
        json.loads(subprocess.check_output([sys.executable, "-c", _KEYS, order, *modules], timeout=240))
        for order, modules in (("sorted", names), ("reversed", names[::-1]))
    ]
    assert len(found[0]) > 100 and found[0].keys() == found[1].keys()
    assert not [name for name, key in found[0].items() if found[1][name] != key]


def test_kernels_that_are_loaded_with_attention_have_launchers(
    fake: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the table of ops was made, in a start that runs no dry run: else their keys would depend on what else the
    process met, and one that is in the cache would be compiled while serving."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(launch, "current_stream", lambda: lambda: 7)
    attention_prompts = pytest.importorskip("quire.ops.triton.attention_prompts")
    backend = triton_attention.TritonAttention(library=Library())
    assert backend.attend_prompts is attention_prompts.attend_prompts
    for kernel in launch.kernels_of([attention_prompts, attention_one]):
        assert isinstance(kernel.run, launch.Launcher), kernel.fn.__name__


def test_a_child_that_cannot_compile_says_so_and_goes_on(tmp_path: Path) -> None:
    compilers = warm.Compilers(1, str(tmp_path))
    try:
        compilers.submit([{"module": "quire.ops.triton.norm", "name": "no_such_kernel"}, {"nonsense": 1}])
        assert compilers.wait() == []
    finally:
        compilers.close()


def test_every_kernel_module_can_be_read_without_torch() -> None:
    folder = Path(warm.__file__).parent
    names = [path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "launch", "register")]
    code = (
        "import sys; from quire.ops.triton import compile_child\n"
        "sys.meta_path.insert(0, compile_child.StandInFinder())\n"
        f"import importlib; [importlib.import_module('quire.ops.triton.' + name) for name in {names!r}]\n"
        "assert type(sys.modules['torch']) is compile_child.StandIn"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def test_nothing_is_uninitialized_while_nothing_is_launched(fake: list[tuple]) -> None:
    """Torch reads what kernels should have written: as indices it must lie within bounds."""
    with launch.recorded([], warm.Recorder(90)):
        for _ in range(3):
            made = [torch.empty((3, 4), dtype=torch.int64), torch.empty_like(torch.ones(5)), torch.ones(2).new_empty(7)]
            assert not any(tensor.any() for tensor in made)
            made = [tensor.fill_(7) for tensor in made]  # memory that comes back dirty
    assert torch.zeros(3)[torch.zeros(2, dtype=torch.int64)].shape == (2,)
