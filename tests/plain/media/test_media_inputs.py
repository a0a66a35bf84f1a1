"""From multi_modal_data and chat parts to items: limits, uuids, keys, the cache, embeddings, placeholders."""

from __future__ import annotations

import base64
import io
import threading
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.config import MultiModalConfig
from quire.media.cache import ProcessorCache
from quire.media.families import family_name, make_family
from quire.media.families.base import ProcessedItem
from quire.media.inputs import LoadedMedia, MediaInputs, MediaRef
from quire.media.parts import collect, has_media
from quire.media.settings import ProcessorFiles
from quire.media.sources import MediaSources
from quire.media.workers import MediaWorkers
from quire.schema.errors import InputError, NotBuiltError, OverloadedError

SETTINGS = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
LLAVA = ProcessorFiles(
    config={"model_type": "llava", "vision_config": {"patch_size": 14, "model_type": "clip_vision_model"}},
    parts={"image": SETTINGS},
)
VECTORS = 4
HIDDEN = 6


class Letters:
    """One id per character, but for the placeholders."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [1] if add_special_tokens else []
        while text:
            token = next((name for name in ("<image>", "<|AUDIO|>") if text.startswith(name)), text[0])
            ids.append(self.token_to_id(token) or ord(token))
            text = text[len(token) :]
        return ids

    def token_to_id(self, token: str) -> int | None:
        return {"<image>": 5, "<|AUDIO|>": 6}.get(token)


def inputs(**options: Any) -> MediaInputs:
    return MediaInputs(
        make_family("LlavaProcessor", LLAVA), MediaSources(), MultiModalConfig(**options), hidden_size=HIDDEN,
        workers=MediaWorkers(2),
    )  # fmt: skip


@pytest.fixture
def llava(made: list[MediaInputs]) -> MediaInputs:
    made.append(inputs())
    return made[0]


def load(media: MediaInputs, data: Any, *args: Any, **more: Any) -> LoadedMedia:
    return media.loaded(media.load(data, *args, **more))


def colour(shade: int) -> Image.Image:
    return Image.new("RGB", (40, 30), (shade, 10, 20))


def data_url(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def test_items_stand_where_their_placeholders_stood(llava: MediaInputs) -> None:
    loaded = load(llava, {"image": [colour(1), colour(2)]})
    placed = llava.place("a<image>bc<image>", None, loaded, Letters())
    assert placed.token_ids == (1, 97, *[5] * VECTORS, 98, 99, *[5] * VECTORS)
    assert [(one.offset, one.length, one.takes_vector) for one in placed.items] == [(2, 4, b""), (8, 4, b"")]
    assert placed.items[0].key != placed.items[1].key and placed.items[0].modality == "image"
    pixels = placed.items[0].arrays["pixel_values"]
    assert pixels.shape == (1, 3, 28, 28) and pixels.dtype == "float32" and len(pixels.data) == 4 * 3 * 28 * 28
    from_ids = llava.place(None, [1, 97, 5, 98, 99, 5], loaded, Letters())
    assert from_ids.token_ids == placed.token_ids
    assert llava.place(None, placed.token_ids, loaded, Letters()).items == placed.items  # expanded already


@pytest.mark.parametrize(("text", "count"), [("no image", 1), ("<image><image>", 1), ("<image>", 2)])
def test_placeholders_and_items_must_be_as_many(llava: MediaInputs, text: str, count: int) -> None:
    loaded = load(llava, {"image": [colour(n) for n in range(count)]})
    with pytest.raises(InputError, match=f"placeholders '<image>' for {count} image items"):
        llava.place(text, None, loaded, Letters())
    with pytest.raises(InputError, match=f"for {count} image items"):
        llava.place(None, Letters().encode(text), loaded, Letters())


def test_limits_per_prompt(made: list[MediaInputs]) -> None:
    made += [inputs(limit_per_prompt={"image": 1}), inputs(limit_per_prompt={"image": {"count": 0, "width": 9}})]
    made += [inputs(language_model_only=True), inputs()]
    with pytest.raises(InputError, match=r"At most 1 image\(s\) may be provided in one prompt"):
        made[0].load({"image": [colour(1), colour(2)]})
    assert load(made[0], {"image": colour(1)}).items["image"]
    for closed in made[1:3]:
        with pytest.raises(InputError, match=r"At most 0 image\(s\)"):
            closed.load({"image": colour(1)})
    with pytest.raises(InputError, match=r"At most 999 image\(s\)"):
        made[3].load({"image": [None] * 1000})
    with pytest.raises(InputError, match="takes image and no audio"):
        made[3].load({"audio": (np.zeros(9), 16000)})
    with pytest.raises(InputError, match="modalities are"):
        made[3].load({"smell": 1})


def test_forms_of_images(llava: MediaInputs) -> None:
    png = io.BytesIO()
    colour(7).save(png, "PNG")
    array = np.asarray(colour(7))
    same = [colour(7), array, np.moveaxis(array, -1, 0), png.getvalue(), MediaRef(url=data_url(colour(7)))]
    pixels = [load(llava, {"image": one}).items["image"][0].item.arrays["pixel_values"] for one in same]
    for one in pixels[1:]:
        np.testing.assert_array_equal(one, pixels[0])
    assert len(load(llava, {"image": np.stack([array, array])}).items["image"]) == 2
    assert len(load(llava, {"image": (colour(1), colour(2))}).items["image"]) == 2


def test_the_cache_saves_work_and_keys_tell_content(llava: MediaInputs) -> None:
    first = load(llava, {"image": colour(1)}).items["image"][0]
    again = load(llava, {"image": colour(1)}).items["image"][0]
    assert again.item is first.item and again.key == first.key and llava.cache.hits == 1
    keys = {
        first.key,
        load(llava, {"image": colour(2)}).items["image"][0].key,
        load(llava, {"image": colour(1)}, salt="b").items["image"][0].key,
        load(llava, {"image": colour(1)}, None, {"do_pad": True}).items["image"][0].key,
        load(llava, {"image": colour(1)}, None, None, {"image": {"rgba_background_color": [1, 1, 1]}})
        .items["image"][0]
        .key,
    }
    assert len(keys) == 5


def test_io_options_of_the_engine_and_of_a_prompt(made: list[MediaInputs], llava: MediaInputs) -> None:
    """--media-io-kwargs, over which a prompt's own go."""
    clear, dark, light = Image.new("RGBA", (40, 30), (0, 0, 0, 0)), [0, 0, 0], [255, 255, 255]
    made.append(inputs(media_io_kwargs={"image": {"rgba_background_color": dark}}))

    def pixels(media: MediaInputs, colour: list[int] | None = None) -> bytes:
        asked = None if colour is None else {"image": {"rgba_background_color": colour}}
        (item,) = load(media, {"image": clear}, None, None, asked).items["image"]
        return bytes(np.asarray(item.item.arrays["pixel_values"]).tobytes())

    assert pixels(made[-1]) == pixels(llava, dark) != pixels(llava) == pixels(made[-1], light)


