"""Asynchronous copies between host arrays and a device: through pinned memory, in the order of the device's stream.

torch's pool of pinned memory keeps a buffer alive until the copy that reads or fills it is done. On CPU nothing is
copied: the tensor is the array. Whoever copies in every step binds `uploader` and `downloader` of its device once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

Upload = Callable[[np.ndarray], Tensor]


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device; usable at once by whatever is launched next."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """A host copy that is complete once the device has reached this point: record an event after it, wait for that."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def uploader(device: torch.device) -> Upload:
    """`upload` to this device, of arrays that are contiguous."""
    return torch.from_numpy if device.type == "cpu" else partial(upload, device=device)


def downloader(device: torch.device) -> Callable[[Tensor], Tensor]:
    """`download` from this device."""
    return Tensor.cpu if device.type == "cpu" else download
