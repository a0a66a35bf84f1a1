"""Embeddings that come with grids: every form that several items may have, what their keys are made of, and what is
refused before any number is read."""

from __future__ import annotations

import functools
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from quire.config import MultiModalConfig
from quire.media.embeds import MOST_NUMBERS, EmbedsPart
from quire.media.families import make_family
from quire.media.inputs import LoadedItem, LoadedMedia, MediaInputs
from quire.media.parts import collect
from quire.media.settings import ProcessorFiles
from quire.media.sources import MediaSources
from quire.media.video import Video
from quire.media.workers import MediaWorkers
from quire.schema.errors import InputError

WIDTH = 6
FIRST, SECOND = [1, 4, 6], [1, 2, 4]  # 6 vectors and 2, as 2 x 2 patches are merged
VECTORS = np.random.default_rng(1).normal(size=(8, WIDTH)).astype(np.float32)
MOST = 64


def inputs(name: str = "Qwen2VLProcessor", config: dict[str, Any] | None = None, **options: Any) -> MediaInputs:
    return MediaInputs(
        make_family(name, ProcessorFiles(config=config or {})), MediaSources(),
        MultiModalConfig(**{"enable_mm_embeds": True} | options), hidden_size=WIDTH, workers=MediaWorkers(2),
        max_vectors=MOST,
    )  # fmt: skip


@pytest.fixture
def qwen(made: list[MediaInputs]) -> MediaInputs:
    made.append(inputs())
    return made[0]


def load(media: MediaInputs, data: Any, *args: Any, **more: Any) -> LoadedMedia:
    return media.loaded(media.load(data, *args, **more))


def images(media: MediaInputs, value: Any, *args: Any, **more: Any) -> list[LoadedItem]:
    return list(load(media, {"image": value}, *args, **more).items["image"])


def numbers(one: LoadedItem) -> tuple[bytes, list[int], str]:
    arrays = one.item.arrays
    return arrays["embeds"].data, arrays["image_grid_thw"].reshape(-1).tolist(), one.item.text


def test_several_items_in_every_form(qwen: MediaInputs) -> None:
    parts, grids = [VECTORS[:6], VECTORS[6:]], [FIRST, SECOND]
    pads = [parts[0].tobytes(), FIRST, "<|image_pad|>" * 6], [parts[1].tobytes(), SECOND, "<|image_pad|>" * 2]
    expected = [tuple(one) for one in pads]
    for value in (
        {"image_embeds": VECTORS, "image_grid_thw": np.array(grids)},
        {"image_embeds": VECTORS, "image_grid_thw": grids},
        {"image_embeds": parts, "image_grid_thw": np.array(grids, np.int32)},
        {"image_embeds": tuple(parts), "image_grid_thw": [np.array(FIRST), np.array([SECOND])]},
        {"image_embeds": [one[None] for one in parts], "image_grid_thw": tuple(map(tuple, grids))},
        {"image_embeds": VECTORS.astype(">f4"), "image_grid_thw": np.array(grids, ">i8")},
        {"image_embeds": VECTORS.astype(np.float64), "image_grid_thw": grids},
        {"image_embeds": VECTORS.tolist(), "image_grid_thw": grids},
        {"image_embeds": np.asfortranarray(VECTORS), "image_grid_thw": grids},
        [{"image_embeds": one, "image_grid_thw": grid} for one, grid in zip(parts, grids, strict=True)],
        [{"image_embeds": one[None], "image_grid_thw": [grid]} for one, grid in zip(parts, grids, strict=True)],
    ):
        assert [numbers(one) for one in images(qwen, value)] == expected
    same = images(qwen, {"image_embeds": np.stack([VECTORS[:2], VECTORS[6:]]), "image_grid_thw": [SECOND, SECOND]})
    assert [numbers(one)[0] for one in same] == [VECTORS[:2].tobytes(), VECTORS[6:].tobytes()]
    beside = images(qwen, [Image.new("RGB", (56, 56)), {"image_embeds": VECTORS[6:], "image_grid_thw": SECOND}])
    assert ["embeds" in one.item.arrays for one in beside] == [False, True]