def test_uuids_name_items_without_sending_them_again(llava: MediaInputs, made: list[MediaInputs]) -> None:
    sent = load(llava, {"image": [colour(1), colour(2)]}, {"image": ["cat", None]}).items["image"]
    recalled = load(llava, {"image": [None]}, {"image": ["cat"]}).items["image"]
    assert recalled[0].key == sent[0].key and recalled[0].item is sent[0].item
    for data, uuids, why in (
        ({"image": [None]}, {"image": ["dog"]}, "'dog' has no data and is not in the cache"),
        ({"image": [None]}, None, "no data and no uuid"),
        ({"image": [None]}, {"image": ["cat", "dog"]}, "one entry for each of the 1"),
        ({"image": colour(1)}, {"video": ["cat"]}, "of which there is no item"),
        ({"image": colour(1)}, {"image": [7]}, "a string of 1 to"),
        ({"image": colour(1)}, {"image": ["x" * 600]}, "a string of 1 to"),
    ):
        with pytest.raises(InputError, match=why):
            load(llava, data, uuids)
    with pytest.raises(InputError, match="not in the cache"):  # another tenant's
        load(llava, {"image": [None]}, {"image": ["cat"]}, salt="other")
    made.append(
        MediaInputs(make_family("LlavaProcessor", LLAVA), MediaSources(), MultiModalConfig(mm_processor_cache_gb=0),
                    has_prefix_cache=False, workers=MediaWorkers(1))
    )  # fmt: skip
    one, two = (load(made[1], {"image": colour(n)}, {"image": ["same"]}).items["image"][0].key for n in (1, 2))
    assert one != two  # without any cache they are ignored


def test_a_uuid_of_two_sizes_has_two_keys(made: list[MediaInputs]) -> None:
    """Where nothing remembers the first: vectors of one must never stand for the other's."""
    files = ProcessorFiles(config={"model_type": "qwen2_vl"}, parts={"image": {"min_pixels": 28 * 28}})
    family = make_family("Qwen2VLProcessor", files)
    made.append(MediaInputs(family, MediaSources(), MultiModalConfig(), workers=MediaWorkers(1)))
    keys = []
    for side in (56, 112):
        made[-1].cache.clear()
        image = colour(1).resize((side, side))
        keys.append(load(made[-1], {"image": image}, {"image": ["same"]}).items["image"][0].key)
    assert keys[0] != keys[1]


