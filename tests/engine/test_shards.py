"""Matrices cut among ranks: two processes that hold a model together give the logits of one that holds all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base import env
from quire.layers.linear import Linear
from quire.layers.table import WeightTable
from quire.ops.op import Kernels
from quire.quant.coded import GGUFBlocks
from quire.quant.plain import plain_storage
from quire.quant.shard import ALONE, Cut, ShardGroup, Span, cut_to
from quire.schema.errors import CheckpointError, ConfigError
from tests.shard_rank import loaded, size_of, steps
from tests.tiny_models import make_tiny, write_tiny
from tests.toy_scheme import turned

# every way a matrix is cut: biases, tied and own heads, one head of keys for all, fused and stored the other way round,
# experts one by one and stacked, with biases and sinks, shared experts, latent attention, slopes; and layers that are
# not cut: norms over all heads, states
ARCHS = [
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "GPTBigCodeForCausalLM",
    "GPT2LMHeadModel", "BloomForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM", "Qwen2MoeForCausalLM",
    "DeepseekV3ForCausalLM", "Olmo2ForCausalLM", "BambaForCausalLM", "ApertusForCausalLM",
]  # fmt: skip
WHOLE = ("BambaForCausalLM", "Olmo2ForCausalLM")  # attention or states are on every rank
TOLERANCE = 1e-5


def rank_process(folder: Path, rank: int, size: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.shard_rank", str(rank), str(size), str(folder)]
    where = Path(__file__).parents[2]
    return subprocess.Popen(
        command, cwd=where, env=env.child_environment({}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run_ranks(folder: Path, size: int) -> list[dict[str, Any]]:
    children = [rank_process(folder, rank, size) for rank in range(size)]
    try:
        for child in children:
            said = child.communicate(timeout=900)[0]
            assert child.returncode == 0, said[-4000:]
    finally:
        for child in children:
            child.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def in_parts(folder: Path, into: Path) -> None:
    """The same checkpoint in several files, with an index."""
    model = make_tiny("LlamaForCausalLM", into)
    for path in into.glob("*.safetensors"):
        path.unlink()
    model.save_pretrained(into, max_shard_size="100KB")
    assert len(list(into.glob("*.safetensors"))) > 2


def make_checkpoints(folder: Path) -> None:
    for arch in ARCHS:
        write_tiny(arch, folder / arch)
    in_parts(folder / "LlamaForCausalLM", folder / "LlamaInFiles")
    write_tiny("Qwen3MoeForCausalLM", folder / "Qwen3Moe.state")
    for arch in ("LlamaForCausalLM", "Qwen2MoeForCausalLM"):
        other = folder / f"{arch}.turned"
        write_tiny(arch, other)
        save_file(turned(load_file(other / "model.safetensors")), other / "model.safetensors")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    make_checkpoints(folder / "models")
    return folder / "models", run_ranks(folder, 2)


@pytest.mark.parametrize("name", [*ARCHS, "LlamaInFiles", "Qwen3Moe.state", *(
    f"{arch}.turned" for arch in ("LlamaForCausalLM", "Qwen2MoeForCausalLM"))])  # fmt: skip
def test_two_ranks_give_the_logits_of_one(ranks: tuple[Path, list[dict[str, Any]]], name: str) -> None:
    folder, found = ranks
    whole = loaded(folder / name, ALONE)
    wanted, size = steps(whole), size_of(whole)
    assert sum(logits.abs().sum() for logits in wanted) > 0
    for rank in found:
        logits, own = rank[name]
        assert own < size if name in WHOLE else own < 0.75 * size  # norms, routers and what is not cut lies on both
        for one, other in zip(logits, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE * float(other.abs().max()))


# --- how they are cut


def one_of(rank: int, size: int) -> ShardGroup:
    return ShardGroup(rank, size, lambda x: x)


def test_shares() -> None:
    assert [one_of(rank, 2).span("heads", 6) for rank in (0, 1)] == [Span(6, 0, 3), Span(6, 3, 3)]
    assert [one_of(rank, 4).span("heads", 2, repeats=True).start for rank in range(4)] == [0, 0, 1, 1]
    uneven = [one_of(rank, 3).uneven_span(50) for rank in range(3)]
    assert sum(span.count for span in uneven) == 50 and [span.start for span in uneven] == [0, 16, 33]
    with pytest.raises(ConfigError, match="6 heads cannot be shared out among 4 ranks"):
        one_of(0, 4).span("heads", 6)
    with pytest.raises(ConfigError, match="3 heads"):
        one_of(0, 4).span("heads", 3, repeats=True)
    with pytest.raises(ConfigError, match="2 rows"):
        one_of(0, 4).uneven_span(2)


def test_a_cut_of_parts_that_lie_one_after_another() -> None:
    cut = cut_to(0, [Span(4, 2, 2), Span(2, 1, 1)])
    assert cut == Cut(0, 6, ((2, 4), (5, 6)))
    assert cut is not None and cut.of(torch.arange(6)).tolist() == [2, 3, 5]
    assert cut.behind(1).of(torch.arange(12).view(2, 6)).tolist() == [[2, 3, 5], [8, 9, 11]]
    assert cut.uncut((3, 7)) == (6, 7) and cut_to(0, [Span.all(3), Span.all(1)]) is None


def linear_of(group: ShardGroup, *, by_rows: bool) -> Linear:
    storage = plain_storage(torch.float32, Kernels.here("cpu"), group)
    rows, width = group.span("rows", 6), group.span("columns", 4)
    return Linear("l.", 4 if by_rows else width, {"a": rows if by_rows else 6}, storage, bias=True)


def test_what_lies_elsewhere_is_neither_missing_nor_unexpected() -> None:
    weight, bias = torch.randn(6, 4), torch.randn(6)
    sums = torch.zeros(3, 6)
    x = torch.randn(3, 4)
    for rank in (0, 1):
        linear = linear_of(one_of(rank, 2), by_rows=False)
        table = WeightTable(linear.slots())
        assert table.missing() == (["l.a.weight", "l.a.bias"] if rank == 0 else ["l.a.weight"])
        assert table.load("l.a.weight", weight) and table.load("l.a.bias", bias)
        assert not table.load("l.b.bias", bias) and not table.missing()
        sums += linear(x[:, 2 * rank : 2 * rank + 2])
    torch.testing.assert_close(sums, torch.nn.functional.linear(x, weight, bias))


def test_a_tensor_of_another_size_is_told_whole() -> None:
    table = WeightTable(linear_of(one_of(1, 2), by_rows=True).slots())
    with pytest.raises(CheckpointError, match=r"has shape \[3, 4\] in the checkpoint, .*asks for \[6, 4\]"):
        table.load("l.a.weight", torch.randn(3, 4))


def test_blocks_are_cut_where_they_end() -> None:
    """32 numbers are 2 bytes here: the first says which number all of them are."""

    def decode(raw: torch.Tensor) -> torch.Tensor:
        return raw[:, ::2].float().repeat_interleave(32, 1)

    raw = torch.tensor([[1, 0, 2, 0, 3, 0, 4, 0], [5, 0, 6, 0, 7, 0, 8, 0]], dtype=torch.uint8)
    stored = GGUFBlocks(raw, 8, 128, decode, 32)
    for cut in (Cut(0, 2, ((1, 2),)), Cut(1, 128, ((64, 128),)), Cut(1, 128, ((32, 64), (96, 128)))):
        kept = stored.cut(cut)
        assert kept is not None and torch.equal(kept.numbers(), cut.of(stored.numbers()))
        assert kept.shape == tuple(kept.numbers().shape)
    assert stored.cut(Cut(1, 128, ((16, 64),))) is None


def test_alone_nothing_is_cut() -> None:
    linear = linear_of(ALONE, by_rows=False)
    assert not linear.is_summed and linear.is_plain and all(slot.cut is None for slot in linear.slots())