def test_parts_of_chats(qwen: MediaInputs) -> None:
    fields = {"image_embeds": VECTORS[:6], "image_grid_thw": FIRST}
    parts = [
        {"type": "image_embeds", "image_embeds": fields, "uuid": "one"},
        {"type": "image_embeds", "image_embeds": EmbedsPart(fields | {"image_grid_thw": [[1, 6, 4]]})},
    ]
    collected = collect([{"role": "user", "content": parts}], qwen.family, is_local=True)
    loaded = load(qwen, collected.items, collected.given_uuids()).items["image"]
    assert [numbers(one)[1] for one in loaded] == [FIRST, [1, 6, 4]]
    with pytest.raises(InputError, match="a part of type 'image_embeds' whose data cannot be read"):
        collect(
            [{"role": "user", "content": parts}], qwen.family, is_local=False
        )  # what a client says is decoded first
    alone = collect([{"role": "user", "content": [{"type": "image_embeds", "image_embeds": VECTORS}]}], qwen.family,
                    is_local=True)  # fmt: skip
    with pytest.raises(InputError, match="come with image_grid_thw"):
        load(qwen, alone.items)


def test_videos(made: list[MediaInputs]) -> None:
    """Their seconds go to the worker, or their times into the text."""
    made += [inputs(), inputs("Qwen3VLProcessor"), inputs("Glm4vProcessor"), inputs("Glm46VProcessor")]
    data = {"video_embeds": VECTORS, "video_grid_thw": [[2, 4, 4]]}
    (one,) = load(made[0], {"video": data | {"second_per_grid_ts": [0.5]}}).items["video"]
    assert one.item.arrays["second_per_grid_ts"].tolist() == [0.5] and one.item.text == "<|video_pad|>" * 8
    assert "second_per_grid_ts" not in load(made[0], {"video": data}).items["video"][0].item.arrays
    times, pads = {"timestamps": [0.25, 1.75]}, "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
    frame = "<|begin_of_image|>" + "<|image|>" * 4 + "<|end_of_image|>"
    for media, text in ((made[1], f"<0.2 seconds>{pads}<1.8 seconds>{pads}"), (made[2], f"{frame}0{frame}1"),
                        (made[3], f"{frame}0.2 seconds{frame}1.8 seconds")):  # fmt: skip
        (one,) = load(media, {"video": data | times}).items["video"]
        assert one.item.text == text and one.item.num_vectors == 8
    half = VECTORS[:4], VECTORS[4:]
    several = {"video_embeds": half, "video_grid_thw": [[1, 4, 4]] * 2, "timestamps": [[0.5], [1.5]]}
    assert [one.item.text[:13] for one in load(made[1], {"video": several}).items["video"]] == [
        "<0.5 seconds>", "<1.5 seconds>"
    ]  # fmt: skip
    with pytest.raises(InputError, match="timestamps has 3 numbers, and video_grid_thw has 2 frames"):
        load(made[1], {"video": data | {"timestamps": [0, 1, 2]}})
    with pytest.raises(InputError, match="come with timestamps"):
        load(made[2], {"video": data})
    with pytest.raises(InputError, match=r"second_per_grid_ts is 65536.*longer than 1048576"):
        load(made[0], {"video": {"video_embeds": VECTORS[:1].repeat(20, 0), "video_grid_thw": [20, 2, 2],
                                 "second_per_grid_ts": 65536.0}})  # fmt: skip


def test_vectors_of_later_layers_make_them_wider(made: list[MediaInputs]) -> None:
    made.append(inputs("Qwen3VLProcessor", {"vision_config": {"deepstack_visual_indexes": [0, 3]}}))
    wide = np.concatenate([VECTORS] * 3, -1)[:2]
    (one,) = images(made[0], {"image_embeds": wide, "image_grid_thw": SECOND})
    assert one.item.arrays["embeds"].shape == (2, 3 * WIDTH)
    with pytest.raises(InputError, match=r"has the shape \[2, 6\]; expected \(vectors, 18\)"):
        images(made[0], {"image_embeds": VECTORS[:2], "image_grid_thw": SECOND})


def test_keys_are_of_vectors_and_grids(qwen: MediaInputs) -> None:
    def key(vectors: Any = VECTORS[:6], grid: Any = FIRST, **more: Any) -> str:
        return images(qwen, {"image_embeds": vectors, "image_grid_thw": grid}, **more)[0].key

    other = VECTORS[:6].copy()
    other[5, 5] += 1
    assert key() == key() == key(grid=np.array([FIRST]))
    assert len({key(), key(other), key(grid=[1, 6, 4]), key(salt="a"), key(VECTORS[:6].astype(np.float16))}) == 5


