"""A block's way for a few rows gives what its usual way gives: the same bits with the references of its ops."""

import pytest
import torch

from quire.layers.batch import Batch, NoAttention
from quire.models.build import build_model
from quire.ops.few import few_rows
from tests.replaced_form import replaced
from tests.tiny_models import tiny_config

TOKENS = 3


@pytest.fixture
def preferred():
    """This device would rather have fused products for up to three rows."""
    with replaced(few_rows, "cpu", lambda width, dtype: TOKENS):
        yield


def built(name, **overrides):
    config = tiny_config(name, **overrides).to_dict() | {"architectures": [name]}
    model = build_model(config, dtype=torch.float32)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.2)
    return model


class Echo(NoAttention):
    """Attends to the token itself: its value."""

    def run(self, q, k, v, cache, **rest):
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def forward(model, tokens):
    ids = torch.arange(tokens) + 5
    with torch.inference_mode():
        return model.forward(Batch(ids, torch.arange(tokens), [Echo()], ids, tokens))


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"]
)
def test_both_ways_agree(name, preferred):
    model = built(name)
    assert all(block.few is not None and block.few.rows == TOKENS for block in model.layers)
    found = forward(model, TOKENS)
    for block in model.layers:
        block.few = None
    wanted = forward(model, TOKENS)
    assert found.abs().sum() > 0
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_more_rows_go_the_usual_way(preferred):
    model = built("LlamaForCausalLM")

    class Never:
        rows, is_open = TOKENS, True

        def __call__(self, *args):
            raise AssertionError("too many rows for this way")

    for block in model.layers:
        block.few = Never()
    forward(model, TOKENS + 1)
    with pytest.raises(AssertionError):
        forward(model, TOKENS)


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Olmo2ForCausalLM", "CohereForCausalLM", "GraniteForCausalLM"])
def test_blocks_of_other_shapes_have_no_such_way(name, preferred):
    assert all(block.few is None for block in built(name).layers)


def test_a_device_that_prefers_nothing_has_no_such_way():
    assert all(block.few is None for block in built("LlamaForCausalLM").layers)
