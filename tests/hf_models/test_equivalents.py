"""Configurations of classes that stand in for those transformers lacks: what is wrong with the files is said."""

from __future__ import annotations

from typing import Any

import pytest

from quire.hf_models.equivalents import equivalent_of
from quire.schema.errors import CheckpointError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vision_config": [1]}, "vision_config must be a mapping, not"),
        ({"text_config": "x"}, "text_config must be a mapping, not"),
        ({"vision_config": {"init_pos_emb_height": 10**9}}, "init_pos_emb_height"),
    ],
)
def test_a_hostile_kimi_vl(given: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        equivalent_of({"architectures": ["KimiVLForConditionalGeneration"], **given})


def test_others_are_their_own() -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "vision_config": [1]}
    assert equivalent_of(raw) == (raw, {})