def test_names_of_items(qwen: MediaInputs) -> None:
    data, uuids = {"image_embeds": VECTORS[:6], "image_grid_thw": FIRST}, {"image": ["one"]}
    (first,) = images(qwen, data, uuids)
    (again,) = images(qwen, None, uuids)
    assert again.key == first.key and numbers(again) == numbers(first)
    assert images(qwen, data)[0].key != first.key
    both = {"image_embeds": VECTORS, "image_grid_thw": [FIRST, SECOND]}
    assert images(qwen, both, {"image": ["one", None]})[0].key == first.key
    with pytest.raises(InputError, match="one entry for each of the 2 image items"):
        images(qwen, both, uuids)


def test_limits_count_them(made: list[MediaInputs]) -> None:
    made += [inputs(limit_per_prompt={"image": 1}), inputs(enable_mm_embeds=False), inputs()]
    both = {"image_embeds": VECTORS, "image_grid_thw": [FIRST, SECOND]}
    for value in (both, [{"image_embeds": VECTORS[6:], "image_grid_thw": SECOND}] * 2):
        with pytest.raises(InputError, match=r"At most 1 image\(s\) may be provided in one prompt; got 2"):
            images(made[0], value)
        with pytest.raises(InputError, match="--enable-mm-embeds"):
            images(made[1], value)
    many = np.zeros((MOST // 2 + 1, WIDTH), np.float32)
    grid = [1, 2, 2 * len(many)]
    with pytest.raises(InputError, match=f"take at least 66 tokens; the prompt and its answer may have {MOST}"):
        images(made[2], [{"image_embeds": many, "image_grid_thw": grid}] * 2)


DEEP: Any = functools.reduce(lambda inner, _: [inner], range(5000), cast("Any", 1))
ENDLESS = np.broadcast_to(np.zeros((1, WIDTH), np.float32), (1 << 40, WIDTH))


def with_grid(grid: Any, why: str) -> tuple[Any, str]:
    return {"image_embeds": VECTORS, "image_grid_thw": grid}, why


def of_vectors(vectors: Any, why: str) -> tuple[Any, str]:
    return {"image_embeds": vectors, "image_grid_thw": SECOND}, why


REFUSED: dict[str, tuple[Any, str]] = {
    "no grid": (VECTORS[None], "image embeddings of this model come with image_grid_thw"),
    "a grid of nothing": with_grid(None, "come with image_grid_thw"),
    "a grid alone": ({"image_grid_thw": FIRST, "image_embeds": None}, "come with image_embeds"),
    "another name": (
        {"image_embeds": VECTORS, "image_grid_thw": FIRST, "sizes": 1},
        "'sizes': this model takes image_embeds, image_grid_thw",
    ),
    "a video's": ({"video_embeds": VECTORS, "video_grid_thw": FIRST}, "'video_embeds': this model takes image_embeds"),
    "too many vectors": (
        {"image_embeds": VECTORS, "image_grid_thw": FIRST},
        r"image_embeds has 8 vectors, and an item with image_grid_thw \[1, 4, 6\] has 6",
    ),
    "too few in all": (
        {"image_embeds": VECTORS[:7], "image_grid_thw": [FIRST, SECOND]}, "has 7 vectors, and its 2 items have 8"
    ),
    "fewer arrays than grids": (
        {"image_embeds": [VECTORS[:6]], "image_grid_thw": [FIRST, SECOND]}, "has 1 items, and image_grid_thw is of 2"
    ),
    "another width": (
        {"image_embeds": VECTORS[:6, :5], "image_grid_thw": FIRST}, r"has the shape \[6, 5\]; expected \(vectors, 6\)"
    ),
    "four dimensions": (
        {"image_embeds": VECTORS[None, None], "image_grid_thw": FIRST}, r"has the shape \[1, 1, 8, 6\]"
    ),
    "no vectors": ({"image_embeds": VECTORS[:0], "image_grid_thw": FIRST}, r"has the shape \[0, 6\]"),
    "endless": ({"image_embeds": ENDLESS, "image_grid_thw": FIRST}, rf"has {1 << 40} vectors; .* may have {MOST}"),
    "endless items": (
        {"image_embeds": np.broadcast_to(VECTORS[None, :2], (1 << 40, 2, WIDTH)), "image_grid_thw": SECOND},
        f"has {1 << 40} items; the limit is {MOST_NUMBERS}",
    ),
    "a grid of two numbers": with_grid([4, 6], "has 2 numbers for an item; expected 3"),
    "a grid of none": with_grid([], "has 0 numbers|is empty"),
    "a grid of floats": with_grid([1.0, 4.0, 6.0], "has 1.0; expected whole numbers"),
    "a negative grid": with_grid([1, -4, -6], "has -4; expected whole numbers from 1"),
    "a huge grid": with_grid([1, 1 << 62, 6], "expected whole numbers from 1 to 1048576"),
    "a grid of huge numbers": with_grid([1 << 20] * 3, f"has {1 << 58}$"),
    "a grid beyond 64 bits": with_grid([1, 1 << 70, 6], "expected whole numbers"),
    "truth": with_grid([True, 4, 6], "must be numbers"),
    "an array of truth": with_grid(np.ones(3, bool), "must be numbers"),
    "words": with_grid("1x4x6", "must be numbers"),
    "a nested list": with_grid([[[1], 4, 6]], "must be numbers"),
    "odd entries": with_grid([FIRST, None], "must be numbers"),
    "objects": with_grid(np.array([1, {}, 6], object), "must be numbers"),
    "a large list": with_grid([1] * 70_000, "70000 entries; the limit is 16384"),
    "a large array": with_grid(np.ones((1 << 16, 3), int), "16384 at most"),
    "a deep list": with_grid(DEEP, "must be numbers"),
    "many lists": with_grid([[1, 2, 2]] * 6_000, "18000 entries"),
    "patches that are not merged": with_grid([1, 4, 5], "4 x 5 patches, of which 2 x 2"),
    "ragged": of_vectors([[1.0], [1.0, 2.0]], "image_embeds cannot be read|shape"),
    "text": of_vectors("AAAA", r"has the shape \[\]"),
    "whole numbers": of_vectors(VECTORS[:2].astype(int), "bfloat16, got int64"),
    "complex": of_vectors(VECTORS[:2].astype(np.complex64), "got complex64"),
    "not a number": of_vectors(VECTORS[:2] * np.nan, "must be finite"),
    "infinite once rounded": (
        {"image_embeds": np.full((2, WIDTH), 1e300), "image_grid_thw": SECOND}, "must be finite"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, qwen: MediaInputs) -> None:
    value, why = REFUSED[name]
    with pytest.raises(InputError, match=why):
        images(qwen, value)
    assert images(qwen, {"image_embeds": VECTORS[:6], "image_grid_thw": FIRST})


def minicpm(release: Any) -> ProcessorFiles:
    return ProcessorFiles(config={"model_type": "minicpmv", "version": release, "query_num": 4})


SIZED = {
    "MiniCPM-V 2.5": ("MiniCPMVProcessor", minicpm("2.5")), "MiniCPM-V 2.6": ("MiniCPMVProcessor", minicpm(2.6)),
    "MiniCPM-V 4.5": ("MiniCPMVProcessor", minicpm(4.5)), "MiniCPM-V 4.6": ("MiniCPMV4_6Processor", ProcessorFiles()),
    "MiniCPM-V 4.7": ("MiniCPMV4_7Processor", ProcessorFiles()),
    "MiniCPM-OCR": ("MiniCPMOcrProcessor", ProcessorFiles()),
    "Idefics 3": ("Idefics3Processor", ProcessorFiles()), "Pixtral": ("PixtralProcessor", ProcessorFiles()),
    "Llama 4": ("Llama4Processor", ProcessorFiles()), "LFM2": ("Lfm2VlProcessor", ProcessorFiles()),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZED)
def test_the_size_of_an_image_tells_its_layout(name: str) -> None:
    """The text, the count and the sizes of its parts are those that the image itself has."""
    family = make_family(*SIZED[name])
    for size in ((40, 30), (448, 448), (900, 700), (300, 1800)):
        item = family.process("image", Image.new("RGB", size), {}, 1)
        beside = {"image_sizes": list(size)}
        text, arrays = family.lay_out_embeds("image", beside, {})
        assert (text, family.count_embeds("image", beside, {})) == (item.text, item.num_vectors)
        assert {key: array.tolist() for key, array in arrays.items()} == {
            key: array.tolist() for key, array in item.arrays.items() if key == "target_sizes"
        }


def test_options_of_a_prompt_change_the_layout(made: list[MediaInputs]) -> None:
    made.append(inputs("MiniCPMVProcessor", {"model_type": "minicpmv", "version": 2.6, "query_num": 4}))
    whole = {"image_embeds": VECTORS[:4], "image_sizes": (900, 700)}
    (one,) = images(made[0], whole, None, {"max_slice_nums": 1})
    assert one.item.num_vectors == 4 and one.item.text.count("<slice>") == 0
    with pytest.raises(InputError, match=r"has 4 vectors, and an item with image_sizes \[900, 700\] has 20"):
        images(made[0], whole)
    for size in ((0, 700), (900, 1 << 20), (900,), (900.0, 700.0)):
        with pytest.raises(InputError, match=r"expected whole numbers from 1 to 32768|expected 2"):
            images(made[0], whole | {"image_sizes": size})


@pytest.mark.parametrize("name", [name for name in SIZED if "MiniCPM" in name and "2.5" not in name])
def test_the_sizes_of_frames_tell_the_layout_of_a_video(name: str) -> None:
    family = make_family(*SIZED[name])
    for size in ((40, 30), (900, 700)):
        frames = [Image.new("RGB", size)] * 3
        for options in ({}, {"packing_nums": 2}) if name.endswith("4.5") else ({},):
            item = family.process("video", Video(frames, [0, 1, 2], 2.0, 3), options, 1)
            beside = {"video_image_sizes": list(size) * 3}
            text, arrays = family.lay_out_embeds("video", beside, options)
            assert (text, family.count_embeds("video", beside, options)) == (item.text, item.num_vectors)
            (sizes,) = arrays
            assert arrays[sizes].tolist() == item.arrays[sizes].tolist()


def test_frames_of_several_videos(made: list[MediaInputs]) -> None:
    made.append(inputs("MiniCPMVProcessor", {"model_type": "minicpmv", "version": 4.5, "query_num": 2}))
    one, two = [(40, 30)] * 3, [(56, 56)]
    for sizes in ([one, two], (one, two), [np.array(one), np.array(two)]):
        loaded = load(made[0], {"video": {"video_embeds": VECTORS, "video_image_sizes": sizes}}).items["video"]
        assert [item.item.num_vectors for item in loaded] == [6, 2]
    even = {"video_embeds": VECTORS, "video_image_sizes": np.array([one[:2], two * 2])}
    assert [item.item.num_vectors for item in load(made[0], {"video": even}).items["video"]] == [4, 4]
    for value, why in (
        ([], "is empty"), ([[]], "is empty"), ([(40, 30, 20)], "has 3 numbers for an item; expected groups of 2"),
        ([[[(40, 30)]]], "must be numbers"), (np.ones((1, 1, 1, 2), int), "has the shape"), ("4x3", "must be numbers"),
        (DEEP, "must be numbers"),
        ([(40, 30), None], "must be numbers"), ([[40, 30], [[1, 2]]], "must be numbers"), (40, "expected groups of 2"),
        ([(40, 0)] * 4, "expected whole numbers from 1 to 32768"), (np.zeros((9, 0), int), "is empty"),
        ([(40, 30)] * 9000, "18000 entries"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=why):
            load(made[0], {"video": {"video_embeds": VECTORS, "video_image_sizes": value}})


def test_sizes_of_more_than_fits_take_no_longer_for_more_items(
    made: list[MediaInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many large images as there may be numbers; only those that fit, and one more, are laid out."""
    made.append(inputs("Idefics3Processor"))
    family, counted = made[0].family, [0]
    count = type(family).count_embeds

    def counting(*args: Any) -> int:
        counted[0] += 1
        return count(family, *args)

    monkeypatch.setattr(family, "count_embeds", counting)
    value = {"image_embeds": VECTORS, "image_sizes": np.full((MOST_NUMBERS // 2, 2), 1 << 15)}
    with pytest.raises(InputError, match=rf"8192 items: the first 1 have \d+ vectors; .* may have {MOST} "):
        images(made[0], value, None, {"do_resize": False})
    assert counted == [1]


def test_more_items_than_there_may_be_are_refused(made: list[MediaInputs]) -> None:
    """Also where nothing beside them says how many they are."""
    made.append(inputs("Qwen2AudioProcessor", limit_per_prompt={"audio": 0}))
    many = np.broadcast_to(VECTORS[:1], (MOST_NUMBERS + 1, 1, WIDTH))
    with pytest.raises(InputError, match=f"audio_embeds has {MOST_NUMBERS + 1} items; the limit is {MOST_NUMBERS}"):
        load(made[0], {"audio": {"audio_embeds": many}})
