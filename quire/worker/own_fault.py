"""Whether an error tells of this rank or of what it was asked to compute.

What a request has sent, all ranks find wrong at the same place: they may give that request up, and stay in step. What
one rank alone meets, between two sums, must end the engine: the others are in the next sum already.
"""

from __future__ import annotations

import torch

from quire.ops.cpu.native import KernelError

_KINDS = MemoryError | torch.OutOfMemoryError | torch.AcceleratorError
_OF_CPU = "can't allocate memory"


def is_of_this_rank(wrong: Exception) -> bool:
    """Of its memory, its device, or the sums in which it meets the others."""
    if isinstance(wrong, KernelError):
        return wrong.is_of_rank
    return isinstance(wrong, _KINDS) or _OF_CPU in str(wrong)
