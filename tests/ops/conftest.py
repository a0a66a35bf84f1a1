"""The instruction sets of the compiled CPU kernels, one after another; files that use them skip without kernels."""

import pytest

from quire.ops.cpu.native import kernels, usable

library = kernels()


@pytest.fixture(params=usable(library) if library is not None else ["none"])
def isa(request):
    before = library.qc_isa()  # not simply the best: that may be one that is taken only when asked for
    assert library.qc_use_isa(request.param.encode()) == 0
    yield request.param
    assert library.qc_use_isa(before) == 0
