"""How a transformers model can run under Quire: each way is rehearsed and compared with the model's own logits.

In: a module with its weights. Out: where it is split into body and head, the first way whose logits agree, and the size
of the vocabulary; or one RefusalError that gives the reason against each way. Must not know: blocks, files, requests.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.base.log import logger
from quire.hf_models.body_and_head import BodyAndHead, bodies, logits_of
from quire.hf_models.by_row import ByRow, RowSpan
from quire.hf_models.rehearsal import Kept, KeptSource, compare, make_texts, run_steps, special_ids, whole_step
from quire.hf_models.taps import NAME, TRIAL, RefusalError, Taps, set_attention
from quire.layers.batch import Batch

_log = logger(__name__)


class TrialResult(NamedTuple):
    split: BodyAndHead
    way: Taps | ByRow
    vocab: int


def settle(model: Any, name: str) -> TrialResult:
    """The first way whose logits are right: all rows at once if possible, else row by row."""
    first, config = next(model.parameters()), model.config.to_dict()
    texts = make_texts(model.get_input_embeddings().weight.shape[0], special_ids(config), first.device)
    set_attention(model, "eager")
    wanted = [logits_of(model(**inputs_of(model, text, None)))[0] for text in texts]
    reasons: list[str] = []
    ways: dict[str, Any] = {
        "attention": by_attention,
        "rows": by_rows,
        "rows without positions": partial(by_rows, positioned=False),
    }
    for how, rehearse in ways.items():
        split = split_model(model, texts[0], wanted[0], name)
        try:
            way, found = rehearse(split, texts)
            compare(wanted, found, first.dtype)
        except RefusalError as wrong:
            reasons.append(f"by {how}: {wrong}")
        except Exception as wrong:  # noqa: BLE001  # a foreign model may raise anything when it is given what it does not expect
            reasons.append(f"by {how}: {type(wrong).__name__}: {(str(wrong).strip() or 'no message').splitlines()[0]}")
        else:
            manner = "through Quire's attention" if how == "attention" else f"row by row, since {reasons[0]}"
            _log.info("%s runs with transformers' own code, %s", name, manner)
            return TrialResult(split, way, wanted[0].shape[-1])
        split.undo()
        set_attention(model, "eager")
    raise RefusalError(
        f"{name} cannot run through transformers' code under Quire. " + "; ".join(reasons), param="model_impl"
    )


def inputs_of(model: nn.Module, ids: Tensor, positions: Tensor | None, cache: Any = None) -> dict[str, Any]:
    """The arguments that the model's forward accepts."""
    given = {"input_ids": ids[None], "use_cache": cache is not None}
    if positions is not None:
        given["position_ids"] = positions[None]
    if cache is not None:
        given["past_key_values"] = cache
    taken = inspect.signature(type(model).forward).parameters
    open_ = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    if cache is not None and "past_key_values" not in taken and not open_:
        raise RefusalError("it takes no cache of keys and values")
    return {key: value for key, value in given.items() if open_ or key in taken}


def split_model(model: nn.Module, text: Tensor, wanted: Tensor, name: str) -> BodyAndHead:
    """Split into body and head, where some module proves to be the body; else the whole model is one."""
    for body in bodies(model):
        split = BodyAndHead(model, body)
        try:
            found = split.logits(split.hidden(**inputs_of(model, text, None)))
            compare([wanted], [found], wanted.dtype)
            return split
        except Exception as wrong:  # noqa: BLE001  # then this module is not the body
            _log.debug("%s is not the body of %s: %s", type(body).__name__, name, wrong)
            split.undo()
    _log.info("%s: no module is its body, so logits are computed for every token of a prompt", name)
    return BodyAndHead(model, None)


def by_attention(split: BodyAndHead, texts: list[Tensor]) -> tuple[Taps, list[Tensor]]:
    model = split.model
    taps = Taps(model)
    taken = inspect.signature(type(model).forward).parameters
    if "position_ids" not in taken and not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        raise RefusalError("its forward takes no position_ids")

    def run(batch: Batch, spans: list[RowSpan], kept: Kept) -> Tensor:
        with taps.reading(KeptSource(kept, spans, taps.shapes)):
            return split.logits(split.hidden(**inputs_of(model, batch.token_ids, batch.positions)))

    set_attention(model, TRIAL)
    run(*whole_step(texts[0]), Kept())
    if not taps.shapes:
        raise RefusalError("none of its layers asks the table of attention functions")
    set_attention(model, NAME)
    return taps, run_steps(texts, run)


def by_rows(split: BodyAndHead, texts: list[Tensor], *, positioned: bool = True) -> tuple[ByRow, list[Tensor]]:
    """Without positions a model counts them itself, from where it likes and on from the length of its cache."""

    def call(ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        return split.hidden(**inputs_of(split.model, ids, positions if positioned else None, cache))

    rows = ByRow(call)
    rows.record(texts[0], torch.arange(len(texts[0]), device=texts[0].device))
    return rows, run_steps(texts, lambda batch, spans, kept: split.logits(rows.run(batch, spans, kept)))