def test_options_are_checked(llava: MediaInputs) -> None:
    dark = load(llava, {"image": colour(9)}, None, {"rescale_factor": 0.001}).items["image"][0].item
    plain = load(llava, {"image": colour(9)}).items["image"][0].item
    assert dark.arrays["pixel_values"].data != plain.arrays["pixel_values"].data
    for options, why in (
        ({"colour": 1}, "'colour', which this model's processor does not know"),
        ({"size": {"shortest_edge": 10**9}}, "a size of 1000000000; the limit is"),
        ({"size": {"shortest_edge": 10**7}}, "too long"),
        ({"size": {"shortest_edge": 0}}, "whole number"),
        ({"size": "large"}, "mapping"),
        ({"image_std": [0, 1, 1]}, "other than 0"),
        ({"resample": 99}, "filter number"),
        ({"do_resize": "yes"}, "true or false"),
        ([1], "must be a mapping"),
    ):
        with pytest.raises(InputError, match=why):
            load(llava, {"image": colour(1)}, None, options)


def test_embeddings(made: list[MediaInputs]) -> None:
    made += [inputs(enable_mm_embeds=True), inputs()]
    vectors = np.arange(3 * HIDDEN, dtype=np.float32).reshape(3, HIDDEN)
    for form in (vectors[None], [vectors], {"image_embeds": vectors}):
        loaded = load(made[0], {"image": form})
        (item,) = made[0].place("x<image>", None, loaded, Letters()).items
        assert (item.modality, item.offset, item.length) == ("image", 2, 3)
        assert item.arrays["embeds"].data == vectors.tobytes() and item.arrays["embeds"].shape == (3, HIDDEN)
    assert len(load(made[0], {"image": np.stack([vectors, vectors])}).items["image"]) == 2
    with pytest.raises(InputError, match="--enable-mm-embeds"):
        load(made[1], {"image": [vectors]})
    with pytest.raises(InputError, match=r"expected \(vectors, 6\)"):
        load(made[0], {"image": {"image_embeds": vectors[:, :5]}})
    with pytest.raises(InputError, match="finite"):
        load(made[0], {"image": [vectors * np.nan]})
    with pytest.raises(InputError, match="with 'image_grid_thw': this model takes image_embeds"):
        load(made[0], {"image": {"image_embeds": vectors, "image_grid_thw": 1}})


