"""Positions of MiniCPM-V 4.7 beside transformers', over prompts of every kind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from quire.loader.media import CanvasEncoder
from quire.models.canvas import CanvasMarks, Crop, canvas
from quire.schema.errors import ConfigError
from quire.schema.media import ArrayData, MediaItem

MARKS = CanvasMarks(1, 2, 3, 4, 5)
VECTOR, WORDS = 9, range(20, 40)


def theirs(ids: list[int], sizes: list[tuple[int, int]]) -> tuple[np.ndarray, int]:
    kind = tf.MiniCPMV4_7Model
    config = tf.MiniCPMV4_7Config(**{f"{name}_id": value for name, value in MARKS._asdict().items()})
    me = kind.__new__(kind)
    torch.nn.Module.__init__(me)
    me.config = config
    types = torch.tensor([[int(token == VECTOR) for token in ids]])
    grids = torch.tensor(sizes) * 4 if sizes else None
    places, deltas = kind.get_rope_index(me, torch.tensor([ids]), types, grids)
    return places[:, 0].numpy(), int(deltas)


class Prompt:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.crops: list[Crop] = []

    def text(self, rng: random.Random, most: int) -> None:
        self.ids += [rng.choice(WORDS) for _ in range(rng.randint(0, most))]

    def crop(self, size: tuple[int, int], start: int, end: int) -> None:
        self.ids.append(start)
        first = len(self.ids)
        self.ids += [VECTOR] * (size[0] * size[1])
        self.crops.append(Crop(first, len(self.ids), *size))
        self.ids.append(end)

    def picture(self, rng: random.Random) -> None:
        self.crop((rng.randint(1, 5), rng.randint(1, 5)), MARKS.image_start, MARKS.image_end)
        rows, columns = rng.choice([(0, 0), (1, 2), (2, 1), (2, 3), (3, 3), (1, 1)])
        size = rng.randint(1, 5), rng.randint(1, 5)
        for row in range(rows):
            if row:
                self.ids.append(MARKS.newline)
            for _ in range(columns):
                own = (rng.randint(1, 3), rng.randint(1, 3)) if rng.random() < 0.1 else size  # of a size of its own
                self.crop(own, MARKS.slice_start, MARKS.slice_end)

    def check(self) -> None:
        known, shift = canvas(self.ids, self.crops, MARKS)
        expected, delta = theirs(self.ids, [(crop.height, crop.width) for crop in self.crops])
        np.testing.assert_array_equal(known, expected)
        assert shift == delta


@pytest.mark.parametrize("seed", range(60))
def test_positions_equal_transformers(seed: int) -> None:
    """Images after each other, with text, line ends or nothing between them."""
    rng, prompt = random.Random(seed), Prompt()
    prompt.text(rng, 5)
    for _ in range(rng.randint(1, 4)):
        prompt.picture(rng)
        if rng.random() < 0.5:
            prompt.ids += [MARKS.newline] * rng.randint(0, 2)
        if rng.random() < 0.6:
            prompt.text(rng, 6)
    prompt.ids += [] if seed % 3 else [rng.choice(WORDS)]
    prompt.check()


def test_slices_in_rows_of_different_lengths() -> None:
    """Are taken for one row."""
    prompt = Prompt()
    prompt.crop((2, 2), MARKS.image_start, MARKS.image_end)
    for number in range(5):
        prompt.ids += [MARKS.newline] if number == 3 else []
        prompt.crop((2, 3), MARKS.slice_start, MARKS.slice_end)
    prompt.ids += [20, 21]
    prompt.check()


def test_no_marks_behind() -> None:
    prompt = Prompt()
    prompt.ids = [20, 21]
    prompt.crop((3, 2), MARKS.image_start, 22)
    prompt.check()


@pytest.mark.parametrize("crop", [
    Crop(0, 4, 2, 2), Crop(1, 5, 2, 3), Crop(1, 5, -2, -2), Crop(8, 12, 2, 2), Crop(5, 1, 2, -2), Crop(1, 1, 0, 3),
])  # fmt: skip
def test_crops_that_do_not_fit(crop: Crop) -> None:
    with pytest.raises(ValueError, match="there must be a mark before them"):
        canvas([1, 9, 9, 9, 9, 2, 20, 20, 20, 20], [crop], MARKS)


def item(runs: list[tuple[int, int]], sizes: list[list[int]]) -> MediaItem:
    first, last = runs[0][0], runs[-1][1]
    mask = bytes(any(start <= at < end for start, end in runs) for at in range(first, last))
    array = ArrayData((len(sizes), 2), "int64", np.array(sizes, np.int64).tobytes())
    return MediaItem(modality="image", key="key", offset=first, length=last - first, takes_vector=mask,
                     arrays={"target_sizes": array})  # fmt: skip


CONFIG = {f"{name}_id": value for name, value in MARKS._asdict().items()}


@pytest.mark.parametrize(("mode", "size"), [("16x", [8, 4]), ("4x", [4, 2])])
def test_items(mode: str, size: list[int]) -> None:
    encoder = CanvasEncoder(None, CONFIG | {"downsample_mode": mode}, 3)  # type: ignore[arg-type]
    ids = [20, 1, 9, 9, 2, 3, 9, 9, 4, 21]
    known, shift = encoder.channels(ids, [item([(2, 4), (6, 8)], [size, size])])
    expected, delta = canvas(ids, [Crop(2, 4, 2, 1), Crop(6, 8, 2, 1)], MARKS)
    np.testing.assert_array_equal(known, expected)
    assert shift == delta
    with pytest.raises(ValueError, match="1 grids of vectors stand in 2 places"):
        encoder.channels(ids, [item([(2, 4), (6, 8)], [size])])
    with pytest.raises(ValueError, match="there must be a mark before them"):
        encoder.channels(ids, [item([(2, 4), (6, 8)], [size, [40, 40]])])


def test_an_item_is_no_slice_of_the_one_before() -> None:
    """Positions of an image, whose blocks may be cached, depend on nothing behind it."""
    encoder = CanvasEncoder(None, CONFIG, 3)  # type: ignore[arg-type]
    both = [item([(2, 4)], [[8, 4]]), item([(6, 8)], [[8, 4]])]
    encoder.channels([20, 1, 9, 9, 2, 1, 9, 9, 2, 21], both)
    with pytest.raises(ValueError, match="the item at position 6 begins with a slice"):
        encoder.channels([20, 1, 9, 9, 2, 3, 9, 9, 4, 21], both)


@pytest.mark.parametrize("value", [None, "5", 5.0, True])
def test_a_configuration_without_marks(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"config.json has no newline_id, the id of a token"):
        CanvasEncoder(None, CONFIG | {"newline_id": value}, 3)  # type: ignore[arg-type]


def test_crops_that_overlap() -> None:
    with pytest.raises(ValueError, match="behind position 5"):
        canvas([1, 9, 9, 9, 9, 2, 20], [Crop(1, 5, 2, 2), Crop(3, 5, 1, 2)], MARKS)
