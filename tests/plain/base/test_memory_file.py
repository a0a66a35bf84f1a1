"""base/memory_file.py: with what Python has, and with what libc has where Python was built with an older one."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from types import SimpleNamespace

import pytest

from quire.base.memory_file import memory_file, seal_size

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a file of Linux")


@pytest.mark.parametrize("built_with", ["this libc", "an older one"])
def test_a_file_without_a_name(built_with: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if built_with == "an older one":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    sealed, other = memory_file("quire-test", sealable=True), memory_file("quire-test")
    try:
        for descriptor in (sealed, other):
            os.ftruncate(descriptor, 4096)
            assert not os.get_inheritable(descriptor) and os.fstat(descriptor).st_nlink == 0
            assert "memfd:quire-test" in os.readlink(f"/proc/self/fd/{descriptor}")
        seal_size(sealed)
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(sealed, size)
            os.ftruncate(other, size)
        with pytest.raises(PermissionError):
            seal_size(other)
    finally:
        os.close(sealed)
        os.close(other)


@pytest.mark.parametrize(("libc", "code"), [({}, errno.ENOSYS), ({"memfd_create": lambda *_: -1}, errno.EMFILE)])
def test_a_system_that_has_none(libc: dict[str, object], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(**libc))
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EMFILE)
    with pytest.raises(OSError, match=os.strerror(code)) as failed:
        memory_file("quire-test")
    assert failed.value.errno == code
