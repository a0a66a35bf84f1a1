"""Tensors as items: what is made of them is made of arrays with the same numbers; those without plain numbers are
refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quire.media.audio import read_audio
from quire.media.images import read_image
from quire.media.inputs import MediaInputs
from quire.media.video import read_video
from quire.schema.errors import InputError
from tests.plain.media.test_media_embeds import WIDTH
from tests.plain.media.test_media_embeds import inputs as grid_inputs
from tests.plain.media.test_media_inputs import HIDDEN, inputs, load

PIXELS = np.random.default_rng(3).integers(0, 256, (5, 40, 30, 3), np.uint8)
FIRST = torch.from_numpy(PIXELS[0])


@pytest.fixture(scope="module")
def llava() -> Iterator[MediaInputs]:
    made = inputs(enable_mm_embeds=True)
    yield made
    made.close()


def pixels_of(media: MediaInputs, value: Any) -> list[bytes]:
    items = load(media, {"image": value}).items["image"]
    return [np.asarray(one.item.arrays["pixel_values"]).tobytes() for one in items]


def test_images(llava: MediaInputs) -> None:
    (first,) = pixels_of(llava, PIXELS[0])
    floats = FIRST.float() / 255
    for same in (FIRST, FIRST.permute(2, 0, 1), floats, floats.half(), FIRST.int(), floats.clone().requires_grad_()):
        assert pixels_of(llava, same) == [first]
    every = pixels_of(llava, list(PIXELS))
    assert pixels_of(llava, torch.from_numpy(PIXELS)) == pixels_of(llava, [*map(torch.from_numpy, PIXELS)]) == every
    assert len({*every}) == 5
    eighths = torch.arange(1200).view(20, 20, 3) % 9 / 8  # which bfloat16 has
    assert read_image(eighths.bfloat16()).tobytes() == read_image(eighths.numpy()).tobytes()


def test_videos() -> None:
    expected = [frame.tobytes() for frame in read_video(PIXELS).frames]
    tensor = torch.from_numpy(PIXELS)
    for same in (tensor, tensor.permute(0, 3, 1, 2), list(tensor), (tensor, {"fps": 2.0})):
        assert [frame.tobytes() for frame in read_video(same).frames] == expected


def test_audio() -> None:
    samples = np.random.default_rng(4).uniform(-0.5, 0.5, 3200).astype(np.float32)
    tensor = torch.from_numpy(samples)
    for same in ((tensor, 8000), (tensor[None], 8000), (torch.stack([tensor, tensor], 1), 8000)):
        audio = read_audio(same)
        assert audio.rate == 8000 and np.array_equal(audio.samples, samples)
    assert read_audio(tensor).rate == 16000
    assert np.array_equal(read_audio(tensor.bfloat16()).samples, tensor.bfloat16().float().numpy())


def test_embeddings(llava: MediaInputs) -> None:
    vectors = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(5))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for form in ([vectors.to(dtype)], vectors.to(dtype)[None], {"image_embeds": vectors.to(dtype)}):
            (one,) = load(llava, {"image": form}).items["image"]
            array = one.item.arrays["embeds"]
            assert (array.shape, f"torch.{array.dtype}") == ((3, HIDDEN), str(dtype))
            assert torch.equal(torch.frombuffer(bytearray(array.data), dtype=dtype).view(3, HIDDEN), vectors.to(dtype))
    with pytest.raises(InputError, match="finite"):
        load(llava, {"image": [(vectors * torch.nan).bfloat16()]})


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda tensor: tensor.to_sparse(),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor, tensor[:1]]),
    "without data": lambda tensor: tensor.to("meta"),
    "8 bits": lambda tensor: tensor.to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_plain_array(llava: MediaInputs, form: str) -> None:
    made, said = FORMS[form], "that is not a plain array of numbers cannot be read"
    for read, shape in ((read_image, (6, 8, 3)), (read_video, (4, 6, 8, 3)), (read_audio, (200,))):
        with pytest.raises(InputError, match=said):
            read(made(torch.rand(shape)))
    with pytest.raises(InputError, match=said):
        load(llava, {"image": [made(torch.rand(6, 8, 3))]})
    vectors = torch.rand(3, HIDDEN)
    given = [made(vectors), made(vectors[None])]
    if form != "quantized":  # torch has none of bfloat16
        given.append(made(vectors.bfloat16()))
    for one in given:
        for value in ([one], {"image_embeds": one}, {"image_embeds": [one, vectors]}):
            with pytest.raises(InputError, match=said):
                load(llava, {"image": value})


@pytest.fixture(scope="module")
def qwen() -> Iterator[MediaInputs]:
    made = grid_inputs()
    yield made
    made.close()


def test_vectors_and_grids_that_are_views(qwen: MediaInputs) -> None:
    """Numbers are those that a tensor shows, wherever they lie."""
    whole = torch.randn(16, 2 * WIDTH, generator=torch.Generator().manual_seed(6))
    grid = torch.tensor([[9, 9, 9, 9], [1, 7, 4, 7], [1, 7, 8, 7], [9, 9, 9, 9]])[1:3, [0, 2, 2]].T.contiguous().T
    for vectors in (whole[::2, ::2], whole.T[::2, ::2].T, whole[:8, 6:].requires_grad_(), whole[:8, :6].neg(),
                    whole.flip(0)[:8, -6:], torch.nn.Parameter(whole[3:11, 2:8])):  # fmt: skip
        items = load(qwen, {"image": {"image_embeds": vectors, "image_grid_thw": [[1, 4, 4], [1, 2, 8]]}})
        bytes_ = b"".join(one.item.arrays["embeds"].data for one in items.items["image"])
        assert bytes_ == vectors.detach().numpy().tobytes()
        one_each = {"image_embeds": vectors[:4], "image_grid_thw": grid[:1]}
        (one,) = load(qwen, {"image": one_each}).items["image"]
        assert one.item.arrays["image_grid_thw"].tolist() == [[1, 4, 4]]
    wide = torch.zeros(1).expand(1 << 40, WIDTH)
    with pytest.raises(InputError, match=f"has {1 << 40} vectors"):
        load(qwen, {"image": {"image_embeds": wide, "image_grid_thw": [1, 4, 4]}})


@pytest.mark.parametrize("form", FORMS)
def test_grids_that_are_no_plain_array(qwen: MediaInputs, form: str) -> None:
    grid, vectors = torch.tensor([[1, 4, 4]]), torch.zeros(4, WIDTH)
    made = FORMS[form](grid.float() if form in ("quantized", "8 bits") else grid)
    for value in (made, [made]):
        with pytest.raises(InputError, match=r"cannot be read|must be numbers"):
            load(qwen, {"image": {"image_embeds": vectors, "image_grid_thw": value}})
    with pytest.raises(InputError, match=r"cannot be read|must be numbers|has the shape"):
        load(qwen, {"image": {"image_embeds": FORMS[form](vectors), "image_grid_thw": grid}})
