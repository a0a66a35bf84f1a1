"""Pipeline stages of a model: run one after another they give the bits of the whole, and each reads its own tensors.

The ordinary suite takes some of each kind; `make ranks` (pytest --every-architecture) takes all declared architectures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.base import env
from quire.config import EngineArgs
from quire.loader.load import load_model, make_model
from quire.loader.safetensors_file import SafetensorsFile
from quire.models.stage import layers_per_stage
from quire.ops.op import Kernels
from quire.quant.shard import ALONE, ShardGroup
from quire.schema.errors import ConfigError, NotBuiltError
from tests.engine.test_quantized_formats import FORMS
from tests.models.test_ranks import LOADING
from tests.quantized import write_files
from tests.shard_rank import loaded, size_of, steps
from tests.thread_ranks import on_ranks
from tests.thread_stages import Chain
from tests.tiny_models import ARCHS, write_tiny

# dense, tied and not; windows; mixtures; latent attention; states and hybrids; what stands at the ends or is shared
SOME = (
    "LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "Mamba2ForCausalLM",
    "Qwen3NextForCausalLM", "JambaForCausalLM", "Zamba2ForCausalLM", "OPTForCausalLM", "BloomForCausalLM",
    "Cohere2ForCausalLM", "MiniMaxForCausalLM",
)  # fmt: skip
WHOLE = ("Gemma3nForCausalLM",)  # not cut into stages
CODED = ("gptq-4-asym", "fp8-blocks")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "arch" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-architecture")
        metafunc.parametrize("arch", [arch for arch in ARCHS if (every and arch not in WHOLE) or arch in SOME])


def stages_of(folder: Path, count: int, group: ShardGroup = ALONE) -> list[Any]:
    return [loaded(folder, replace(group, stage=stage, stages=count)) for stage in range(count)]


def check_equal(staged: list[Tensor], whole: list[Tensor]) -> None:
    for one, other in zip(staged, whole, strict=True):
        assert torch.equal(one, other)


def test_two_stages_give_the_bits_of_one(arch: str, tmp_path: Path) -> None:
    write_tiny(arch, tmp_path)
    whole, stages = loaded(tmp_path, ALONE), stages_of(tmp_path, 2)
    assert all(size_of(stage) < size_of(whole) for stage in stages)
    check_equal(steps(Chain(stages)), steps(whole))


@pytest.mark.parametrize("name", WHOLE)
def test_models_that_are_not_cut_say_so(name: str, tmp_path: Path) -> None:
    write_tiny(name, tmp_path)
    with pytest.raises(NotBuiltError, match=r"pipeline_parallel_size=2: .* are not cut into stages"):
        stages_of(tmp_path, 2)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "DeepseekV2ForCausalLM"])
def test_uneven_stages(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(name, tmp_path)
    whole = loaded(tmp_path, ALONE)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1, 2,1")
    env.forget_all()
    stages = stages_of(tmp_path, 3)
    assert [list(stage.stage.layers) for stage in stages] == [[0], [1, 2], [3]]
    check_equal(steps(Chain(stages)), steps(whole))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3NextForCausalLM"])
def test_two_ranks_in_each_of_two_stages(name: str, tmp_path: Path) -> None:
    """Sums are those of two ranks alone, so the bits are too."""
    write_tiny(name, tmp_path)

    def answers(group: ShardGroup, count: int) -> list[Tensor]:
        with LOADING:
            stages = stages_of(tmp_path, count, group)
        return steps(Chain(stages))

    one = on_ranks(2, lambda group: answers(group, 1))
    for own, other in zip(on_ranks(2, lambda group: answers(group, 2)), one, strict=True):
        check_equal(own, other)


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_checkpoints(form: str, dtype: str, tmp_path: Path) -> None:
    write_files(tmp_path, "LlamaForCausalLM", FORMS[form][0])
    args = EngineArgs(model=str(tmp_path), dtype=dtype, max_model_len=64, skip_tokenizer_init=True, device="cpu")
    config = args.create_engine_config()
    whole = load_model(config, "cpu")
    stages = [load_model(config, "cpu", ShardGroup(stage=stage, stages=2)) for stage in range(2)]
    check_equal(steps(Chain(stages)), steps(whole))


def test_a_stage_reads_its_own_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    read: set[str] = set()
    plain = SafetensorsFile.read

    def watched(self: SafetensorsFile, entry: Any) -> Any:
        read.add(entry.name)
        return plain(self, entry)

    monkeypatch.setattr(SafetensorsFile, "read", watched)
    (last,) = [loaded(tmp_path, ShardGroup(stage=1, stages=2))]
    own = ("model.layers.2.", "model.layers.3.", "model.norm", "lm_head")
    assert read and all(name.startswith(own) for name in read)
    assert not last.table().lies_elsewhere("model.layers.2.mlp.up_proj.weight")
    assert last.table().load("model.layers.0.mlp.up_proj.weight", torch.empty(1))  # elsewhere, whatever it holds
    assert not last.table().load("model.layers.99.mlp.up_proj.weight", torch.empty(1))  # the model has none
    with pytest.raises(RuntimeError, match="on another pipeline stage"):
        last.embed(torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("total", "stages", "partition", "counts"),
    [
        (8, 2, "", [4, 4]), (7, 2, "", [4, 3]), (10, 4, "", [2, 3, 3, 2]), (11, 4, "", [3, 3, 3, 2]),
        (5, 5, "", [1] * 5), (8, 2, "3,5", [3, 5]), (8, 2, " 1 , 7 ", [1, 7]),
    ],
)  # fmt: skip
def test_layers_of_each_stage(total: int, stages: int, partition: str, counts: list[int]) -> None:
    assert layers_per_stage(total, stages, partition) == counts


@pytest.mark.parametrize(
    ("stages", "partition", "said"),
    [
        (9, "", "pipeline_parallel_size=9 is more than the model's 8 layers"),
        (2, "4,4,0", "a number for each of the 2 stages"),
        (2, "8,0", "every stage needs a layer"),
        (2, "4,5", "add up to the model's 8"),
        (2, "4;4", "must be numbers of layers"),
        (2, "4,-4", "must be numbers of layers"),
        (2, "9" * 5000 + ",1", "must be numbers of layers"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(stages: int, partition: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        layers_per_stage(8, stages, partition)
    assert len(str(refused.value)) < 400


def test_models_that_are_not_cut_into_stages(tmp_path: Path) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)

    def make(**more: Any) -> None:
        args = EngineArgs(model=str(tmp_path), max_model_len=64, skip_tokenizer_init=True, device="cpu", **more)
        make_model(args.create_engine_config(), Kernels.here("cpu"), ShardGroup(stage=0, stages=2))

    with pytest.raises(NotBuiltError, match="pipeline_parallel_size=2 is built for declared architectures only"):
        make(model_impl="transformers")
    with pytest.raises(NotBuiltError, match="pipeline_parallel_size=2: pooling models"):
        make(runner="pooling")
