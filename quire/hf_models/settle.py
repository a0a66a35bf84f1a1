"""How a transformers model can run under Quire: each method is rehearsed and compared with the model's own logits.

In: a module with its weights. Out: its split into body and head, the first method whose logits agree, and the size
of the vocabulary; or one RefusalError with the reason against each method. Must not know: blocks, files, requests.
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
from quire.hf_models.rehearsal import KeptSource, TrialCache, compare, make_texts, run_steps, special_ids, whole_step
from quire.hf_models.taps import NAME, TRIAL, RefusalError, Taps, set_attention
from quire.layers.batch import Batch

_log = logger(__name__)


class TrialResult(NamedTuple):
    split: BodyAndHead
    runner: Taps | ByRow
    vocab: int


def first_line(wrong: Exception) -> str:
    return f"{type(wrong).__name__}: {(str(wrong).strip() or 'no message').splitlines()[0]}"


def settle(model: Any, name: str) -> TrialResult:
    """The first method whose logits are right: all rows at once if possible, else row by row."""
    first, config = next(model.parameters()), model.config.to_dict()
    texts = make_texts(model.get_input_embeddings().weight.shape[0], special_ids(config), first.device)
    set_attention(model, "eager")
    try:
        expected = [logits_of(model(**inputs_of(model, text, None)))[0] for text in texts]
    except Exception as wrong:  # a foreign model may raise anything, on a configuration that is wrong
        raise RefusalError(
            f"{name} cannot run through transformers' code: it fails on a text of its own with {first_line(wrong)}",
            param="model_impl",
        ) from wrong
    reasons: list[str] = []
    methods: dict[str, Any] = {
        "attention": by_attention,
        "rows": by_rows,
        "rows without positions": partial(by_rows, positioned=False),
    }
    for how, rehearse in methods.items():
        split = split_model(model, texts[0], expected[0], name)
        try:
            runner, actual = rehearse(split, texts)
            compare(expected, actual, first.dtype)
        except RefusalError as wrong:
            reasons.append(f"by {how}: {wrong}")
        except Exception as wrong:  # noqa: BLE001  # a foreign model may raise anything on unexpected input
            reasons.append(f"by {how}: {first_line(wrong)}")
        else:
            manner = "through Quire's attention" if how == "attention" else f"row by row, since {reasons[0]}"
            _log.info("%s runs with transformers' code, %s", name, manner)
            return TrialResult(split, runner, expected[0].shape[-1])
        split.undo()
        set_attention(model, "eager")
    raise RefusalError(
        f"{name} cannot run through transformers' code under Quire. " + "; ".join(reasons), param="model_impl"
    )


def inputs_of(model: nn.Module, ids: Tensor, positions: Tensor | None, cache: Any = None) -> dict[str, Any]:
    """The arguments that the model's forward accepts."""
    arguments = {"input_ids": ids[None], "use_cache": cache is not None}
    if positions is not None:
        arguments["position_ids"] = positions[None]
    if cache is not None:
        arguments["past_key_values"] = cache
    taken = inspect.signature(type(model).forward).parameters
    open_ = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    if cache is not None and "past_key_values" not in taken and not open_:
        raise RefusalError("it takes no cache of keys and values")
    return {key: value for key, value in arguments.items() if open_ or key in taken}


def split_model(model: nn.Module, text: Tensor, expected: Tensor, name: str) -> BodyAndHead:
    """Split into body and head if some module proves to be the body; else the entire model is the body."""
    for body in bodies(model):
        split = BodyAndHead(model, body)
        try:
            actual = split.logits(split.hidden(**inputs_of(model, text, None)))
            compare([expected], [actual], expected.dtype)
            return split
        except Exception as wrong:  # noqa: BLE001  # then this module is not the body
            _log.debug("%s is not the body of %s: %s", type(body).__name__, name, wrong)
            split.undo()
    _log.info("%s: its body could not be determined, so logits are computed for every token of a prompt", name)
    return BodyAndHead(model, None)


def by_attention(split: BodyAndHead, texts: list[Tensor]) -> tuple[Taps, list[Tensor]]:
    model = split.model
    taps = Taps(model)
    taken = inspect.signature(type(model).forward).parameters
    if "position_ids" not in taken and not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        raise RefusalError("its forward takes no position_ids")

    def run(batch: Batch, spans: list[RowSpan], trial_cache: TrialCache) -> Tensor:
        with taps.reading(KeptSource(trial_cache, spans, taps.shapes)):
            return split.logits(split.hidden(**inputs_of(model, batch.token_ids, batch.positions)))

    set_attention(model, TRIAL)
    run(*whole_step(texts[0]), TrialCache())
    if not taps.shapes:
        raise RefusalError("none of its layers uses the table of attention functions")
    set_attention(model, NAME)
    return taps, run_steps(texts, run)


def by_rows(split: BodyAndHead, texts: list[Tensor], *, positioned: bool = True) -> tuple[ByRow, list[Tensor]]:
    """Without positions a model counts them itself, starting from the length of its cache."""

    def call(ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        return split.hidden(**inputs_of(split.model, ids, positions if positioned else None, cache))

    rows = ByRow(call)
    rows.record(texts[0], torch.arange(len(texts[0]), device=texts[0].device))
    return rows, run_steps(texts, lambda batch, spans, trial_cache: split.logits(rows.run(batch, spans, trial_cache)))
