"""Tensor parallelism of every architecture: ranks that share a model give the logits of one that has all of it.

The ordinary suite takes some of each kind; `make ranks` (pytest --every-architecture) takes all declared ones. Ranks
are threads here; tests/engine/test_ranks_engine.py has processes.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.layers.embed import Head
from quire.layers.packed import Texts
from quire.layers.table import WeightTable
from quire.models.encoder import build_encoder
from quire.models.seq2seq import build_seq2seq
from quire.ops.op import Kernels
from quire.quant.plain import plain_storage
from quire.quant.shard import ALONE, ShardGroup
from quire.schema.errors import ConfigError
from tests.models.test_encoders import TINY as ENCODERS
from tests.models.test_encoders import texts_of
from tests.models.test_encoders import tiny as tiny_encoder
from tests.models.test_seq2seq import TINY as SEQ2SEQ
from tests.models.test_seq2seq import Driver, drawn
from tests.models.test_seq2seq import tiny as tiny_seq2seq
from tests.shard_rank import loaded, size_of, steps
from tests.thread_ranks import on_ranks
from tests.tiny_models import ARCHS, write_tiny

TOLERANCE = 1e-4
# One of each way in which a layer is cut; beside those of tests/engine/test_shards.py.
SOME = (
    "Gemma2ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "MiniCPM3ForCausalLM",  # attention, experts
    "BitNetForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM", "StableLmForCausalLM", "MiniMaxM2ForCausalLM",  # norms
    "MptForCausalLM", "FalconForCausalLM", "BloomForCausalLM", "GPTBigCodeForCausalLM", "PhimoeForCausalLM",  # classics
    "Qwen3NextForCausalLM", "AfmoeForCausalLM",  # gates of attention, in q_proj and apart
    "MambaForCausalLM", "Mamba2ForCausalLM", "FalconH1ForCausalLM", "Zamba2ForCausalLM", "Lfm2ForCausalLM",  # states
    "MiniMaxForCausalLM", "KimiLinearForCausalLM", "NemotronHForCausalLM", "JambaForCausalLM",
    "Gemma3nForCausalLM",  # streams, gates cut by their mean, keys of other layers
)  # fmt: skip
# Fewer heads of keys than ranks, which have copies then; fewer norms of a state, over the entries of several ranks.
FOUR = ("LlamaForCausalLM", "Olmo2ForCausalLM", "GPTBigCodeForCausalLM", "FalconH1ForCausalLM")
LOADING = threading.Lock()  # a load changes the number of threads of torch while it lasts
LARGEST_SHARE = 0.75  # norms, routers and tables of positions lie on both ranks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "arch" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-architecture")
        metafunc.parametrize("arch", [arch for arch in ARCHS if every or arch in SOME])


def check(shared: list[list[Tensor]], whole: list[Tensor]) -> None:
    for own in shared:
        for one, other in zip(own, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE * float(other.abs().max()))
            assert torch.equal(one.argmax(-1), other.argmax(-1))
    for own in shared[1:]:
        assert all(torch.equal(a, b) for a, b in zip(own, shared[0], strict=True))  # each rank samples by itself


def answers_of(folder: Path, group: ShardGroup) -> tuple[list[Tensor], int]:
    with LOADING:
        model = loaded(folder, group)
    return steps(model), size_of(model)


def test_two_ranks_give_the_logits_of_one(arch: str, tmp_path: Path) -> None:
    write_tiny(arch, tmp_path)
    whole = loaded(tmp_path, ALONE)
    shares = on_ranks(2, lambda group: answers_of(tmp_path, group))
    assert all(size < LARGEST_SHARE * size_of(whole) for _, size in shares)
    check([logits for logits, _ in shares], steps(whole))


@pytest.mark.parametrize("name", FOUR)
def test_ranks_that_have_the_same_head_of_keys(name: str, tmp_path: Path) -> None:
    write_tiny(name, tmp_path)
    whole = loaded(tmp_path, ALONE)
    heads = whole.arch.kv_heads
    assert heads < 4
    check([logits for logits, _ in on_ranks(4, lambda group: answers_of(tmp_path, group))], steps(whole))


def of_files(folder: Path, build: Any, group: ShardGroup) -> Any:
    config = json.loads((folder / "config.json").read_text())
    storage = plain_storage(torch.float32, Kernels.here("cpu"), group)
    model = build(config, dtype=torch.float32, storage=storage)
    model.load_weights(load_file(folder / "model.safetensors").items())
    return model


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str, tmp_path: Path) -> None:
    tiny_encoder(name).save_pretrained(tmp_path)
    texts = Texts.of(texts_of())
    whole = of_files(tmp_path, build_encoder, ALONE)
    check(
        on_ranks(2, lambda group: [of_files(tmp_path, build_encoder, group)(texts)]),
        [whole(texts)],
    )


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoder_decoders(name: str, tmp_path: Path) -> None:
    tiny_seq2seq(name).save_pretrained(tmp_path)
    texts, written = drawn()

    def answers(group: ShardGroup) -> list[Tensor]:
        driver = Driver(of_files(tmp_path, build_seq2seq, group), texts, written)
        first = driver.step([(row, 1) for row in range(len(written))])
        return [*first, *driver.step([(row, len(w) - 1) for row, w in enumerate(written) if len(w) > 1])]

    check(on_ranks(2, answers), answers(ALONE))


def test_rows_of_a_head_that_ranks_share() -> None:
    """Seven rows among three ranks, of which a classifier is made."""
    weight, wanted = torch.randn(7, 4), torch.tensor([6, 0, 3, 3])

    def rows_of(group: ShardGroup) -> Tensor:
        head = Head("lm_head", 7, 4, plain_storage(torch.float32, Kernels.here("cpu"), group))
        assert WeightTable(head.slots()).load("lm_head.weight", weight)
        return head.take(wanted)

    for rows in (*on_ranks(3, rows_of), rows_of(ALONE)):
        assert torch.equal(rows, weight[wanted])


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("LlamaForCausalLM", 3, "4 heads cannot be shared out among 3 ranks"),
        ("Mamba2ForCausalLM", 3, "heads of a state cannot be shared out among 3 ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(name: str, size: int, said: str, tmp_path: Path) -> None:
    write_tiny(name, tmp_path)
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, ShardGroup(0, size))
