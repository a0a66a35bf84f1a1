"""Images and videos of MiniCPM-V and MiniCPM-OCR: pixels beside transformers' processor of 4.6, to the last bit
(earlier releases, which transformers lacks, cut images in the same way), the text that stands for them, and limits."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from quire.config import MultiModalConfig
from quire.media import pixels
from quire.media.expand import expand_text, find_places
from quire.media.families import family_name, make_family
from quire.media.inputs import LoadedItem, LoadedMedia, MediaInputs
from quire.media.settings import ProcessorFiles
from quire.media.sources import MediaSources
from quire.media.video import Video
from quire.media.workers import MediaWorkers
from quire.schema.errors import CheckpointError, InputError, NotBuiltError
from quire.text.tokenizer import load_tokenizer
from tests.media.test_pixels_oracle import SIZES, picture
from tests.media.tokens import write_tokenizer

MORE_SIZES = (*SIZES, (112, 112), (113, 112), (2000, 40), (40, 2000), (400, 100), (225, 224), (1, 300))
SMALL = {"scale_resolution": 112}
NUM = 6


def files(release: Any = 2.6, config: dict[str, Any] | None = None, **own: Any) -> ProcessorFiles:
    """As on hubs."""
    part = {
        "image_processor_type": "MiniCPMVImageProcessor", "processor_class": "MiniCPMVProcessor", "max_slice_nums": 9,
        "scale_resolution": 112, "patch_size": 14, "use_image_id": True, "image_feature_size": NUM,
        "im_start": "<image>", "im_end": "</image>", "slice_start": "<slice>", "slice_end": "</slice>", "unk": "<unk>",
        "im_id_start": "<image_id>", "im_id_end": "</image_id>", "slice_mode": True, "norm_mean": [0.5, 0.5, 0.5],
        "norm_std": [0.5, 0.5, 0.5], "version": release,
    }  # fmt: skip
    if release == "2.5":
        del part["use_image_id"]
    facts = {"model_type": "minicpmv", "version": release, "query_num": NUM} | (config or {})
    return ProcessorFiles(config=facts, parts={"image": part | own})


def family(release: Any = 2.6, **own: Any) -> Any:
    given = files(release, **own)
    name = family_name(given)
    assert name == "MiniCPMVProcessor"
    return make_family(name, given)


def images_of(arrays: dict[str, Any], patch: int) -> list[np.ndarray]:
    """Pieces, out of patches that lie beside each other."""
    strips, images, start = arrays["pixel_values"][0], [], 0
    for height, width in np.asarray(arrays["target_sizes"]).tolist():
        strip = strips[:, :, start : start + height * width * patch]
        start += height * width * patch
        images.append(strip.reshape(3, patch, height, width * patch).swapaxes(1, 2).reshape(3, height * patch, -1))
    assert start == strips.shape[-1]
    return images


@pytest.mark.parametrize(("name", "mode", "most"), [
    ("MiniCPMV4_6Processor", "16x", 9), ("MiniCPMV4_6Processor", "4x", 9), ("MiniCPMV4_6Processor", "16x", 3),
    ("MiniCPMOcrProcessor", "4x", 6),
])  # fmt: skip
def test_pixels_of_later_releases(name: str, mode: str, most: int) -> None:
    settings = SMALL | {"downsample_mode": mode, "max_slice_nums": most, "patch_size": 7}
    theirs, ours = (
        MiniCPMV4_6ImageProcessorPil(**settings),
        make_family(name, ProcessorFiles(parts={"image": settings})),
    )
    for width, height in MORE_SIZES:
        image = picture(width, height)
        item, expected = ours.process("image", image, {}, 1), theirs(image, return_tensors="np")
        for key in ("pixel_values", "target_sizes"):
            np.testing.assert_array_equal(item.arrays[key], expected[key], err_msg=f"{key} of {width}x{height}")


@pytest.mark.parametrize("release", ["2.5", 2.6, 4.0, 4.5, 4])
def test_pixels_of_earlier_releases(release: Any) -> None:
    """Sides are multiples of 14 here and there: of patches of 14, or of two patches of 7."""
    theirs, ours = MiniCPMV4_6ImageProcessorPil(**SMALL, patch_size=7, downsample_mode="4x"), family(release)
    for width, height in MORE_SIZES:
        image = picture(width, height)
        item, expected = ours.process("image", image, {}, 1), theirs(image, return_tensors="np")
        ours_, theirs_ = images_of(item.arrays, 14), images_of(expected, 7)
        assert len(ours_) == len(theirs_) and item.num_vectors == NUM * len(ours_)
        for one, other in zip(ours_, theirs_, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"{width}x{height}")


def test_pixels_are_normalised_as_the_files_say() -> None:
    image = picture(60, 60)
    plain, other = (
        images_of(one.process("image", image, {}, 1).arrays, 14)[0]
        for one in (family(), family(norm_mean=[0.1, 0.2, 0.3], norm_std=[0.5, 0.25, 2.0]))
    )
    levels = plain * 0.5 + 0.5
    mean, std = (np.array(values)[:, None, None] for values in ([0.1, 0.2, 0.3], [0.5, 0.25, 2.0]))
    np.testing.assert_allclose(other, (levels - mean) / std, atol=1e-6)


@pytest.mark.parametrize("most", [1, 2, 5, 9])
def test_more_pieces_if_asked_for(most: int) -> None:
    item = family().process("image", picture(700, 300), {"max_slice_nums": most}, 1)
    num = len(item.arrays["target_sizes"])
    assert num == 1 if most == 1 else 1 < num <= 1 + most
    assert item.text.count("<unk>") == item.num_vectors == NUM * num


# ---- texts ----------------------------------------------------------------------------------------------------------

PIECE = "<slice>" + "<unk>" * NUM + "</slice>"
WHOLE = "<image>" + "<unk>" * NUM + "</image>"


def test_texts() -> None:
    """Of an image that fits one piece, and of one in two rows of three pieces."""
    large = picture(330, 220)
    for release in (2.6, 4.0, 4.5):
        own = family(release)
        assert own.process("image", picture(90, 90), {}, 1).text == f"<image_id>0</image_id>{WHOLE}"
        text = f"{WHOLE}{PIECE * 3}\n{PIECE * 3}"
        assert own.process("image", large, {}, 1).text == f"<image_id>0</image_id>{text}"
        assert own.process("image", large, {"use_image_id": False}, 1).text == text
    old = family("2.5")
    assert old.process("image", picture(90, 90), {}, 1).text == WHOLE
    assert old.process("image", large, {}, 1).text == f"{WHOLE}<slice>{WHOLE * 3}\n{WHOLE * 3}</slice>"


def test_texts_of_later_releases_equal_transformers() -> None:
    settings = SMALL | {"downsample_mode": "16x", "patch_size": 7}
    images = [picture(*size) for size in ((90, 90), (330, 220), (100, 500))]
    outputs = MiniCPMV4_6ImageProcessorPil(**settings)(images, return_tensors="np")
    me: Any = SimpleNamespace(
        image_start_token="<image>", image_end_token="</image>", slice_start_token="<slice>",
        slice_end_token="</slice>", image_id_start_token="<image_id>", image_id_end_token="</image_id>",
        image_token="<|image_pad|>", slice_mode=True,
    )  # fmt: skip
    texts = [MiniCPMV4_6Processor.replace_image_token(me, outputs, at, image_token_divisor=16) for at in range(3)]
    prompt = "a<|image_pad|>b<|image_pad|><|image_pad|>c"
    texts = MiniCPMV4_6Processor._prepend_local_ids(me, [prompt], texts, me.image_token)
    ours = make_family("MiniCPMV4_6Processor", ProcessorFiles(parts={"image": settings}))
    items = {"image": [ours.process("image", image, {}, 3) for image in images]}
    assert expand_text(ours, prompt, items) == f"a{texts[0]}b{texts[1]}{texts[2]}c"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(str(folder))


def test_images_have_numbers_and_places(tokenizer: Any) -> None:
    own = family()
    sizes = ((90, 90), (330, 220), (90, 90))
    items = {"image": [own.process("image", picture(*size), {}, 3) for size in sizes]}
    text = "".join(f"{own.written('image', number)}\nthe " for number in (1, 2, 3))
    expanded = expand_text(own, text, items)
    for number in range(3):
        assert expanded.count(f"<image_id>{number}</image_id><image><unk>") == 1
    ids = tokenizer.encode(expanded)
    for place, item in zip(find_places(own, ids, items, tokenizer), items["image"], strict=True):
        mask = place.takes_vector or bytes([1]) * place.length
        assert sum(mask) == item.num_vectors
        own_ids = ids[place.offset : place.offset + place.length]
        assert [one == tokenizer.token_to_id("<unk>") for one in own_ids] == [bool(takes) for takes in mask]


@pytest.fixture
def workers() -> Any:
    threads = MediaWorkers(1)
    yield threads
    threads.close()


def media_inputs(own: Any, workers: MediaWorkers) -> MediaInputs:
    return MediaInputs(own, MediaSources(), MultiModalConfig(mm_processor_cache_gb=0), workers=workers)


def test_prompts_of_ids(tokenizer: Any, workers: MediaWorkers) -> None:
    """What stands for an item is several tokens, whose last one may be merged with what follows."""
    own = family()
    owner = media_inputs(own, workers)
    images = [own.process("image", picture(*size), {}, 2) for size in ((90, 90), (330, 220))]
    loaded = LoadedMedia({"image": [LoadedItem(item, f"key {number}") for number, item in enumerate(images)]})
    text = "the (<image>./</image>)\nimage: (<image>./</image>)\n\n"
    by_text = owner.place(text, None, loaded, tokenizer, add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    by_ids = owner.place(None, ids, loaded, tokenizer)
    assert by_ids.token_ids == by_text.token_ids and by_ids.items == by_text.items
    again = owner.place(None, by_ids.token_ids, loaded, tokenizer)  # expanded already
    assert again.token_ids == by_text.token_ids and again.items == by_text.items
    with pytest.raises(InputError, match=r"1 placeholders .* for 2 image items"):
        owner.place(None, tokenizer.encode("the (<image>./</image>)"), loaded, tokenizer)
    with pytest.raises(InputError, match="it must not contain these tokens besides"):
        owner.place(text + "<unk>", None, loaded, tokenizer)


def test_items_whose_positions_follow_marks(tokenizer: Any, workers: MediaWorkers) -> None:
    """Of 4.7: where other tokens stand between slices, an item has another key."""
    own = make_family("MiniCPMV4_7Processor", ProcessorFiles(parts={"image": SMALL | {"patch_size": 7}}))
    owner = media_inputs(own, workers)
    loaded = LoadedMedia({"image": [LoadedItem(own.process("image", picture(330, 220), {}, 1), "key")]})
    first, again = (owner.place(f"{text}<|image_pad|>", None, loaded, tokenizer) for text in ("a", "the image"))
    assert first.items[0].key == again.items[0].key
    ids = list(first.token_ids)
    ids[ids.index(tokenizer.token_to_id("<slice>"))] = tokenizer.token_to_id("<image>")
    other = owner.place(None, ids, loaded, tokenizer)
    assert other.items[0].key != first.items[0].key and other.items[0].arrays == first.items[0].arrays


# ---- videos ---------------------------------------------------------------------------------------------------------


def video(num: int, size: tuple[int, int] = (90, 60), fps: float | None = 4.0) -> Video:
    return Video([picture(size[0] + index, size[1]) for index in range(num)], [3 * i for i in range(num)], fps, 3 * num)


def test_frames_of_a_video() -> None:
    for release in (2.6, 4.0):
        own = family(release)
        item, images = own.process("video", video(3), {}, 1), own
        assert item.text == "\n".join([WHOLE] * 3) and item.num_vectors == 3 * NUM
        assert "temporal_ids" not in item.arrays
        alone = [images.process("image", frame, {"max_slice_nums": 1}, 1).arrays for frame in video(3).frames]
        np.testing.assert_array_equal(
            item.arrays["pixel_values"], np.concatenate([one["pixel_values"] for one in alone], -1)
        )
        with pytest.raises(InputError, match="'packing_nums', which this model's processor does not know"):
            own.process("video", video(3), {"packing_nums": 2}, 1)
    sliced = family().process("video", video(2, (330, 220)), {"max_slice_nums": 9}, 1)
    assert sliced.text == "\n".join([f"{WHOLE}{PIECE * 3}\n{PIECE * 3}"] * 2) and sliced.num_vectors == 2 * 7 * NUM
    with pytest.raises(InputError, match="takes image and no video"):
        family("2.5").process("video", video(1), {}, 1)


def test_times_of_frames() -> None:
    """Tenths of seconds, in 4.5."""
    own = family(4.5)
    item = own.process("video", video(5), {}, 1)
    assert item.arrays["temporal_ids"].tolist() == [round(index * 3 / 4 * 10) for index in range(5)]
    assert item.arrays["packs"].tolist() == [1] * 5 and item.text == "\n".join([WHOLE] * 5)
    packed = own.process("video", video(5), {"packing_nums": 2}, 1)
    assert packed.arrays["packs"].tolist() == [2, 2, 1] and packed.text == "\n".join([WHOLE] * 3)
    assert packed.num_vectors == 3 * NUM
    np.testing.assert_array_equal(packed.arrays["pixel_values"], item.arrays["pixel_values"])
    untimed = own.process("video", video(5, fps=None), {}, 1)
    assert "temporal_ids" not in untimed.arrays and untimed.num_vectors == 5 * NUM
    assert "packs" not in own.process("video", video(2, (330, 220)), {"max_slice_nums": 9}, 1).arrays


def test_videos_of_later_releases() -> None:
    """Frames are images, under one number, as transformers writes them."""
    settings = SMALL | {"downsample_mode": "16x", "patch_size": 7}
    frames = [picture(330, 220), picture(330, 220).rotate(180)]
    outputs = MiniCPMV4_6ImageProcessorPil(**settings)(frames, return_tensors="np")
    me: Any = SimpleNamespace(
        image_start_token="<image>", image_end_token="</image>", slice_start_token="<slice>", video_slice_mode=True,
        slice_end_token="</slice>", image_id_start_token="<image_id>", image_id_end_token="</image_id>",
        video_token="<|video_pad|>",
    )  # fmt: skip
    given = {
        "target_sizes_videos": outputs["target_sizes"], "num_frames_per_video": [2],
        "grids_videos": np.array(outputs["grids"]),
    }  # fmt: skip
    written = MiniCPMV4_6Processor.replace_video_token(me, given, 0, video_token_divisor=16)
    ours = make_family("MiniCPMV4_6Processor", ProcessorFiles(parts={"video": settings}))
    item = ours.process("video", Video(frames, [0, 1], 2.0, 2), {}, 1)
    assert item.text == f"<image_id>0</image_id>{written}" and item.num_vectors == written.count(me.video_token)
    for name in ("pixel_values", "target_sizes"):
        np.testing.assert_array_equal(item.arrays[f"{name}_videos"], outputs[name])
    later = make_family("MiniCPMV4_7Processor", ProcessorFiles(parts={"video": settings}))
    assert later.process("video", Video(frames, [0, 1], 2.0, 2), {}, 1).text == written
    with pytest.raises(NotBuiltError, match="stack_frames other than 1 are not built"):
        ours.process("video", Video(frames, [0, 1], 2.0, 2), {"stack_frames": 4}, 1)


# ---- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "said"), [
    ({"max_slice_nums": 65}, "max_slice_nums of the media processor must be a whole number from 1 to 64, got 65"),
    ({"max_slice_nums": 0}, "from 1 to 64, got 0"),
    ({"max_slice_nums": -1}, "from 1 to 64, got -1"),
    ({"max_slice_nums": "9"}, "from 1 to 64, got '9'"),
    ({"max_slice_nums": 10**400}, "from 1 to 64, got 1000"),
    ({"use_image_id": "yes"}, "use_image_id of the media processor must be true or false"),
    ({"unk": "<s>"}, "'unk', which this model's processor does not know"),
    ({"image_feature_size": 1}, "'image_feature_size', which this model's processor does not know"),
    ({"scale_resolution": 4096}, "scale_resolution is 4096; it belongs to the model and must be 112"),
    ({"patch_size": 1}, "patch_size belongs to the model"),
])  # fmt: skip
def test_options_of_requests(options: dict[str, Any], said: str, workers: MediaWorkers) -> None:
    owner = media_inputs(family(), workers)
    with pytest.raises(InputError, match=said):
        owner.loaded(owner.load({"image": picture(330, 220)}, processor_options=options))


@pytest.mark.parametrize(("options", "rate", "said"), [
    ({"packing_nums": 7}, 4.0, "packing_nums of the media processor must be a whole number from 1 to 6, got 7"),
    ({"packing_nums": 0}, 4.0, "from 1 to 6, got 0"),
    ({"packing_nums": 2}, None, "the video tells its frames per second"),
    ({"packing_nums": 2, "max_slice_nums": 9}, 4.0, "are not cut into pieces"),
    ({}, 1e-300, "is not between 0 and 1677721.6 s"),
    ({}, 5e-324, "is not between 0 and 1677721.6 s"),
    ({}, -2.0, "is not between 0 and 1677721.6 s"),
    ({}, math.nan, "is not between 0 and 1677721.6 s"),
])  # fmt: skip
def test_options_of_videos(options: dict[str, Any], rate: float | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        family(4.5).process("video", video(2, (330, 220), rate), options, 1)


def test_pieces_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "resize", lambda *_: pytest.fail("a piece was made"))
    own = family(scale_resolution=4096, max_slice_nums=64)
    with pytest.raises(InputError, match=r"crops of .* pixels have \d+ pixels together; the limit is 67108864"):
        own.process("image", Image.new("RGB", (9000, 9000)), {}, 1)
    with pytest.raises(InputError, match=r"5 frames of .* pixels have \d+ pixels together; the limit is 67108864"):
        family(4.5, scale_resolution=4096).process("video", video(5), {}, 1)


def test_long_and_thin_images() -> None:
    """Their longer side grows with the root of their proportions only."""
    for width, height in ((32768, 1), (1, 32768), (30000, 20), (3, 3)):
        pieces = pixels_of(width, height)
        assert max(max(size) for size in pieces) <= max(448 * math.sqrt(32768) + 14, 14)
        assert all(size[0] % 14 == size[1] % 14 == 0 for size in pieces)


def pixels_of(width: int, height: int) -> list[tuple[int, int]]:
    from quire.media.families.minicpm import pieces_of

    return pieces_of((height, width), 448, 9, 14).sizes


@pytest.mark.parametrize(("given", "error", "said"), [
    ({"release": 2.0}, NotBuiltError, "MiniCPMV with version = 2.0 is not in this version of Quire; built are"),
    ({"release": [1]}, NotBuiltError, "version = "),
    ({"unk": 7}, CheckpointError, "unk of the media processor must be a token, got 7"),
    ({"im_start": "x" * 101}, CheckpointError, "im_start of the media processor must be a token"),
    ({"im_end": ""}, CheckpointError, "im_end of the media processor must be a token"),
    ({"image_feature_size": 64}, CheckpointError, "image_feature_size of the media processor is 64 and query_num .* 6"),
    ({"config": {"query_num": 10**9}}, InputError, "query_num of the media processor must be a whole number from 1"),
])  # fmt: skip
def test_hostile_files(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make_family("MiniCPMVProcessor", files(**given))


@pytest.mark.parametrize(("given", "said"), [
    ({"scale_resolution": 4097}, "scale_resolution of the media processor must be a whole number from 1 to 4096"),
    ({"patch_size": 0}, "patch_size of the media processor must be a whole number from 1 to 1024"),
    ({"norm_std": [0, 1, 1]}, "image_std of the media processor must be three numbers other than 0"),
    ({"norm_mean": "x"}, "image_mean of the media processor must be three numbers"),
])  # fmt: skip
def test_hostile_settings(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        family(**given).process("image", picture(90, 90), {}, 1)


def test_settings_of_later_releases() -> None:
    def made(**settings: Any) -> Any:
        own = make_family("MiniCPMOcrProcessor", ProcessorFiles(parts={"image": SMALL | {"patch_size": 7} | settings}))
        return own.process("image", picture(40, 30), {}, 1)

    small, large = made(small_image_upsize="never"), made()
    assert small.arrays["target_sizes"].tolist() == [[4, 6]] and small.num_vectors == 2 * 3
    assert large.num_vectors > small.num_vectors
    with pytest.raises(NotBuiltError, match="small_image_upsize = 'adaptive' is not built"):
        made(small_image_upsize="adaptive")
    with pytest.raises(NotBuiltError, match="do_resize = false is not built"):
        made(do_resize=False)
    with pytest.raises(InputError, match="downsample_mode of the media processor must be '4x' or '16x', got '2x'"):
        made(downsample_mode="2x")
