"""Expressions that files bring along: the same matches as `re`, whatever the expression, and never for ever."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.name_pattern import NamePattern

NAMES = (
    "", "model.layers.0.self_attn.q_proj", "model.layers.17.mlp.experts.3.gate_proj", "lm_head",
    "visual.blocks.1.attn.qkv",
    "a", "aaa", "Model.Layers.0", "x\n", "mtp.fc", "model.layers.1.mlp.gate",
)  # fmt: skip


@pytest.mark.parametrize("source", [
    ".*", "", "lm_head", "^lm_head$", ".*lm_head", r".*\.(?:q|k|v)_proj$", r"model\.layers\.\d+\.self_attn\..*",
    r"model\.layers\.(1[0-9]|0)\..*", r"(?!.*gate).*proj", r"^(?!.*(?:mlp\.gate$|\.mtp|visual)).*$", r".*[^.]\Z",
    r"(\w+\.)*mlp(\.\w+)*$", r".*\.experts\.[0-9]{1,2}\.(gate|up)_proj", r"[A-Z]\w+\.Layers", "(?i)model.layers",
    "(?i:MODEL).layers", r"\S+\b\d\b", r"a{2}", "a{1,2}$", "a{4}", "(a|aa)+$", "(?:(?:a?)*)*b", r".*(?<=q)_proj",
    r".*(?<!q)_proj", "x$", r"x\Z", r"[\w.]*?gate\B_", "[^a-m]", ".*\\d.*\\d.*\\d", "(?x) lm _ head",
])  # fmt: skip
def test_the_same_as_re(source: str) -> None:
    pattern = NamePattern(source)
    for name in NAMES:
        assert pattern.matches(name) == bool(re.match(source, name)), (source, name)


ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", r"\.", "^", "$", r"\b"])
SOURCES = st.recursive(ATOMS, lambda inner: st.one_of(
    st.tuples(inner, inner).map("".join), st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
    st.tuples(inner, st.sampled_from(["*", "+?", "?", "{2}", "{1,3}"])).map(lambda two: f"(?:{two[0]}){two[1]}"),
    inner.map(lambda one: f"(?={one})"), inner.map(lambda one: f"(?!{one})"),
), max_leaves=6)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(SOURCES, st.text("ab.", max_size=7))
def test_any_expression_is_the_same_as_re(source: str, name: str) -> None:
    assert NamePattern(source).matches(name) == bool(re.match(source, name))
    assert NamePattern(source).found_in(name) == bool(re.search(source, name))


@pytest.mark.parametrize(
    "source",
    ["(a+)+b", "(a|a)*b", "(.*a){20}b", ".*a.*a.*a.*a.*a.*a.*a.*ab", "((a*)*)*b", "a?" * 200 + "a" * 200 + "b"],
)
def test_expressions_that_never_end_elsewhere(source: str) -> None:
    try:
        assert not NamePattern(source).matches("a" * 200)
    except ValueError as wrong:
        assert "takes more than 5000 steps" in str(wrong)


@pytest.mark.parametrize(("source", "message"), [
    ("(", "missing"), ("a" * 1025, "1025 characters; the limit is 1024"), (r"(a)\1", "a back reference"),
    ("(a)(?(1)b|c)", "a conditional group"), ("(?>a*)a", "an atomic group"), ("a*+a", "a possessive repeat"),
    ("a{2000}", "2000 times; the limit is 1024"), ("(?s).", "flags"), ("(?m)^a", "flags"), ("(" * 600 + ")" * 400, "."),
])  # fmt: skip
def test_expressions_that_are_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NamePattern(source)
