"""The list of a model's kernels on disk: kept whole, current only for the code that made it, never believed blindly."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from quire.base import env
from quire.config import EngineArgs
from quire.config.engine import replace
from quire.ops.triton import warm
from quire.ops.triton.warm import Manifest
from quire.worker.early import about as about_kernels

ABOUT = {"model": {"hidden_size": 64}, "dtype": "bfloat16"}


def test_what_is_written_is_found_again(tmp_path: Path) -> None:
    first = Manifest(ABOUT, str(tmp_path))
    assert not first.current and first.jobs == []
    first.write([{"name": "a"}, {"name": "b"}])
    again = Manifest(dict(reversed(ABOUT.items())), str(tmp_path))
    assert again.current and again.jobs == [{"name": "a"}, {"name": "b"}]
    assert not Manifest(ABOUT | {"dtype": "float16"}, str(tmp_path)).current
    assert [path.suffix for path in first.path.parent.iterdir()] == [".json"]


def test_weights_in_another_form_and_divided_contexts_or_experts_have_lists_of_their_own(tmp_path: Path) -> None:
    """Else the second start of two that differ in these would compile its kernels one after another."""
    about = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(about))
    config = EngineArgs(model=str(tmp_path), load_format="dummy", device="cpu").create_engine_config()
    forms = [("plain", None), ("fp8", "fp8"), ("int8", "int8_wo"), ("int4", "int4_wo"), ("int4", "bitsandbytes")]
    each = [replace(config, **{"model_config.weight_form": form, "model_config.quantization": q}) for form, q in forms]
    heads = [{"model_config.weight_form": "fp8", "model_config.head_form": head} for head in ("int8", "fp8")]
    each += [replace(config, **{"model_config.quantization": "fp8"}, **head) for head in heads]
    each += [
        replace(config, **{"load_config.load_format": "gguf", "model_config.path": f"{name}.gguf"}) for name in "ab"
    ]
    size, interleave = "parallel_config.decode_context_parallel_size", "parallel_config.cp_kv_cache_interleave_size"
    each += [replace(config, **{size: ranks, interleave: run}) for ranks, run in ((2, 1), (4, 1), (2, 16))]
    whole, copies = "parallel_config.enable_expert_parallel", "parallel_config.eplb_config.num_redundant_experts"
    each += [replace(config, **{whole: True, "parallel_config.data_parallel_size": 2, copies: n}) for n in (0, 2)]
    assert len({Manifest(about_kernels(one), str(tmp_path)).path for one in each}) == len(each)
    ranks = [about_kernels(replace(config, **{whole: is_whole}), 1, 2) for is_whole in (False, True)]
    assert ranks[0] != ranks[1] and about_kernels(replace(config, **{whole: True})) == about_kernels(config)
    elsewhere = replace(config, **{"model_config.path": "another/folder"})
    assert about_kernels(elsewhere) == about_kernels(config)


def test_other_kernel_sources_make_it_old_but_still_useful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Manifest(ABOUT, str(tmp_path)).write([{"name": "a"}])
    monkeypatch.setattr(warm, "code_name", lambda: "another version")
    old = Manifest(ABOUT, str(tmp_path))
    assert not old.current and old.jobs == [{"name": "a"}]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"jobs": 3}', '{"code": 1}', "null", "\x00"])
def test_a_damaged_list_counts_as_none(tmp_path: Path, content: str) -> None:
    path = Manifest(ABOUT, str(tmp_path)).path
    path.parent.mkdir(parents=True)
    path.write_text(content)
    found = Manifest(ABOUT, str(tmp_path))
    assert not found.current and found.jobs == []


def test_a_folder_that_cannot_be_written_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "quire").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "quire"):
        Manifest(ABOUT, str(tmp_path)).write([])
    assert "cannot be stored" in caplog.text


def test_where_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "QUIRE_CACHE_ROOT", "VLLM_CACHE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    env.forget_all()
    assert warm.cache_dir() == str(Path.home() / ".cache" / "quire" / "triton")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere")
    env.forget_all()
    assert warm.cache_dir() == "/somewhere/triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    env.forget_all()
    assert warm.cache_dir() == "/elsewhere"
    monkeypatch.undo()
    env.forget_all()


@pytest.mark.parametrize("cores, asked, count", [(2, None, 0), (16, None, 15), (64, None, 16), (2, 3, 3), (64, 0, 0)])
def test_how_many_compile(monkeypatch: pytest.MonkeyPatch, cores: int, asked: int | None, count: int) -> None:
    monkeypatch.setattr(warm.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(env.COMPILE_PROCESSES, "_value", asked)
    assert warm.num_children() == count


def test_a_job_is_what_triton_told(tmp_path: Path) -> None:
    note = warm.Recorder(90)
    told = {
        "name": "m.k", "signature": {"x": "*bf16"}, "constant_keys": [[1]], "constant_vals": [64], "attrs_keys": [[0]],
        "attrs_vals": [[["tt.divisibility", 16]]], "options": {"num_warps": 4}, "key": "k",
    }  # fmt: skip

    class Fn:
        module, name = "m", "k"

    for _ in range(2):
        assert note(key="k", repr="", fn=Fn, compile={"specialization_data": json.dumps(told)}, is_manual_warmup=True)
    (job,) = note.jobs.values()
    assert job == {"module": "m", "name": "k", "arch": 90} | {k: v for k, v in told.items() if k not in ("name", "key")}


def test_the_early_start_imports_neither_torch_nor_triton() -> None:
    code = (
        "import sys, quire.worker.early, quire.ops.triton.warm; sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
