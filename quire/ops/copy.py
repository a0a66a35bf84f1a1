"""Asynchronous copies between host arrays and a device: through pinned memory, in the order of the device's stream.

torch's pool of pinned memory keeps a buffer alive until the copy that reads or fills it is done. On CPU nothing is
copied: the tensor is the array.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


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
