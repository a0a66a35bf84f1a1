"""Tests of the compiled kernels skip where there are none. Where they could have been built, that must not pass."""

import ctypes.util
import platform
import shutil
from pathlib import Path

import pytest

from quire.base import env, native
from quire.ops.cpu.native import kernels, opened, why_not


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.skipif(platform.machine() not in ("aarch64", "arm64", "x86_64"), reason="no kernels for this machine")
def test_where_there_is_a_compiler_there_are_kernels():
    path = native.library()
    assert path is not None, native.why_not()
    library = opened(path)  # a build of another commit would switch all tests of kernels off
    assert not isinstance(library, str), library


def test_a_library_that_cannot_be_used_says_why(monkeypatch, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(env.CPU_KERNELS_FILE, "_value", str(broken))
    monkeypatch.setattr(env.CPU_KERNELS, "_value", "auto")
    assert kernels() is None
    assert "cannot be loaded" in why_not() and "broken.so" in why_not()
    other = ctypes.util.find_library("m")
    assert other is not None and "belongs to another version of Quire" in str(opened(Path(other)))


def test_another_library_may_be_named(monkeypatch, tmp_path):
    here = tmp_path / "other.so"
    monkeypatch.setattr(env.CPU_KERNELS_FILE, "_value", str(here))
    monkeypatch.setattr(env.CPU_KERNELS, "_value", "auto")
    assert native.library() is None and str(here) in native.why_not()
    second = tmp_path / "second.so"
    second.touch()
    monkeypatch.setattr(env.CPU_KERNELS_FILE, "_value", str(second))
    assert native.library() == second
