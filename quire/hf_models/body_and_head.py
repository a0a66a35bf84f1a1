"""A transformers model split into body and head, so logits are only computed for sampled tokens.

The body is a module inside the model. For hidden states the model is called and stopped when the body returns;
for logits it is called again with a body that returns the given hidden states at once. So whatever a class
does around its body (scales, caps, biases, several heads) is unchanged. Without a body, the "hidden states" are
the logits of every token. Must not know: attention, caches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput


class _DoneError(Exception):
    """Carries the body's hidden states out of the model."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class BodyAndHead:
    def __init__(self, model: nn.Module, body: nn.Module | None) -> None:
        self.model, self.body = model, body
        self._hidden: Tensor | None = None
        self._stops = False
        self._form: Any = None  # the body's return type: the class of an output, or the length of a tuple
        if body is not None:
            self._run_body = body.forward
            body.forward = self._answer

    def undo(self) -> None:
        if self.body is not None:
            del self.body.__dict__["forward"]

    def hidden(self, **inputs: Any) -> Tensor:
        """[T, width of the head]; the model's inputs are of one row [1, T]."""
        if self.body is None:
            return logits_of(self.model(**inputs))[0]
        self._stops = True
        try:
            out = self.model(**inputs)
        except _DoneError as done:
            return done.hidden[0]
        finally:
            self._stops = False
        raise RuntimeError(f"{type(self.model).__name__} never called its {type(self.body).__name__}: {type(out)}")

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, width] -> [S, vocab]."""
        if self.body is None:
            return hidden
        self._hidden = hidden[None]
        try:
            ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
            return logits_of(self.model(input_ids=ids, use_cache=False))[0]
        finally:
            self._hidden = None

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the body's forward."""
        if self._hidden is not None:
            return self._like_before(self._hidden)
        out = self._run_body(*args, **kwargs)
        if not self._stops:
            return out
        self._form = type(out) if isinstance(out, ModelOutput) else len(out) if isinstance(out, tuple) else None
        raise _DoneError(out if isinstance(out, Tensor) else out[0])

    def _like_before(self, hidden: Tensor) -> Any:
        if isinstance(self._form, type):
            form: Any = self._form
            return form(**{next(iter(form.__dataclass_fields__)): hidden})
        return hidden if self._form is None else (hidden, *(None,) * (self._form - 1))


def logits_of(out: Any) -> Tensor:
    logits: Tensor = out["logits"] if isinstance(out, ModelOutput) else out[0] if isinstance(out, tuple) else out
    return logits


def bodies(model: nn.Module) -> list[nn.Module]:
    """Modules that may be the body, the most likely first."""
    prefix = model.base_model_prefix if hasattr(model, "base_model_prefix") else "model"
    candidates = [child for name, child in model.named_children() if name in (prefix, "model", "transformer")]
    for module in list(candidates):
        candidates += [child for name, child in module.named_children() if name in ("decoder", "language_model")]
    return candidates
