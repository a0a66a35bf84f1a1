"""MediaInputs: from `multi_modal_data` with its uuids and options to MediaItems and the ids of the expanded prompt.

Two stages: `load` fetches, decodes and processes items in worker threads (a caller may await the futures), `place` puts
them into a prompt. Owns: limits per prompt, keys, the cache. Must not know: engines, HTTP.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quire.media.arrays import shape_of
from quire.media.cache import ProcessorCache
from quire.media.embeds import ARRAY, GivenEmbeds, embeds_item, given_embeds, is_embeds
from quire.media.expand import TextEncoder, begun, expand_ids, expand_text, find_places, order_of, text_of
from quire.media.families import family_name, make_family
from quire.media.families.base import BESIDE, TOKENS, Family, ProcessedItem, array_data
from quire.media.settings import ProcessorFiles
from quire.media.sources import MediaSources
from quire.media.workers import MediaWorkers
from quire.schema.errors import InputError, QuireError
from quire.schema.media import ArrayData, MediaItem

if TYPE_CHECKING:
    from quire.config import ModelConfig, MultiModalConfig
    from quire.media.shared_cache import SharedCache

DEFAULT_LIMIT = 999
MODALITIES = ("image", "video", "audio")
_LONGEST_UUID = 512
_MOST_PIXELS = 1 << 24  # that a prompt may ask an image to be resized to
_OF_THE_MODEL = frozenset((
    "patch_size", "temporal_patch_size", "merge_size", "spatial_merge_size", "merge_kernel_size", "pad_input",
    "crop_size", "max_image_size",
    "image_grid_pinpoints", "feature_size", "n_fft", "hop_length", "win_length", "chunk_length", "sampling_rate",
    "mel_min_frequency", "mel_max_frequency", "preemphasis", "audio_compression_rate", "audio_downsample_rate",
    "audio_feat_stride", "frame_length_ms", "hop_length_ms", "min_frequency", "max_frequency", "mel_floor",
    "fft_overdrive", "preemphasis_htk_flavor", "input_scale_factor", "dither", "per_bin_mean", "per_bin_stddev",
))  # fmt: skip


@dataclass(frozen=True)
class MediaRef:
    """An item that lies somewhere else: a URL, or bytes that came with the request."""

    url: str | None = None
    data: bytes | None = None


class LoadedItem(NamedTuple):
    item: ProcessedItem
    key: str
    sent: Mapping[str, ArrayData] | None = None  # its arrays as they go to an engine; None: not made yet


class LoadedMedia(NamedTuple):
    """What `place` needs, in the order of each modality."""

    items: Mapping[str, Sequence[LoadedItem]]
    order: Sequence[str] = ()  # modalities in the order of the prompt, where that is expanded and does not tell


class Placed(NamedTuple):
    text: str | None  # as expanded
    token_ids: tuple[int, ...]
    items: tuple[MediaItem, ...]
    order: Sequence[str] = ()  # their modalities


class MediaInputs:
    """Of one model. Made for the first request that brings media."""

    def __init__(
        self,
        family: Family,
        sources: MediaSources,
        options: MultiModalConfig,
        *,
        name: str = "",
        has_prefix_cache: bool = True,
        hidden_size: int | None = None,
        modalities: Sequence[str] = MODALITIES,
        max_vectors: int | None = None,
        workers: MediaWorkers | None = None,
    ) -> None:
        self.family, self.sources, self.options, self.name = family, sources, options, name
        self.modalities = tuple(one for one in family.placeholders if one in modalities)
        self.max_vectors = max_vectors  # of all items of a prompt
        self.embeds_width = None if hidden_size is None else family.embeds_width(hidden_size)
        self.cache = _cache(options)
        family.video_pruning_rate = options.video_pruning_rate or 0.0
        self.workers = workers or MediaWorkers()
        self._uses_uuids = has_prefix_cache or self.cache.max_bytes > 0

    @classmethod
    def of(cls, model: ModelConfig, *, has_prefix_cache: bool = True, max_vectors: int | None = None) -> MediaInputs:
        from quire.config import MultiModalConfig  # lazy

        options = model.multimodal_config or MultiModalConfig()
        name, family = family_of(model)
        sources = MediaSources(model.allowed_local_media_path, _domains(model.allowed_media_domains))
        return cls(
            family,
            sources,
            options,
            name=name,
            has_prefix_cache=has_prefix_cache,
            hidden_size=model.facts.hidden_size,
            modalities=model.facts.modalities,
            max_vectors=max_vectors,
        )

    # ---- loading -----------------------------------------------------------------------------------------------

    def load(
        self,
        media: Mapping[str, Any] | None,
        uuids: Mapping[str, Any] | None = None,
        processor_options: Mapping[str, Any] | None = None,
        io_options: Mapping[str, Any] | None = None,
        salt: str | None = None,
    ) -> dict[str, list[Future[LoadedItem]]]:
        """Begin. Limits are checked before anything is read."""
        own_settings = _mapping(processor_options, "mm_processor_kwargs")
        _check_request(own_settings)
        engine_settings = self.options.mm_processor_kwargs or {}
        settings = {**engine_settings, **own_settings}
        listed = self._listed(media, settings)
        self.check_counts(listed)
        named = self._uuids(uuids, listed)
        for modality in listed:
            self.family.check_request(modality, own_settings, engine_settings)
        io = self._io_options(io_options)
        jobs: list[Callable[[], LoadedItem]] = []
        tally = _Tally(self.max_vectors)
        for modality, values in listed.items():
            beside = self.family.regards.get(modality) in listed
            job = _ItemJob(self, modality, len(values), settings, io.get(modality, {}), salt or "", tally, beside)
            for value, uuid in zip(values, named[modality], strict=True):
                jobs.append(partial(job.run, value, uuid))
        futures = iter(self.workers.submit_all(jobs))
        return {modality: [next(futures) for _ in values] for modality, values in listed.items()}

    def loaded(self, futures: Mapping[str, Sequence[Future[LoadedItem]]]) -> LoadedMedia:
        """Wait for them; the first failure is raised, and what has not begun is not begun."""
        try:
            return LoadedMedia({modality: [one.result() for one in several] for modality, several in futures.items()})
        except BaseException:
            for several in futures.values():
                for one in several:
                    one.cancel()
            raise

    def known(self, media: Any) -> LoadedMedia | None:
        """Media that were loaded already."""
        return media if isinstance(media, LoadedMedia) else None

    def check_counts(self, items: Mapping[str, Sequence[Any]]) -> None:
        """Where there may be no other items, embeddings may be as many as fit."""
        for modality, several in items.items():
            limit, count = self.limit(modality), len(several)
            if count > limit and not (limit == 0 and self._are_embeds(modality, several)):
                raise InputError(
                    f"At most {limit} {modality}(s) may be provided in one prompt; got {count} (--limit-mm-per-prompt)",
                    param="multi_modal_data",
                    value=count,
                )
        kinds = [modality for modality, several in items.items() if several]
        if len(kinds) > 1 and not self.family.mixes_modalities:
            raise InputError(
                f"a prompt of this model has items of one modality; this one has {' and '.join(kinds)}",
                param="multi_modal_data",
            )

    def _are_embeds(self, modality: str, several: Sequence[Any]) -> bool:
        """Or named by uuids, as only embeddings are."""
        if not self.options.enable_mm_embeds or modality not in self.modalities:
            return False
        return all(one is None or isinstance(one, GivenEmbeds) or is_embeds(one, self.embeds_width) for one in several)

    def limit(self, modality: str) -> int:
        if self.options.language_model_only or modality not in self.modalities:
            return 0
        value = self.options.limit_per_prompt.get(modality, DEFAULT_LIMIT)
        count = int(value.get("count", DEFAULT_LIMIT)) if isinstance(value, dict) else value
        return min(count, self.family.most_items.get(modality, count))

    def _listed(self, media: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, list[Any]]:
        listed: dict[str, list[Any]] = {}
        for modality, value in _mapping(media, "multi_modal_data").items():
            if modality not in MODALITIES:
                raise InputError(
                    f"multi_modal_data has {modality!r:.60}; modalities are {', '.join(MODALITIES)}",
                    param="multi_modal_data",
                )
            if modality not in self.modalities and not self.options.language_model_only:
                raise InputError(
                    f"this model takes {', '.join(self.modalities)} and no {modality}", param="multi_modal_data"
                )
            several = _items_of(modality, value)
            self.check_counts({modality: several})
            values = [item for one in several for item in self._given(modality, one, settings)]
            if values:
                listed[modality] = values
        return listed

    def _given(self, modality: str, value: Any, settings: Mapping[str, Any]) -> Sequence[Any]:
        """Items that embeddings are of; anything else is one item."""
        if not is_embeds(value, self.embeds_width):
            return [value]
        if not self.options.enable_mm_embeds:
            raise InputError(
                f"{modality} embeddings are accepted only if the engine was started with enable_mm_embeds=True "
                "(--enable-mm-embeds)",
                param="multi_modal_data",
            )
        return given_embeds(value, modality, self.family, self.embeds_width, settings, self.max_vectors)

    def _uuids(self, uuids: Mapping[str, Any] | None, listed: Mapping[str, list[Any]]) -> dict[str, list[str | None]]:
        names = _mapping(uuids, "multi_modal_uuids")
        if not names:
            return {modality: [None] * len(values) for modality, values in listed.items()}
        named: dict[str, list[str | None]] = {}
        for modality, values in listed.items():
            own = names.get(modality)
            own = [own] * len(values) if own is None else [own] if isinstance(own, str) else own
            if not isinstance(own, Sequence) or len(own) != len(values):
                raise InputError(
                    f"multi_modal_uuids must have one entry for each of the {len(values)} {modality} items",
                    param="multi_modal_uuids",
                )
            named[modality] = [_checked_uuid(one) for one in own]
        if further := sorted(set(names) - set(listed)):
            raise InputError(f"multi_modal_uuids names {further[0]!r:.60}, of which there is no item")
        return named if self._uses_uuids else {key: [None] * len(values) for key, values in listed.items()}

    def _io_options(self, requested: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
        io: dict[str, Mapping[str, Any]] = dict(self.options.media_io_kwargs)
        for modality, options in _mapping(requested, "media_io_kwargs").items():
            io[modality] = {**io.get(modality, {}), **_mapping(options, f"media_io_kwargs.{modality}")}
        return io

    # ---- placing -----------------------------------------------------------------------------------------------

    def place(
        self,
        text: str | None,
        token_ids: Sequence[int] | None,
        media: LoadedMedia,
        tokenizer: TextEncoder,
        *,
        add_special_tokens: bool = True,
    ) -> Placed:
        items = {modality: [one.item for one in several] for modality, several in media.items.items()}
        if token_ids is not None and (written := text_of(self.family, token_ids, items, tokenizer)) is not None:
            text, token_ids, add_special_tokens = written, None, False
        prompt = (text or "") if token_ids is None else token_ids
        order = media.order or order_of(self.family, prompt, items, tokenizer)
        if token_ids is None:
            text = expand_text(self.family, text or "", items, tokenizer)
            if items and self.family.begins_text:
                text = begun(text, tokenizer)
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = expand_ids(self.family, token_ids, items, tokenizer)
        places = find_places(self.family, ids, items, tokenizer, order)
        placed = tuple(
            _media_item(
                media.items[place.modality][place.number],
                place.modality,
                place.offset,
                place.length,
                place.takes_vector,
            )
            for place in places
        )
        if self.family.tells_tokens:
            placed = tuple(_with_tokens(item, ids) for item in placed)
        if self.family.reads_marks:
            placed = tuple(_with_marks(item, ids) for item in placed)
        return Placed(text, tuple(ids), placed, order)

    def encoder_item(self, media: LoadedMedia) -> MediaItem:
        """The one item that the encoder of an encoder-decoder model reads."""
        loaded = [(modality, one) for modality, several in media.items.items() for one in several]
        if len(loaded) != 1:
            raise InputError(
                f"the encoder reads one {' or '.join(self.modalities)} item; the prompt has {len(loaded)}",
                param="multi_modal_data",
            )
        ((modality, one),) = loaded
        return _media_item(one, modality, 0, one.item.num_vectors, b"")

    def clear(self) -> None:
        self.cache.clear()

    def close(self) -> None:
        self.workers.close()
        if not isinstance(self.cache, ProcessorCache):
            self.cache.close()


def family_of(model: ModelConfig) -> tuple[str, Family]:
    """Its name, if there is data for it here, and what it does."""
    files = ProcessorFiles.read(model.path, model.hf_config)
    name = family_name(files)
    if name is None:
        from quire.media.fallback import make_foreign_family  # lazy

        return "", make_foreign_family(model, files)
    return name, make_family(name, files)


def _cache(options: MultiModalConfig) -> ProcessorCache | SharedCache:
    most = int(options.mm_processor_cache_gb * (1 << 30))
    if options.mm_processor_cache_type == "lru" or not most:
        return ProcessorCache(most)
    from quire.media.shared_cache import SharedCache, shared_memory  # lazy

    descriptor = shared_memory(most) if options.shared_memory is None else options.shared_memory
    return SharedCache(descriptor, options.mm_shm_cache_max_object_size_mb << 20)


def _media_item(loaded: LoadedItem, modality: str, offset: int, length: int, mask: bytes) -> MediaItem:
    arrays = sent_arrays(loaded.item) if loaded.sent is None else dict(loaded.sent)
    return MediaItem(modality=modality, key=loaded.key, offset=offset, length=length, arrays=arrays, takes_vector=mask)


def _with_marks(item: MediaItem, ids: Sequence[int]) -> MediaItem:
    """Named by the tokens of its range too: of a prompt with others, no prefix that ends within the item is taken."""
    own = ids[item.offset : item.offset + item.length]
    digest = hashlib.blake2b(struct.pack(f"<{len(own)}q", *own), digest_size=16).hexdigest()
    return msgspec.structs.replace(item, key=f"{item.key}-{digest}")


def _with_tokens(item: MediaItem, ids: Sequence[int]) -> MediaItem:
    """With the ids of its tokens, which its vectors depend on: a prompt may have come with others."""
    own = ids[item.offset : item.offset + item.length]
    tokens = list(itertools.compress(own, item.takes_vector)) if item.takes_vector else own
    data = struct.pack(f"<{len(tokens)}q", *tokens)
    key = f"{item.key}-{hashlib.blake2b(data, digest_size=16).hexdigest()}"
    array = ArrayData(shape=(len(tokens),), dtype="int64", data=data)
    return msgspec.structs.replace(item, key=key, arrays={**item.arrays, TOKENS: array})


def sent_arrays(item: ProcessedItem) -> dict[str, ArrayData]:
    return {name: array if isinstance(array, ArrayData) else array_data(array) for name, array in item.arrays.items()}


def _check_request(options: Mapping[str, Any]) -> None:
    """What a prompt may not choose: the geometry that the model was made for, and sizes without a bound."""
    if fixed := sorted(_OF_THE_MODEL & options.keys()):
        raise InputError(
            f"mm_processor_kwargs: {fixed[0]} belongs to the model; only the engine's own option may set it",
            param="mm_processor_kwargs",
        )
    size = options.get("size")
    sizes = size.values() if isinstance(size, Mapping) else [size]
    for value in (options.get("min_pixels"), options.get("max_pixels"), *sizes):
        if isinstance(value, (int, float)) and not value <= _MOST_PIXELS:
            raise InputError(
                f"mm_processor_kwargs: a size of {value!r:.60}; the limit is {_MOST_PIXELS}",
                param="mm_processor_kwargs",
            )


# ---- one item -------------------------------------------------------------------------------------------------------


def _item_of(item: ProcessedItem, key: str) -> LoadedItem:
    """Past this process a key names as many vectors as there are: a uuid may have been given to items of two sizes."""
    return LoadedItem(item, f"{key}-{item.num_vectors}")


class _Tally:
    """Vectors of a prompt so far: many large items are refused before all of them are held in memory."""

    def __init__(self, limit: int | None) -> None:
        self._limit, self._num, self._lock = limit, 0, threading.Lock()

    def add(self, num: int) -> None:
        with self._lock:
            self._num += num
            if self._limit is not None and self._num > self._limit:
                raise InputError(
                    f"the media items of the prompt take at least {self._num} tokens; the prompt and its answer may "
                    f"have {self._limit} (max_model_len)",
                    param="multi_modal_data",
                )


@dataclass(frozen=True)
class _ItemJob:
    """What the items of one modality of a prompt have in common; `run` is called in worker threads."""

    owner: MediaInputs
    modality: str
    count: int
    settings: Mapping[str, Any]
    io: Mapping[str, Any]
    salt: str
    tally: _Tally
    is_beside: bool = False  # items that its family regards

    def run(self, value: Any, uuid: str | None) -> LoadedItem:
        self.tally.add(0)  # no work for a prompt that is refused already
        try:
            item = self._load(value, uuid)
        except QuireError:
            raise
        except (ValueError, ArithmeticError, LookupError, TypeError) as wrong:  # of values that no check foresaw
            raise InputError(
                f"the {self.modality} cannot be processed as asked: {type(wrong).__name__}: {str(wrong)[:200]}",
                param="multi_modal_data",
            ) from wrong
        if item.item.num_vectors < 1:
            raise InputError(f"the {self.modality} is too small: it has no vectors", param="multi_modal_data")
        self.tally.add(item.item.num_vectors)
        return item._replace(sent=sent_arrays(item.item))  # a copy of all pixels

    def _load(self, value: Any, uuid: str | None) -> LoadedItem:
        owner = self.owner
        if value is None:
            return self._recall(uuid)
        if isinstance(value, GivenEmbeds):
            return self._embeds(value, uuid)
        data = None
        if isinstance(value, MediaRef):
            data = value.data if value.data is not None else owner.sources.read(value.url or "", self.modality)
        elif isinstance(value, (bytes, bytearray, memoryview)):
            data = bytes(value)
        decoded = None
        if uuid is not None:
            key = self._key(b"uuid", uuid.encode())
        elif data is not None:
            key = self._key(b"bytes", data)
        else:
            decoded = self._decode(value)
            key = self._key(b"value", *_content(decoded))
        if (known := owner.cache.get(key)) is not None:
            return _item_of(known, key)
        if decoded is None:
            decoded = self._decode(value if data is None else data)
        item = owner.family.process(self.modality, decoded, self.settings, self.count)
        if self.is_beside:
            import numpy as np  # lazy

            item = item._replace(arrays=item.arrays | {BESIDE: np.ones(1, np.uint8)})
        owner.cache.put(key, item)
        return _item_of(item, key)

    def _embeds(self, value: GivenEmbeds, uuid: str | None) -> LoadedItem:
        """Only what has a name is kept: there is nothing to compute again."""
        owner = self.owner
        key = "" if uuid is None else self._key(b"uuid", uuid.encode())
        if uuid is not None and (known := owner.cache.get(key)) is not None:
            return _item_of(known, key)
        item = embeds_item(value, self.modality, owner.family, self.settings)
        if uuid is not None:
            owner.cache.put(key, item)
            return _item_of(item, key)
        array, beside = item.arrays[ARRAY], msgspec.json.encode(value.numbers, order="sorted")
        return LoadedItem(item, self._key(b"embeds", array.dtype.encode(), array.data, beside))

    def _recall(self, uuid: str | None) -> LoadedItem:
        if uuid is None:
            raise InputError(
                f"an {self.modality} item has no data and no uuid; without data, a uuid must name an item sent before",
                param="multi_modal_data",
            )
        key = self._key(b"uuid", uuid.encode())
        known = self.owner.cache.get(key)
        if known is None:
            raise InputError(
                f"{self.modality} item with uuid {uuid!r:.100} has no data and is not in the cache: send it again",
                param="multi_modal_uuids",
            )
        return _item_of(known, key)

    def _decode(self, value: Any) -> Any:
        if self.modality == "image":
            from quire.media.images import read_image  # lazy

            return read_image(value, self.io)
        if self.modality == "video":
            from quire.media.video import read_video  # lazy

            return read_video(value, self.io)
        from quire.media.audio import read_audio  # lazy

        return read_audio(value)

    def _key(self, kind: bytes, *content: bytes) -> str:
        """Equal keys mean equal vectors: content, model and every option count; so does the salt of a tenant."""
        digest = hashlib.blake2b(digest_size=32)
        few = self.count <= self.owner.family.few_items
        facts = [self.owner.name, self.modality, self.salt, dict(self.settings), dict(self.io), few, self.is_beside]
        for part in (msgspec.json.encode(facts, enc_hook=str, order="sorted"), kind, *content):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()


def _content(decoded: Any) -> list[bytes]:
    """What a decoded item consists of."""
    from quire.media.audio import Audio  # lazy
    from quire.media.video import Video  # lazy

    if isinstance(decoded, Audio):
        return [str(decoded.rate).encode(), decoded.samples.tobytes()]
    images = decoded.frames if isinstance(decoded, Video) else [decoded]
    parts = [repr((decoded.indices, decoded.fps, decoded.total)).encode()] if isinstance(decoded, Video) else []
    for image in images:
        parts += [repr(image.size).encode(), image.tobytes()]
    return parts


def _items_of(modality: str, value: Any) -> list[Any]:
    """One item or a list of them."""
    if value is None:
        return [None]
    if modality == "audio":
        is_item = isinstance(value, tuple) or bool(shape_of(value)) or (isinstance(value, list) and _is_numbers(value))
        return [value] if is_item or not isinstance(value, list) else list(value)
    if isinstance(value, list) and not _is_frames(modality, value):
        return list(value)
    if isinstance(value, tuple) and modality == "image":
        return list(value)
    if modality == "image" and len(shape_of(value)) == 4:
        return list(value)
    if modality == "video" and len(shape_of(value)) == 5:
        return list(value)
    return [value]


def _is_numbers(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], (int, float))


def _is_frames(modality: str, value: list[Any]) -> bool:
    """A list of single frames is one video."""
    if modality != "video" or not value:
        return False
    first = value[0]
    return hasattr(first, "getbands") or len(shape_of(first)) == 3


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{name} must be a mapping with string keys, got {type(value).__name__}", param=name)
    return value


def _checked_uuid(uuid: Any) -> str | None:
    if uuid is None:
        return None
    if not isinstance(uuid, str) or not uuid or len(uuid) > _LONGEST_UUID:
        raise InputError(
            f"a uuid of a media item is a string of 1 to {_LONGEST_UUID} characters, got {uuid!r:.60}",
            param="multi_modal_uuids",
        )
    try:
        uuid.encode()
    except UnicodeEncodeError:
        raise InputError("a uuid of a media item has characters that cannot be encoded") from None
    return uuid


def _domains(domains: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if domains is None else tuple(domain.lower() for domain in domains)
