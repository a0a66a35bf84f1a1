"""Molmo 2's decoder: its configuration as released, its table of tokens in one tensor or two, tokens without logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.models.build import read_arch
from quire.quant.scheme import PieceTarget, TwoPieces
from quire.quant.shard import Cut
from quire.schema.errors import CheckpointError, ConfigError
from tests.media_models import IMAGE, draw_item, is_greedy, make_model, prompt_of
from tests.tiny_models import VOCAB

NAME = "Molmo2ForConditionalGeneration"
TABLE = "model.transformer.wte.embedding", "model.transformer.wte.new_embedding"
# config.json of a published checkpoint, without what the decoder does not read
RELEASED: dict[str, Any] = {
    "architectures": [NAME], "model_type": "molmo2", "tie_word_embeddings": False,
    "text_config": {
        "additional_vocab_size": 128, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 12288, "layer_norm_eps": 1e-5, "max_position_embeddings": 36864,
        "model_type": "molmo2_text", "norm_after": False, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "qk_norm_type": "qwen3", "qkv_bias": True, "rope_scaling": None,
        "rope_scaling_layers": None, "rope_theta": 1000000.0, "vocab_size": 151936,
    },
}  # fmt: skip


def test_a_released_configuration_is_read() -> None:
    arch = read_arch(RELEASED)
    assert (arch.vocab, arch.input_only, arch.width, len(arch.layers)) == (151936 + 128, 128, 4096, 36)
    assert (arch.qk_norm, arch.order, arch.qkv_bias, arch.o_bias, arch.tie) == ("head", "pre", True, False, False)
    assert arch.norm.eps == 1e-5
    assert {layer.rope.theta for layer in arch.layers if layer.rope} == {1e6}


def test_some_layers_have_scaled_rotary_embeddings() -> None:
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    text = RELEASED["text_config"] | {"rope_scaling": rope, "rope_scaling_layers": [3, 7], "qk_norm_type": "olmo"}
    arch = read_arch(RELEASED | {"text_config": text | {"norm_after": True}})
    assert [i for i, layer in enumerate(arch.layers) if layer.rope and layer.rope.scaling] == [3, 7]
    assert {layer.rope.theta for layer in arch.layers if layer.rope} == {1e6}
    assert (arch.qk_norm, arch.order) == ("full", "post")
    with pytest.raises(ConfigError, match="qk_norm_type = 'both' is not supported"):
        read_arch(RELEASED | {"text_config": text | {"qk_norm_type": "both"}})


def opened(folder: Path) -> LLM:
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "max_logprobs": -1}
    return LLM(str(folder), dtype="float32", max_model_len=256, max_num_seqs=2, **options)


def test_the_table_of_tokens_in_one_tensor_or_two(tmp_path: Path) -> None:
    """transformers writes two of equal size; released ones have the vocabulary, and the tokens added to it."""
    model = make_model(NAME, tmp_path)
    pieces = [[5, 9, 70], draw_item(NAME, model, 1), [11, 4]]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={IMAGE + 5: 100.0}, logprobs=-1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    whole = torch.cat([tensors.pop(name) for name in TABLE])
    assert len(whole) == VOCAB
    answers = []
    for parts in ((VOCAB // 2,), (IMAGE,), ()):
        named = dict(zip(TABLE, whole.tensor_split(parts), strict=True)) if parts else {
            "model.language_model.embed_tokens.weight": whole
        }  # fmt: skip
        save_file(tensors | {name: part.contiguous() for name, part in named.items()}, file, {"format": "pt"})
        with opened(tmp_path) as llm:
            (output,) = llm.generate(prompt_of(pieces), params, use_tqdm=False)
        answer = list(output.outputs[0].token_ids)
        assert is_greedy(NAME, model, pieces, answer)
        answers.append(answer)
    assert max(answers[0]) < IMAGE, "tokens that only stand in prompts are never said"
    assert answers[0] == answers[1] == answers[2]
    assert {one.logprob for token, one in output.outputs[0].logprobs[0].items() if token >= IMAGE} == {-torch.inf}


def test_pieces_of_a_table_that_do_not_add_up(tmp_path: Path) -> None:
    make_model(NAME, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[TABLE[1]] = tensors[TABLE[1]][:-1].contiguous()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="a table of 320 rows is stored as two of 160 and 159 rows"):
        opened(tmp_path)
    del tensors[TABLE[1]]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="embed_tokens"):
        opened(tmp_path)


@pytest.mark.parametrize("split", [1, 4, 6, 9])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_pieces_a_rank_keeps_its_rows(split: int, order: tuple[int, int]) -> None:
    whole, target = torch.arange(30.0).reshape(10, 3), torch.zeros(4, 3)
    pieces = TwoPieces(target, Cut(0, 10, ((3, 7),)))
    for index in order:
        piece = whole.tensor_split((split,))[index]
        place = PieceTarget(pieces, index)
        assert place.expected(piece.shape) == tuple(piece.shape)
        place.copy_(piece)
    assert torch.equal(target, whole[3:7])
