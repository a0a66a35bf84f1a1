"""Jina embeddings v2: BERT with ALiBi on either side and a gated mlp, against a reference in plain torch.

transformers has no class for it (its checkpoints bring code of their own), so the reference here is written from the
published description: post-norm layers, softmax(q k / sqrt(d) - slope |i - j|) v, and norm(x + W (act(g) * u)).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from quire import LLM
from quire.layers.packed import Texts
from quire.models.encoder import build_encoder, encoder_arch
from quire.ops import attention
from quire.schema.errors import ConfigError
from tests.pooling_models import VOCAB, write_sentence_files, write_tokenizer

HEADS, FFN, LAYERS = 6, 64, 2  # six heads: slopes of a number that is no power of two
CONFIG: dict[str, Any] = {
    "architectures": ["JinaBertForMaskedLM"], "model_type": "bert", "vocab_size": VOCAB, "hidden_size": 48,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": FFN, "type_vocab_size": 2,
    "max_position_embeddings": 64, "position_embedding_type": "alibi", "feed_forward_type": "geglu",
    "layer_norm_eps": 1e-12, "hidden_act": "gelu",
}  # fmt: skip
TEXTS = [[5, 9, 77, 100, 41, 8, 12, 60, 33], [7], [100, 4, 4, 50], list(range(4, 60))]


def weights_of(seed: int = 0) -> dict[str, torch.Tensor]:
    generator, width = torch.Generator().manual_seed(seed), CONFIG["hidden_size"]
    weights: dict[str, torch.Tensor] = {}

    def draw(name: str, *shape: int) -> None:
        base = 1.0 if name.endswith("orm.weight") else 0.0
        weights[name] = base + 0.3 * torch.randn(shape, generator=generator)

    def layer(name: str, rows: int, columns: int, *, bias: bool = True) -> None:
        draw(f"{name}.weight", rows, columns)
        if bias:
            draw(f"{name}.bias", rows)

    def norm(name: str) -> None:
        draw(f"{name}.weight", width)
        draw(f"{name}.bias", width)

    draw("embeddings.word_embeddings.weight", VOCAB, width)
    draw("embeddings.token_type_embeddings.weight", 2, width)
    norm("embeddings.LayerNorm")
    for i in range(LAYERS):
        prefix = f"encoder.layer.{i}."
        for part in ("query", "key", "value"):
            layer(f"{prefix}attention.self.{part}", width, width)
        layer(f"{prefix}attention.output.dense", width, width)
        norm(f"{prefix}attention.output.LayerNorm")
        layer(f"{prefix}mlp.gated_layers", 2 * FFN, width, bias=False)
        layer(f"{prefix}mlp.wo", width, FFN)
        norm(f"{prefix}mlp.layernorm")
    layer("pooler.dense", width, width)  # unused by embeddings
    return weights


def slopes_of(heads: int) -> list[float]:
    """The geometric sequence that begins at 2^(-8/n) for a power of two; else that of the power below, then every other
    one of the power above."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 / heads * (i + 1)) for i in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return slopes_of(below) + slopes_of(2 * below)[0::2][: heads - below]


def reference(weights: dict[str, torch.Tensor], ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    width = CONFIG["hidden_size"]

    def dense(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    count, act = len(ids), {"geglu": F.gelu, "reglu": F.relu}[CONFIG["feed_forward_type"]]
    places = torch.arange(count)
    bias = -torch.tensor(slopes_of(HEADS))[:, None, None] * (places[:, None] - places[None]).abs()
    x = weights["embeddings.word_embeddings.weight"][ids]
    x = norm("embeddings.LayerNorm", x + weights["embeddings.token_type_embeddings.weight"][types or [0] * count])
    for i in range(LAYERS):
        prefix = f"encoder.layer.{i}."
        q, k, v = (
            dense(f"{prefix}attention.self.{part}", x).view(count, HEADS, -1).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        weight = (q @ k.transpose(1, 2) / math.sqrt(width // HEADS) + bias).softmax(-1)
        seen = (weight @ v).transpose(0, 1).reshape(count, width)
        x = norm(f"{prefix}attention.output.LayerNorm", x + dense(f"{prefix}attention.output.dense", seen))
        gate, up = dense(f"{prefix}mlp.gated_layers", x).chunk(2, -1)
        x = norm(f"{prefix}mlp.layernorm", x + dense(f"{prefix}mlp.wo", act(gate) * up))
    return x


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


def test_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of()
    encoder = build_encoder(CONFIG, dtype=torch.float32)
    encoder.load_weights(weights.items())
    table = encoder.table()
    assert all(table.load(name, tensor) for name, tensor in weights.items() if not name.startswith("pooler"))
    assert table.missing() == []
    wanted = torch.cat([reference(weights, text) for text in TEXTS])
    assert distance(encoder(Texts.of(TEXTS)), wanted) <= 1e-5
    monkeypatch.setattr(attention, "MAX_SCORES", HEADS * 56 * 5)  # masks of five queries at a time
    assert distance(encoder(Texts.of(TEXTS)), wanted) <= 1e-5
    kinds = [[0] * (len(text) // 2) + [1] * (len(text) - len(text) // 2) for text in TEXTS]
    paired = torch.cat([reference(weights, text, kind) for text, kind in zip(TEXTS, kinds, strict=True)])
    assert distance(encoder(Texts.of(TEXTS, types=kinds)), paired) <= 1e-5 < distance(paired, wanted)
    swapped = [text[::-1] for text in TEXTS]
    assert distance(encoder(Texts.of(swapped)), wanted) > 1e-2, "distances are read"


def test_through_the_engine(tmp_path: Path) -> None:
    weights = weights_of()
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(tmp_path)
    write_sentence_files(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32")
    try:
        results = llm.embed([{"prompt_token_ids": text} for text in TEXTS], use_tqdm=False)
    finally:
        llm.close()
    for text, result in zip(TEXTS, results, strict=True):
        wanted = F.normalize(reference(weights, text).mean(0), dim=-1)
        assert distance(torch.tensor(result.outputs.embedding), wanted) <= 1e-4


@pytest.mark.parametrize(
    "over",
    [{"position_embedding_type": "absolute"}, {"feed_forward_type": "original"}],
    ids=lambda over: next(iter(over)),
)
def test_other_forms_are_refused(over: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(over))):
        encoder_arch(CONFIG | over)
