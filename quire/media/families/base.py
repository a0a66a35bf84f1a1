"""What a family of models does with its media, as the rest of the package sees it.

Must not know: where items come from, tokenizers, positions in a prompt.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from quire.media.pixels import Size
from quire.media.settings import ProcessorFiles, Settings
from quire.schema.errors import InputError
from quire.schema.media import ArrayData

CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
HALF = [0.5, 0.5, 0.5]
BILINEAR, BICUBIC, LANCZOS = 2, 3, 1
BESIDE = "is_beside"  # the array that says so
TOKENS = "token_ids"  # the array of an item's tokens


class ProcessedItem(NamedTuple):
    """One item: what its encoder reads, the text that stands for it, and how many vectors the encoder makes of it."""

    arrays: dict[str, Any]  # numpy's, or ArrayData
    text: str
    num_vectors: int


Numbers = Mapping[str, Sequence[float]]  # of one item, by name


class Beside(NamedTuple):
    """Numbers that come with embeddings given in place of an item."""

    num: int  # of each item
    high: float
    is_whole: bool = True  # and at least 1; else not negative
    is_optional: bool = False
    is_list: bool = False  # each item has any number of such groups

    def check(self, name: str, numbers: Sequence[float]) -> None:
        if len(numbers) % self.num if self.is_list else len(numbers) != self.num:
            groups = "groups of " if self.is_list else ""
            raise InputError(
                f"{name} has {len(numbers)} numbers for an item; expected {groups}{self.num}", param="multi_modal_data"
            )
        for one in numbers:
            if self.is_whole and (not isinstance(one, int) or not 1 <= one <= self.high):
                raise InputError(
                    f"{name} has {one!r:.60}; expected whole numbers from 1 to {self.high}", param="multi_modal_data"
                )
            if not 0 <= one <= self.high:
                raise InputError(
                    f"{name} has {one!r:.60}; expected numbers from 0 to {self.high}", param="multi_modal_data"
                )


_SIZES = Beside(2, high=1 << 15)
BY_SIZE: Mapping[str, Mapping[str, Beside]] = {"image": {"image_sizes": _SIZES}}
BY_SIZES = {**BY_SIZE, "video": {"video_image_sizes": _SIZES._replace(is_list=True)}}


def _size_of(numbers: Numbers) -> Size:
    width, height = map(int, numbers["image_sizes"])
    return height, width


class EmbedsLayout(NamedTuple):
    """What stands for an item whose vectors are given."""

    text: str
    num_vectors: int
    arrays: dict[str, Any]  # that positions follow


def array_data(array: Any) -> ArrayData:
    import numpy as np  # lazy

    little = np.ascontiguousarray(array)
    little = little.astype(little.dtype.newbyteorder("<"), copy=False)
    return ArrayData(shape=tuple(map(int, array.shape)), dtype=str(array.dtype.name), data=little.tobytes())


class Family(abc.ABC):
    """Made once per model. `placeholders`: the token that a prompt has for an item, by modality. `features`: the token
    whose positions get vectors; the same one unless said otherwise. `marks`: further tokens of an item that get some.
    `spares`: tokens that stand in place of a feature which the model's embedding has no row for; the first that it has.
    `regards`: another modality whose presence in the prompt changes the vectors of an item; its arrays then have
    BESIDE."""

    placeholders: Mapping[str, str] = {}
    features: Mapping[str, str] = {}
    marks: Mapping[str, tuple[str, ...]] = {}
    spares: tuple[str, ...] = ()
    num_tokens: int | None = None  # of the model's embedding, where that matters to `spares`
    regards: Mapping[str, str] = {}
    most_items: Mapping[str, int] = {}  # of a modality that a prompt may have; else any number
    mixes_modalities = True  # a prompt may have items of several
    few_items = 0  # in prompts with so many at most, items are processed differently
    tells_tokens = False  # the encoder is told the ids of an item's tokens that get vectors (TOKENS)
    reads_marks = False  # positions of an item's vectors follow the tokens between them
    fixed: Collection[str] = ()  # settings of sizes that the number of vectors does not follow: a prompt keeps them
    prunes_video = False  # vectors of a video may be left out
    video_pruning_rate = 0.0  # as many of them
    items_first = False  # items stand before the text, wherever a prompt names them, and also if it names none
    embeds_by_count: Collection[str] = ()  # modalities whose items are their placeholder, once for each vector
    beside_embeds: Mapping[str, Mapping[str, Beside]] = {}  # by modality and name: what the layout of others follows
    begins_text = False  # a prompt with items begins with the token that begins texts, or else the one that ends them

    def __init__(self, files: ProcessorFiles) -> None:
        self.files = files
        self._own: dict[str, Settings] = {}  # by modality

    @abc.abstractmethod
    def process(self, modality: str, value: Any, options: Mapping[str, Any], count: int) -> ProcessedItem:
        """`value`: an image of PIL, a Video or an Audio. `count`: items of this modality in the prompt."""

    def feature(self, modality: str) -> str:
        return self.features.get(modality, self.placeholders[modality])

    def written(self, modality: str, number: int) -> str:
        """What stands for the item with this number (from 1) in a message whose content is a string."""
        return self.placeholders[modality]

    def numbered(self, modality: str, number: int, text: str) -> str:
        """The text of an item with this number (from 0) among those of its modality."""
        return text

    def embeds_width(self, hidden_size: int) -> int:
        """Of a vector that is given, by that of the language model."""
        return hidden_size

    def count_embeds(self, modality: str, numbers: Numbers, options: Mapping[str, Any]) -> int:
        """Vectors of an item that has these numbers `beside_embeds`."""
        return self.layout_of(_size_of(numbers), options).num_vectors

    def lay_out_embeds(self, modality: str, numbers: Numbers, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """What stands for as many vectors as `count_embeds` says, and the arrays that positions follow."""
        layout = self.layout_of(_size_of(numbers), options)
        return layout.text, layout.arrays

    def layout_of(self, size: Size, options: Mapping[str, Any]) -> EmbedsLayout:
        """Of an image of this size, if that is what stands `beside_embeds` (BY_SIZE)."""
        raise NotImplementedError

    def embeds_text(self, modality: str, num: int) -> str:
        """What stands for so many vectors that were given in place of an item, where there is nothing beside them."""
        if modality in self.embeds_by_count:
            return self.placeholders[modality] * num
        raise InputError(f"this model takes no embeddings of {modality} items", param="multi_modal_data")

    def lay_out(self, text: str) -> str:
        """A prompt as the model expects it, before items are expanded."""
        return text

    def settings(self, modality: str, defaults: Mapping[str, Any], *further: str) -> Settings:
        own = self._own[modality] = Settings.of(defaults, self.files.parts.get(modality, {}), further)
        return own

    def check_request(self, modality: str, options: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
        """Of the options of a prompt, those that are `fixed` may only repeat what the engine's options say, or else
        the files."""
        own = self._own.get(modality, Settings({}))
        for name in (name for name in self.fixed if options.get(name) is not None and own.knows(name)):
            value = own.get(name) if engine.get(name) is None else engine[name]
            if not _is_same(options[name], value):
                raise InputError(
                    f"mm_processor_kwargs: {name} is {options[name]!r:.100}; it belongs to the model and must be "
                    f"{value!r:.100} for {modality} items; only the engine's own option may set it",
                    param="mm_processor_kwargs",
                )

    def processor(self, defaults: Mapping[str, Any]) -> Settings:
        return Settings.of(defaults, self.files.processor)

    def refuse(self, modality: str) -> InputError:
        return InputError(
            f"this model takes {', '.join(self.placeholders)} and no {modality}", param="multi_modal_data"
        )


class FamilyByModality(Family):
    """A family that has settings and a method of its own for items of each modality."""

    @abc.abstractmethod
    def methods(self) -> Mapping[str, Callable[[Any, Settings], ProcessedItem]]: ...

    def process(self, modality: str, value: Any, options: Mapping[str, Any], count: int) -> ProcessedItem:
        if modality not in self.placeholders:
            raise self.refuse(modality)
        return self.methods()[modality](value, self._own[modality].over(options))


def _is_same(value: Any, own: Any) -> bool:
    if isinstance(own, Mapping):
        same_names = isinstance(value, Mapping) and value.keys() == own.keys()
        return same_names and all(_is_same(value[name], one) for name, one in own.items())
    if isinstance(own, (list, tuple)):
        same_length = isinstance(value, (list, tuple)) and len(value) == len(own)
        return same_length and all(map(_is_same, value, own))
    return isinstance(value, (int, float, str)) and value == own
