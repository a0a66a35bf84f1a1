"""Which backends may compile a constraint, in which order, and why.

The one asked for (or, with `auto`, xgrammar) goes first if it does what the constraint needs; the other follows, unless
disable_fallback. Whoever would not hold the constraint to the letter is left out, with the reason in the log.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from functools import lru_cache

from quire.base.log import logger
from quire.config.extras import StructuredOutputsConfig
from quire.grammar.backend import BACKENDS, PACKAGES
from quire.schema.errors import InputError, MissingExtraError
from quire.schema.grammar import GrammarKind, GrammarSpec

log = logger(__name__)
XGRAMMAR, GUIDANCE = "xgrammar", "guidance"
_LOGGED = 256
_told: dict[tuple[str, str], None] = {}


def candidates(config: StructuredOutputsConfig) -> list[str]:
    """Those installed, the preferred one first."""
    asked = config.backend
    order = [asked] if asked not in ("auto",) else [XGRAMMAR]
    if not config.disable_fallback:
        order += [name for name in (XGRAMMAR, GUIDANCE) if name not in order]
    present = [name for name in order if _is_installed(name)]
    if not present or (asked != "auto" and asked not in present):
        missing, extra = PACKAGES[order[0]]
        raise MissingExtraError("structured output", extra, missing)
    return present


def choose(spec: GrammarSpec, not_xgrammar: Sequence[str], config: StructuredOutputsConfig) -> tuple[str, ...]:
    """The backends to try, in order. `not_xgrammar`: what the reading of the constraint found."""
    present, fit = candidates(config), []
    for name in present:
        reason = _unfit(name, spec, not_xgrammar)
        if reason is None:
            fit.append(name)
        else:
            _tell(name, f"{name} does not do {reason}")
    if not fit:
        reason = _unfit(present[0], spec, not_xgrammar)
        hint = "" if len(present) > 1 else _hint(present[0], config)
        raise InputError(
            f"the structured output backend {present[0]!r} does not support {reason}{hint}", param="structured_outputs"
        )
    return tuple(fit)


def _unfit(name: str, spec: GrammarSpec, not_xgrammar: Sequence[str]) -> str | None:
    if name == XGRAMMAR:
        if not_xgrammar:
            return not_xgrammar[0]
        if spec.kind is GrammarKind.LARK:
            return "Lark grammars"
        if spec.whitespace is not None:
            return "'whitespace_pattern'"
    elif name == GUIDANCE and spec.kind is GrammarKind.STRUCTURAL_TAG and '"structures"' not in spec.text:
        return "structural tags of this form"
    return None


def _hint(name: str, config: StructuredOutputsConfig) -> str:
    if config.disable_fallback:
        return f"; {GUIDANCE if name == XGRAMMAR else XGRAMMAR} might, but disable_fallback is set"
    other = GUIDANCE if name == XGRAMMAR else XGRAMMAR
    return f'; {other} might: run  pip install "quire[{PACKAGES[other][1]}]"'


def _tell(name: str, reason: str) -> None:
    """Once per reason, and not without end: a client may make up any number of them."""
    known = (name, reason) in _told
    if not known and len(_told) < _LOGGED:
        _told[name, reason] = None
        log.log(logging.INFO, "Structured output goes to another backend: %s", reason)


@lru_cache(maxsize=8)
def _is_installed(name: str) -> bool:
    if name not in PACKAGES:  # from an entry point: it says itself what it lacks
        return name in BACKENDS
    return importlib.util.find_spec(PACKAGES[name][0]) is not None
