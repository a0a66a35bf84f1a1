"""A fingerprint of a model's weights: machines compare theirs to know that they serve the same model.

In: the files that hold them (weight_files.py). Out: by the name of each, a digest of its size and of some of its bytes:
fine-tuned versions of a model have the same configuration and the same sizes, not the same bytes. Takes milliseconds;
it is no proof that all bytes are equal. Must not know: which files are read, or who compares.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

_PIECE = 1 << 14  # bytes
_PIECES = 8  # of each file, evenly spread
_DIGEST_BYTES = 8


def fingerprints(paths: Iterable[str]) -> dict[str, str]:
    """OSError: one of them cannot be read."""
    return {os.path.basename(path): _digest(path) for path in paths}


def _digest(path: str) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with open(path, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        digest.update(f"{size}\0".encode())
        for piece in range(_PIECES):
            opened.seek(max(0, size - _PIECE) * piece // (_PIECES - 1))
            digest.update(opened.read(_PIECE))
    return digest.hexdigest()
