"""One opened image file in several prompts: threads that read it at once decode it once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from quire.media.images import _lock_of, read_image
from quire.schema.errors import InputError


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_threads_share_an_image_that_is_not_yet_decoded(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(tmp_path / "a.png")
    whole = ImageFile.ImageFile.load
    decoding: list[int] = []

    def slow(self: Any) -> Any:
        if self.tile:  # nothing is decoded yet
            decoding.append(1)
            time.sleep(0.05)
        return whole(self)

    wanted = np.asarray(read_image(Image.open(tmp_path / "a.png")))
    monkeypatch.setattr(ImageFile.ImageFile, "load", slow)
    shared = Image.open(tmp_path / "a.png")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: np.asarray(read_image(shared)), range(4)))
    assert len(decoding) == 1
    assert all(np.array_equal(one, wanted) for one in found)


def test_different_images_are_decoded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    first, *others = (Image.open(tmp_path / "a.png") for _ in range(64))
    other = next(one for one in others if _lock_of(one) is not _lock_of(first))  # few share a lock
    whole, both = ImageFile.ImageFile.load, threading.Barrier(2)

    def meeting(self: Any) -> Any:
        if self.tile:
            both.wait(60)
        return whole(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", meeting)
    with ThreadPoolExecutor(2) as threads:
        assert all(one.size == (8, 8) for one in threads.map(read_image, (first, other)))


def test_an_opened_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(tmp_path / "a.bmp")
    (tmp_path / "b.bmp").write_bytes((tmp_path / "a.bmp").read_bytes()[:900])
    with pytest.raises(InputError, match="cannot be decoded"):
        read_image(Image.open(tmp_path / "b.bmp"))
