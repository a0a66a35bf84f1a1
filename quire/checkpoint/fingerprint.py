"""A fingerprint of a model's weights: machines compare theirs to know that they serve the same model.

In: a folder of files, or one file. Out: a digest of the names and sizes of those that hold weights, and of some bytes
of each: fine-tuned versions of a model have the same configuration and the same sizes, not the same bytes. Takes
milliseconds; it is no proof that all bytes are equal. Must not know: how files are read, or who compares.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_PIECE = 1 << 14  # bytes
_PIECES = 8  # of each file, evenly spread


def fingerprint(path: str) -> str:
    """Of no weights at all, too."""
    place, digest = Path(path), hashlib.blake2b(digest_size=16)
    files = [place] if place.is_file() else sorted(place.iterdir()) if place.is_dir() else []
    for file in files:
        if file.suffix in _WEIGHTS and file.is_file():
            _add(digest, file, "" if place.is_file() else file.name)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, file: Path, name: str) -> None:
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        digest.update(f"{name}\0{size}\0".encode())
        for piece in range(_PIECES):
            opened.seek(max(0, size - _PIECE) * piece // (_PIECES - 1))
            digest.update(opened.read(_PIECE))