def test_chat_parts_in_the_order_of_the_prompt(llava: MediaInputs) -> None:
    messages = [
        {"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://a/1.png"}, "uuid": "one"},
            {"type": "text", "text": "and"},
            {"type": "input_image", "image_url": "http://a/2.png"},
            {"image_url": "http://a/3.png"},
        ]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "image_pil", "image_pil": colour(1)},
                                     {"type": "image_url", "uuid": "one"},
                                     {"type": "file", "file": {"file_data": "data:image/png;base64,AA=="}}]},
    ]  # fmt: skip
    assert has_media(messages) and not has_media(messages[1:2]) and not has_media("text") and not has_media([{}])
    collected = collect(messages, llava.family, is_local=True)
    items = collected.items["image"]
    assert [one.url for one in items[:3]] == ["http://a/1.png", "http://a/2.png", "http://a/3.png"]
    assert items[3].size == (40, 30) and items[4] is None and items[5].url.startswith("data:image/png")
    assert collected.given_uuids() == {"image": ["one", None, None, None, "one", None]}
    placed = {"type": "image", "written": "<image>"}
    assert collected.messages[0]["content"] == [placed, {"type": "text", "text": "and"}, placed, placed]
    assert collected.messages[1] == messages[1]


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image_url", "image_url": {"url": 7}}, "not a string"),
        ({"type": "image_url"}, "without data and without a uuid"),
        ({"type": "image_pil", "image_pil": colour(1)}, "without a URL"),  # of a client over HTTP
        ({"type": "video_url", "video_url": {"url": "http://a"}}, "takes image and no video"),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, "takes image and no audio"),
        ({"type": "input_audio", "input_audio": {"data": "@"}}, "base64"),
        ({"type": "image_embeds", "image_embeds": [1.0]}, "cannot be read"),
        ({"type": "file", "file": {"file_id": "f-1"}}, "file_id"),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64,AA=="}}, "is not an image"),
    ],
)
def test_chat_parts_that_are_refused(llava: MediaInputs, part: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        collect([{"role": "user", "content": [part]}], llava.family, is_local=False)


def test_audio_is_numbered() -> None:
    family = make_family("Qwen2AudioProcessor", ProcessorFiles())
    part = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    (message,) = collect([{"role": "user", "content": [part, part]}], family, is_local=False).messages
    assert [one["written"] for one in message["content"]] == [
        f"Audio {n}: <|audio_bos|><|AUDIO|><|audio_eos|>" for n in (1, 2)
    ]


def test_failures_of_one_item_end_the_request(llava: MediaInputs) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load(llava, {"image": [colour(1), b"junk"]})
    assert load(llava, {"image": colour(3)}).items["image"]


def test_many_items_are_refused_before_all_are_in_memory(made: list[MediaInputs]) -> None:
    made.append(
        MediaInputs(make_family("LlavaProcessor", LLAVA), MediaSources(), MultiModalConfig(mm_processor_cache_gb=0),
                    max_vectors=5 * VECTORS, workers=MediaWorkers(2))
    )  # fmt: skip
    done: list[Any] = []
    process = made[0].family.process

    def counted(*args: Any) -> ProcessedItem:
        done.append(args)
        return process(*args)

    made[0].family.process = counted  # type: ignore[method-assign]
    assert len(load(made[0], {"image": [colour(n) for n in range(5)]}).items["image"]) == 5
    done.clear()
    with pytest.raises(InputError, match=r"at least 2\d tokens; the prompt and its answer may have 20"):
        load(made[0], {"image": [colour(n) for n in range(100)]})
    assert len(done) <= 8


def test_a_full_queue_is_said_so() -> None:
    workers, gate = MediaWorkers(1, queue=1), threading.Event()
    try:
        first = workers.submit_all([gate.wait, gate.wait])
        with pytest.raises(OverloadedError, match="QUIRE_MEDIA_QUEUE"):
            workers.submit_all([gate.wait])
        gate.set()
        assert all(one.result(10) for one in first)
    finally:
        gate.set()
        workers.close()


def test_a_prompt_does_not_choose_the_model_s_geometry(llava: MediaInputs) -> None:
    """One that does could ask for any number of tiles, or samples."""
    for options, why in (
        ({"crop_size": {"height": 1, "width": 1}}, "crop_size belongs to the model"),
        ({"size": {"height": 1 << 25, "width": 8}}, "a size of 33554432; the limit is 16777216"),
        ({"max_pixels": float("inf")}, "a size of inf"),
        ({"rescale_factor": 10**400}, "rescale_factor of the media processor must be a positive number up to"),
    ):
        with pytest.raises(InputError, match=why):
            load(llava, {"image": colour(3)}, None, options)


def test_a_prompt_of_more_items_than_the_queue_takes(made: list[MediaInputs]) -> None:
    workers = MediaWorkers(2, 3)
    try:
        with pytest.raises(InputError, match="6 media items; the limit is 5"):
            workers.submit_all([lambda: 1] * 6)
        assert [one.result() for one in workers.submit_all([lambda: 1] * 5)] == [1] * 5
    finally:
        workers.close()


def test_the_cache_is_bounded_by_bytes() -> None:
    cache = ProcessorCache(10_000)
    item = ProcessedItem({"x": np.zeros(500, np.float32)}, "t", 1)
    for name in "abcdef":
        cache.put(name, item)
        cache.get("a")
    assert cache.num_bytes <= 10_000 and cache.get("a") is item and cache.get("b") is None and cache.get("f") is item
    cache.put("huge", ProcessedItem({"x": np.zeros(10_000)}, "t", 1))
    assert cache.get("huge") is None
    cache.clear()
    assert not len(cache) and not cache.num_bytes


def test_families_of_checkpoints() -> None:
    assert family_name(LLAVA) == "LlavaProcessor"
    pixtral = {"model_type": "llava", "vision_config": {"model_type": "pixtral"}}
    assert family_name(ProcessorFiles(config=pixtral)) == "PixtralProcessor"
    assert family_name(ProcessorFiles(processor={"processor_class": "Gemma3Processor"})) == "Gemma3Processor"
    assert family_name(ProcessorFiles(config={"model_type": "llama"})) is None
    from quire.media.fallback import make_foreign_family

    with pytest.raises(NotBuiltError, match="'unheard_of' are not in this version"):
        make_foreign_family(None, ProcessorFiles(config={"model_type": "unheard_of"}))  # type: ignore[arg-type]
