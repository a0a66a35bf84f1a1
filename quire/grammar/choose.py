"""Which backends may compile a constraint, in which order, and why.

The requested one (or, with `auto`, xgrammar) goes first if it supports the constraint; the others follow in a
fixed order, unless disable_fallback is set. Backends that would not enforce the constraint exactly are skipped, with
the reason in the log.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache

from quire.base.distribution import install
from quire.base.log import logger
from quire.config.extras import StructuredOutputsConfig
from quire.grammar.backend import BACKENDS, PACKAGES
from quire.grammar.backends.tag_lark import PARTS
from quire.grammar.schema import Needs, tag_part
from quire.schema.errors import InputError, MissingExtraError
from quire.schema.grammar import GrammarKind, GrammarSpec

log = logger(__name__)
XGRAMMAR, GUIDANCE, OUTLINES, ENFORCER = "xgrammar", "guidance", "outlines", "lm-format-enforcer"
ORDER = (XGRAMMAR, GUIDANCE, OUTLINES, ENFORCER)  # fast and general first
_LOGGED = 256
_logged: dict[tuple[str, str], None] = {}
_PLAIN = frozenset((
    "type", "properties", "required", "additionalProperties", "enum", "const", "items", "minItems", "maxItems",
    "minLength", "maxLength", "anyOf", "a value that is not plain ASCII text",
))  # fmt: skip
# JSON schema keywords that they enforce exactly.
_KNOWN = {
    OUTLINES: _PLAIN | {"pattern", "several types"},
    ENFORCER: _PLAIN - {"minLength", "maxLength", "anyOf", "const", "a value that is not plain ASCII text"},
}
_TAG_PARTS = frozenset(tag_part(name) for name in PARTS)
_TEXT_ONLY = (GrammarKind.JSON, GrammarKind.REGEX, GrammarKind.CHOICE)


def candidates(config: StructuredOutputsConfig) -> list[str]:
    """The installed ones, the preferred one first."""
    preferred = config.backend
    order = [preferred] if preferred != "auto" else [XGRAMMAR]
    if not config.disable_fallback:
        order += [name for name in ORDER if name not in order]
    present = [name for name in order if _is_installed(name)]
    if not present or (preferred != "auto" and preferred not in present):
        missing, extra = PACKAGES[order[0]]
        raise MissingExtraError("structured output", extra, missing)
    return present


def choose(spec: GrammarSpec, needs: Needs, config: StructuredOutputsConfig) -> tuple[str, ...]:
    """The backends to try, in order. `needs`: what the constraint requires."""
    present, fit = candidates(config), []
    for name in present:
        reason = _unfit(name, spec, needs)
        if reason is None:
            fit.append(name)
        elif not fit:
            _tell(name, f"{name} does not do {reason}")
    if not fit:
        reason = _unfit(present[0], spec, needs)
        raise InputError(
            f"the structured output backend {present[0]!r} does not support {reason}{_hint(spec, needs, config)}",
            param="structured_outputs",
        )
    # a constraint that is too complex is not tried with all backends: each may use up the time limit
    first = [name for name in fit if name in ORDER[:2] or name not in ORDER or name == config.backend]
    return tuple(first or fit)


def _unfit(name: str, spec: GrammarSpec, needs: Needs) -> str | None:
    if name == XGRAMMAR:
        if needs.not_xgrammar:
            return needs.not_xgrammar[0]
        if spec.kind is GrammarKind.LARK:
            return "Lark grammars"
        if spec.whitespace is not None:
            return "'whitespace_pattern'"
    elif name == GUIDANCE:
        if spec.kind is GrammarKind.STRUCTURAL_TAG:
            return needs.beyond(_TAG_PARTS)
    elif name in _KNOWN:
        if spec.kind not in _TEXT_ONLY:
            return f"{spec.kind} constraints"
        if spec.kind is GrammarKind.JSON:
            return _unfit_json(name, spec, needs)
        if spec.kind is GrammarKind.REGEX and needs.not_xgrammar:
            return needs.not_xgrammar[0]
    return None


def _unfit_json(name: str, spec: GrammarSpec, needs: Needs) -> str | None:
    if name == ENFORCER and (spec.compact or spec.whitespace is not None):
        return "a choice of white space"
    beyond = needs.beyond(_KNOWN[name])
    return None if beyond is None else beyond if " " in beyond else f"'{beyond}'"


def _hint(spec: GrammarSpec, needs: Needs, config: StructuredOutputsConfig) -> str:
    able = next((name for name in ORDER if _unfit(name, spec, needs) is None), None)
    if able is None:
        return ""
    if _is_installed(able):
        return f"; {able} might, but disable_fallback is set"
    return f"; {able} might: run  {install(PACKAGES[able][1])}"


def _tell(name: str, reason: str) -> None:
    """Once per reason, and at most a fixed number: a client may cause any number of them."""
    known = (name, reason) in _logged
    if not known and len(_logged) < _LOGGED:
        _logged[name, reason] = None
        log.log(logging.INFO, "Structured output goes to another backend: %s", reason)


@lru_cache(maxsize=8)
def _is_installed(name: str) -> bool:
    if name not in PACKAGES:  # from an entry point: it reports missing packages itself
        return name in BACKENDS
    return importlib.util.find_spec(PACKAGES[name][0]) is not None
