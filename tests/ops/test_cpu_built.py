"""Tests of the compiled kernels skip where there are none. Where they could have been built, that must not pass."""

import platform
import shutil

import pytest

from quire.base import env, native


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.skipif(platform.machine() not in ("aarch64", "arm64", "x86_64"), reason="no kernels for this machine")
def test_where_there_is_a_compiler_there_are_kernels():
    assert native.library() is not None, native.why_not()


def test_another_library_may_be_named(monkeypatch, tmp_path):
    here = tmp_path / "other.so"
    monkeypatch.setattr(env.CPU_KERNELS_FILE, "_value", str(here))
    monkeypatch.setattr(env.CPU_KERNELS, "_value", "auto")
    assert native.library() is None and str(here) in native.why_not()
    second = tmp_path / "second.so"
    second.touch()
    monkeypatch.setattr(env.CPU_KERNELS_FILE, "_value", str(second))
    assert native.library() == second
