"""The weight table: checkpoint name -> where its numbers go. Built by walking the modules of a model.

Loading, live updates, LoRA and quantization ignore-lists all read this one table; no model has loading code.

    checkpoint name ──names──▶ canonical name ──slots──▶ target tensor (a parameter, or some rows of one)
    "transformer.h.0.attn.c_attn.weight" ▶ "model.layers.0.self_attn.qkv_proj.weight" ▶ rows of q, k and v

`names` are (pattern, replacement) regular expressions applied in order; several spellings may lead to one canonical
name. `arrange` undoes layouts a checkpoint may use (transposed, interleaved); then a slot's `cut` leaves what this rank
keeps. A name whose slot has no target lies elsewhere, as does one of another stage of a pipeline (`elsewhere`): it is
neither missing nor unexpected. Must not know: files, or architectures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.quant.coded import CodedMatrix
from quire.quant.scheme import Send, Slot, WeightTarget, by_rows
from quire.schema.errors import CheckpointError

JUNK = (r"rotary_emb\.inv_freq$", r"\.rotary_emb\.(cos|sin)_cached$", r"\.att(?:n|ention)\.(masked_)?bias$")
Arrange = Callable[[str, Tensor], Tensor]


@runtime_checkable
class Filled(Protocol):
    """A module that a checkpoint fills."""

    def slots(self) -> Iterable[Slot]: ...


class WeightTable:
    def __init__(
        self,
        slots: Iterable[Slot],
        *,
        names: Sequence[tuple[str, str]] = (),
        ignore: Sequence[str] = (),
        arrange: Arrange = lambda name, tensor: tensor,
        elsewhere: Callable[[str], bool] | None = None,  # whether a canonical name belongs to another stage; None: none
        unread: Sequence[str] = (),  # patterns of weights that are ignored because no computation reads them
    ) -> None:
        self._slots = {slot.name: slot for slot in slots}
        self._names = [(re.compile(pattern), new) for pattern, new in names]
        self._ignore = re.compile("|".join((*JUNK, *ignore, *unread)))
        self._unread = re.compile("|".join(unread)) if unread else None
        self._arrange, self._elsewhere = arrange, elsewhere
        self._missing = dict.fromkeys(
            name for name, slot in self._slots.items() if not slot.fills and slot.target is not None
        )

    @classmethod
    def of(cls, model: nn.Module, **options: object) -> WeightTable:
        """All slots of all modules of a model. Options as for the constructor."""
        return cls(slots_of(model), **options)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    def extend(self, slots: Iterable[Slot], *, ignore: Sequence[str] = ()) -> None:
        """Further places, of modules beside the model's; `ignore` as for the constructor."""
        for slot in slots:
            self._slots[slot.name] = slot
            if not slot.fills and slot.target is not None:
                self._missing[slot.name] = None
        self._ignore = re.compile("|".join((self._ignore.pattern, *ignore)))

    def canonical(self, name: str) -> str:
        """A checkpoint's spelling -> ours (the spelling of Llama-like checkpoints)."""
        for pattern, new in self._names:
            name = pattern.sub(new, name)
        return name

    @property
    def is_part(self) -> bool:
        """Of a model whose other layers are on other stages."""
        return self._elsewhere is not None

    def lies_elsewhere(self, name: str) -> bool:
        """On another stage: need not even be read. Any spelling; what follows a module's name does not matter."""
        return self._elsewhere is not None and self._elsewhere(self.canonical(name))

    def is_unread(self, name: str) -> bool:
        """A weight of the model that changes nothing, whatever it is."""
        return self._unread is not None and self._unread.search(self.canonical(name)) is not None

    def ignores(self, name: str) -> bool:
        """Known to be in checkpoints and of no use: need not even be read."""
        return self._ignore.search(self.canonical(name)) is not None or self._ignore.search(name) is not None

    def load_all(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """(checkpoint name, tensor) pairs, all or some of a model's; the names that were taken."""
        taken = set()
        for name, tensor in weights:
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"tensor {name!r} is of type {type(tensor).__name__}; it must be a torch.Tensor", param=name
                )
            if not self.load(name, tensor):
                raise CheckpointError(f"the model has no place for tensor {name!r}", param=name)
            taken.add(name)
        return taken

    def load(self, name: str, source: Tensor | CodedMatrix, send: Send | None = None) -> bool:
        """Put one checkpoint tensor in its place, if this rank has that. False: no rank has it (an unexpected name).
        `send` brings what this rank keeps of it to the device; None: all of it is there. What no rank cuts is arranged
        on the device."""
        canonical = self.canonical(name)
        slot = self._slots.get(canonical)
        if slot is None:
            return self.lies_elsewhere(name) or self.ignores(name)
        if slot.target is not None:
            if send is not None and slot.cut is None and isinstance(source, Tensor) and self._moves(canonical, source):
                arrives = send(source)
                assert isinstance(arrives, Tensor)
                source, send = arrives, None
            self._fill(name, slot, slot.target, self._arranged(canonical, source, slot.target), send)
        for filled in slot.fills or (canonical,):
            self._missing.pop(filled, None)
        return True

    def _fill(
        self,
        name: str,
        slot: Slot,
        target: Tensor | WeightTarget,
        source: Tensor | CodedMatrix,
        send: Send | None,
    ) -> None:
        shape = tuple(target.shape) if isinstance(target, Tensor) else target.expected(source.shape)
        expected = shape if slot.cut is None else slot.cut.uncut(shape)
        if source.shape != expected:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(source.shape)} in the checkpoint, but the model's config asks for "
                f"{list(expected)}",
                param=name,
                value=list(source.shape),
            )
        if slot.cut is not None:
            share = source.cut(slot.cut) if isinstance(source, CodedMatrix) else None
            source = share or slot.cut.of(source.numbers() if isinstance(source, CodedMatrix) else source)
        if isinstance(target, Tensor):
            assert isinstance(source, Tensor)  # _arranged decoded it
            _write(target, source, send)
        elif send is None:
            target.copy_(source)
        else:
            target.copy_sent(source, send)

    def _arranged(
        self, canonical: str, source: Tensor | CodedMatrix, target: Tensor | WeightTarget
    ) -> Tensor | CodedMatrix:
        """Blocks stay as they are where the place takes them and the layout asks for no change."""
        if isinstance(source, CodedMatrix):
            takes_codes = isinstance(target, WeightTarget) and target.takes_codes
            if takes_codes and not self._moves(canonical, source):
                return source
            source = source.numbers()
        return self._arrange(canonical, source)

    def _moves(self, canonical: str, source: Tensor | CodedMatrix) -> bool:
        """Whether the checkpoint's layout of this weight is another than ours."""
        probe = torch.empty(source.shape, device="meta")
        return self._arrange(canonical, probe) is not probe

    def arranged(self, canonical: str, tensor: Tensor) -> Tensor:
        """A tensor that lies as the checkpoint's weight of this name does, in the layout of the parameter."""
        return self._arrange(canonical, tensor)

    def missing(self) -> list[str]:
        """Canonical names of places nothing was loaded into yet."""
        return list(self._missing)


def _write(target: Tensor, source: Tensor, send: Send | None) -> None:
    """Some rows at a time if they have to be sent, so that nothing lies on the device twice."""
    if send is None:
        target.copy_(source)
        return
    for start, rows in by_rows(source):
        sent = send(rows)
        assert isinstance(sent, Tensor)
        (target if rows is source else target[start : start + len(rows)]).copy_(sent)


def slots_of(model: nn.Module) -> Iterator[Slot]:
    for module in model.modules():
        if isinstance(module, Filled):
            yield from module.slots()
