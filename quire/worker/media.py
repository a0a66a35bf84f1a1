"""WorkerMedia: items of a step through the model's encoder, and what comes out kept until a plan frees it.

In: what a plan encodes and frees, and the rows that join with media. Out: vectors by key, which the rows of a step find
through their extras (row_extras.py), and channels of positions for models that have several. Of an encoder-decoder
model they are what the cross-attention of a row's first step reads, and stand at no positions. An item that cannot be
encoded is the fault of its request alone: that request is named with the reason, as is every other that needs the item.
Must not know: budgets, who shares an item, how an encoder is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from quire.base.log import logger
from quire.checkpoint.media import ITEM, ITEMS, PROMPT
from quire.layers.vector_places import places_of_vectors, runs_of_vectors
from quire.schema.media import ArrayData, MediaItem
from quire.schema.step import Grant, NewRow, StepPlan
from quire.worker.own_fault import is_of_this_rank
from quire.worker.rows import Rows

_log = logger(__name__)
EMBEDS = "embeds"  # the modality of prompt embeddings, and the name of their array
_DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64,
    "int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip


class MediaEncoder(Protocol):
    """A model's towers: what is in an item -> one vector for each of its positions that takes one."""

    num_channels: int  # of positions; 0: one
    both_ways: str  # what attends to itself in both directions: "", "item", "items", "prompt" (checkpoint/media.py)

    def encode(self, modality: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """[n, width of the embedding], on the device of the model."""
        ...

    def channels(self, prompt: Sequence[int], media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        """Channels [C, length] of the positions of a prompt of these ids, and what later positions are moved by."""
        ...

    def reload(self, other: Any) -> None:
        """Take the weights of another one of its kind, in place."""
        ...


@runtime_checkable
class EncodesItems(Protocol):
    """A model with an encoder of its own."""

    width: int  # of a vector

    def encode_item(self, modality: str, arrays: Mapping[str, Tensor]) -> Tensor: ...

    def encode_nothing(self, num_tokens: int) -> None:
        """Compute what an input of so many tokens takes, or of as many as there may be."""
        ...


class OwnEncoder:
    """The encoder of an encoder-decoder model, which is loaded with the model. Where it reads a text with media in it,
    `tower` makes vectors of these first."""

    num_channels = 0
    both_ways = ""

    def __init__(self, model: EncodesItems, tower: MediaEncoder | None = None) -> None:
        self._model, self._tower = model, tower

    def encode(self, modality: str, arrays: Mapping[str, Tensor]) -> Tensor:
        if self._tower is None or modality == "text":
            return self._model.encode_item(modality, arrays)
        vectors = self._tower.encode(modality, arrays)
        return self._model.encode_item("text", {"token_ids": arrays["token_ids"], "vectors": vectors})

    def channels(self, prompt: Sequence[int], media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
        raise NotImplementedError("positions of an encoder-decoder have one channel")

    def reload(self, other: Any) -> None:
        """Done with the model's."""


class WorkerMedia:
    def __init__(
        self, encoder: MediaEncoder | None, rows: Rows, width: int, dtype: torch.dtype, *, embeds: bool = True,
        answers: bool = True,
    ) -> None:  # fmt: skip
        """`encoder` None: the only items are embeddings. `embeds` False: vectors are another stage's business.
        `answers` False: what is lost here is told by another rank, which learns of it from numbers that are none."""
        self._encoder, self._rows, self._width, self._dtype = encoder, rows, width, dtype
        self._embeds, self._answers = embeds, answers
        self._encodes_in_step = rows.has_cross and not answers  # with sums over ranks: a model's own encoder has them
        self._both_ways = "" if encoder is None else encoder.both_ways
        self.failed: dict[str, str] = {}  # key -> why there are no vectors

    def follow(self, plan: StepPlan) -> dict[str, str]:
        """Once the rows have taken the plan in, before its forward pass; requests that are lost, and why."""
        lost: dict[str, str] = {}
        encoded = self._rows.encoded
        for key in plan.free_encoded:
            encoded.pop(key, None)
            self.failed.pop(key, None)
        for new in plan.encode if self._embeds else ():
            try:
                encoded[new.item.key] = self._encode(new.item)
            except Exception as wrong:  # of code that is not ours, on what a request sent
                if self._encodes_in_step and is_of_this_rank(wrong):
                    raise  # the others are in sums that this one does not come to
                reason = f"its {new.item.modality} could not be encoded: {wrong or type(wrong).__name__}"
                _log.warning("request %s: %s", new.request_id, reason, exc_info=True)
                if not self._answers or self._rows.has_cross:
                    encoded[new.item.key] = self._no_numbers(new.item)
                if not self._answers:
                    continue
                self.failed[new.item.key] = lost[new.request_id] = reason
        for row in () if self._rows.has_cross else plan.joined:
            if row.media or self._both_ways == PROMPT:
                try:
                    self._place(row)
                except Exception as wrong:  # noqa: BLE001  # of grids that a request sent
                    lost[row.request_id] = f"its media cannot be placed: {wrong or type(wrong).__name__}"
                    _log.warning("request %s: %s", row.request_id, lost[row.request_id], exc_info=True)
        if self.failed and self._rows.has_cross:
            lost |= {row.request_id: self.failed[item.key] for row in plan.joined for item in row.media
                     if item.key in self.failed}  # fmt: skip
        elif self.failed:
            lost |= self._lost_by(plan.grants)
        return lost

    def _place(self, row: NewRow) -> None:
        extras = self._rows.make_extras()
        for item in row.media if self._embeds else ():
            extras.place(row.request_id, places_of_vectors(item), item.key)
        if self._encoder is not None and self._encoder.num_channels:
            known, shift = self._encoder.channels(row.token_ids[: row.num_prompt_tokens], row.media)
            extras.set_channels(row.request_id, known, shift)
        if self._both_ways == PROMPT:
            extras.set_both_ways(row.request_id, ((0, row.num_prompt_tokens),), past_window=True)
        elif self._both_ways in (ITEM, ITEMS):
            seen = [item for item in row.media if item.modality != EMBEDS]
            runs = [run for item in seen for run in runs_of_vectors(item)]
            extras.set_both_ways(row.request_id, runs, are_joined=self._both_ways == ITEMS)

    @torch.inference_mode()
    def _encode(self, item: MediaItem) -> Tensor:
        device = self._rows.tokens.device
        arrays = {name: tensor_of(array, device) for name, array in item.arrays.items()}
        if EMBEDS in arrays:
            vectors = arrays[EMBEDS]
            vectors = torch.nn.functional.pad(vectors, (0, self._width - vectors.shape[-1]))  # for later layers: none
        elif self._encoder is None:
            raise ValueError("this model has no encoder for media")
        else:
            with exact_convolutions(self._dtype):
                vectors = self._encoder.encode(item.modality, arrays)
        count = len(places_of_vectors(item))
        if tuple(vectors.shape) != (count, self._width):
            raise ValueError(
                f"its encoder gave vectors of shape {list(vectors.shape)}, and the prompt has places for {count} of "
                f"{self._width} numbers"
            )
        return vectors.to(self._dtype)

    def _no_numbers(self, item: MediaItem) -> Tensor:
        shape = len(places_of_vectors(item)), self._width
        return torch.full(shape, math.nan, dtype=self._dtype, device=self._rows.tokens.device)

    def _lost_by(self, grants: Sequence[Grant]) -> dict[str, str]:
        """Of these requests, those that need vectors which there are not."""
        extras, lost = self._rows.extras, {}
        if extras is not None:
            for grant in grants:
                reasons = (self.failed[key] for key in extras.keys_of(grant.request_id) if key in self.failed)
                if reason := next(reasons, None):
                    lost[grant.request_id] = reason
                    extras.forget_vectors(grant.request_id)
        return lost


def exact_convolutions(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Of a GPU, those in float32 would be rounded to 10 bits."""
    cudnn = torch.backends.cudnn
    if dtype is not torch.float32 or not torch.cuda.is_available():
        return nullcontext()
    flags: AbstractContextManager[None] = cudnn.flags(
        enabled=cudnn.enabled, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False
    )
    return flags


def tensor_of(array: ArrayData, device: torch.device) -> Tensor:
    """ValueError where shape, dtype and bytes do not agree."""
    dtype = _DTYPES.get(array.dtype)
    if dtype is None or any(size < 0 for size in array.shape):
        raise ValueError(f"an array of dtype {array.dtype!r} and shape {list(array.shape)} cannot be read")
    if math.prod(array.shape) * dtype.itemsize != len(array.data):
        raise ValueError(f"an array of shape {list(array.shape)} and dtype {array.dtype} has {len(array.data)} bytes")
    if not array.data:
        return torch.empty(array.shape, dtype=dtype, device=device)
    if device.type == "cpu":
        return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(array.shape)
    host = torch.empty(array.shape, dtype=dtype, pin_memory=True)
    host.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(array.data, np.uint8)
    return host.to(device, non_blocking=True)
