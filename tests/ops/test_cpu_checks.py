"""Sizes and indices that do not fit are refused by the compiled kernels themselves, whoever gave them; by all of them.

All cases run in one process of their own: without a check they end it by a signal, or write where nothing is theirs.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.base import native
from quire.ops.cpu.native import _FUNCTIONS, CHECKED, HARMLESS, kernels

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
HEADER = Path(__file__).parents[2] / "csrc" / "cpu" / "quire_cpu.h"
EXPORTED = re.compile(r"^QC_API ([\w ]+?\*?) ?(qc_\w+)\(", re.MULTILINE)


def exported() -> dict[str, str]:
    """What the library offers -> what it returns."""
    return {name: result for result, name in EXPORTED.findall(HEADER.read_text())}


def test_what_does_not_fit_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.refused_calls"],
        capture_output=True, text=True, timeout=300, check=False, cwd=HEADER.parents[2],
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("all refused\n"), done.stdout[-800:] + done.stderr[-2000:]
    assert "a rotary embedding that is not pairs of values within a head" in done.stdout
    assert "heads=4, kv_heads=8" in done.stdout
    for name in CHECKED:
        assert f"  refused: {name}: the CPU kernels were given " in done.stdout, name


def test_no_exported_function_goes_unchecked() -> None:
    """A function that is new in the header must be called by Python's table, say what was wrong, and be refused in
    tests/refused_calls.py; or be listed as harmless, which a function that works on memory is not."""
    found = exported()
    assert len(found) > 25 and set(found) == set(_FUNCTIONS)
    assert set(found) > HARMLESS
    assert not (set(CHECKED) & HARMLESS) and set(CHECKED) | HARMLESS == set(found)
    assert {name for name in CHECKED if found[name] != "int"} == set()


def test_nothing_is_exported_that_the_header_does_not_name() -> None:
    path = native.library()
    assert path is not None
    names = {word.decode() for word in re.findall(rb"(?<=\0)qc_[a-z_]+(?=\0)", path.read_bytes())}
    assert names >= set(exported()) and names - set(exported()) == set()
