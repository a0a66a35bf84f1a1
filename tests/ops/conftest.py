"""The instruction sets of the compiled CPU kernels, one after another; files that use them skip without kernels."""

import pytest

from quire.base import env
from quire.ops.cpu.native import kernels, usable

library = kernels()


@pytest.fixture(params=usable(library) if library is not None else ["none"])
def isa(request, monkeypatch):
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")  # a row is compared with the same row alone
    env.forget_all()
    before = library.qc_isa()  # not simply the best: that may be one that is taken only when asked for
    assert library.qc_use_isa(request.param.encode()) == 0
    library.qc_set_same_bits(1)  # of calls that go past the forms
    yield request.param
    assert library.qc_use_isa(before) == 0
