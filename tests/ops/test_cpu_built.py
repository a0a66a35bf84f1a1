"""Tests of the compiled kernels skip where there are none. Where they could have been built, that must not pass."""

import platform
import shutil

import pytest

from quire.base import native


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.skipif(platform.machine() not in ("aarch64", "arm64", "x86_64"), reason="no kernels for this machine")
def test_where_there_is_a_compiler_there_are_kernels():
    assert native.library() is not None, native.why_not()
