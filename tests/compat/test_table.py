"""compat/vllm: every documented name resolves to Quire, or says why it does not."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import vllm
from vllm import table

import quire.config
from quire.config import EngineArgs
from quire.schema.errors import NotBuiltError
from quire.schema.outputs import RequestOutput
from quire.schema.params import SamplingParams
from tests.tiny_models import make_tiny

NAMES = [(module, name, target) for module, names in table.names().items() for name, target in names.items()]


@pytest.mark.parametrize("module, name, target", NAMES, ids=[f"{m}.{n}" for m, n, _ in NAMES])
def test_a_name_is_the_same_object(module: str, name: str, target: str) -> None:
    home, _, spelled = target.partition(":")
    found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(home), spelled)


def test_star_and_nested_imports() -> None:
    assert vllm.SamplingParams is SamplingParams
    assert vllm.outputs.RequestOutput is RequestOutput
    assert vllm.config.VllmConfig is quire.config.EngineConfig
    assert "LLM" in dir(vllm) and "SamplingParams" in dir(vllm.sampling_params)
    found: dict[str, object] = {}
    exec("from vllm.sampling_params import *", found)
    assert found["SamplingParams"] is SamplingParams


@pytest.mark.parametrize("entry", sorted(table.MISSING))
def test_missing_names_say_why(entry: str) -> None:
    module, _, name = entry.partition(":")
    with pytest.raises(ImportError, match=rf"Quire has no {module}.*: {table.MISSING[entry]}"):
        exec(f"from {module} import {name}" if name else f"import {module}.something")


def test_unknown_names_are_plain_errors() -> None:
    assert not hasattr(vllm, "no_such_name")
    with pytest.raises(ImportError, match=r"cannot import name 'Nope' from 'vllm.outputs'"):
        exec("from vllm.outputs import Nope")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'vllm.nope'"):
        importlib.import_module("vllm.nope")


def test_envs_read_what_quire_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    assert importlib.import_module("vllm.envs").VLLM_LOGGING_LEVEL == "DEBUG"
    with pytest.raises(AttributeError, match="reads no environment variable 'VLLM_NO_SUCH'"):
        _ = vllm.envs.VLLM_NO_SUCH


def test_version_parses_and_says_quire() -> None:
    from packaging.version import Version

    assert Version(vllm.__version__).local == "quire"
    assert importlib.import_module("vllm.version").__version__ == vllm.__version__


def test_logger_says_once(caplog: pytest.LogCaptureFixture) -> None:
    log = importlib.import_module("vllm.logger").init_logger("a.program")
    with caplog.at_level("INFO"):
        log.info_once("only once")
        log.info_once("only once")
        log.info("always")
    assert [record.message for record in caplog.records] == ["only once", "always"]


def test_import_vllm_is_light() -> None:
    code = "import sys, vllm, vllm.engine.arg_utils; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300).stdout == "[]\n"


def test_modules_that_are_started() -> None:
    for module, word in (("vllm.entrypoints.openai.api_server", "serve"), ("vllm.entrypoints.openai.run_batch", "-i")):
        done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and word in done.stdout, done.stderr


def test_interfaces_that_programs_call() -> None:
    import argparse

    from vllm.engine.protocol import EngineClient
    from vllm.entrypoints.chat_utils import load_chat_template
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.logits_process import NoBadWordsLogitsProcessor
    from vllm.tasks import GENERATION_TASKS, POOLING_TASKS
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    assert issubclass(AsyncLLM, EngineClient) and not issubclass(dict, EngineClient)
    assert "generate" in GENERATION_TASKS and "embed" in POOLING_TASKS
    assert load_chat_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ValueError, match="nowhere"):
        load_chat_template("nowhere.jinja")
    forbid = NoBadWordsLogitsProcessor([[1, 2], [3]])
    numpy = pytest.importorskip("numpy")
    assert list(forbid([0, 1], numpy.zeros(5))) == [0, 0, -float("inf"), -float("inf"), 0]
    assert list(forbid([1, 0], numpy.zeros(5))) == [0, 0, 0, -float("inf"), 0]
    with pytest.raises(ValueError, match="0 to 2"):
        forbid([], numpy.zeros(3))
    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--port", "1234", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"])
    assert args.port == 1234
    validate_parsed_serve_args(args)
    with pytest.raises(ValueError, match="tool_call_parser"):
        validate_parsed_serve_args(parser.parse_args(["--enable-auto-tool-choice"]))


def test_the_command_is_quires() -> None:
    done = subprocess.run([Path(sys.executable).parent / "vllm"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "collect-env" in done.stdout


def test_an_adapter_is_a_value() -> None:
    from vllm.lora.request import LoRARequest

    import quire

    assert LoRARequest is quire.LoRARequest
    one = LoRARequest("sql", 1, "/adapters/sql")
    assert (one.lora_name, one.lora_int_id, one.lora_path, one.adapter_id) == ("sql", 1, "/adapters/sql", 1)
    assert one == LoRARequest(lora_name="sql", lora_int_id=1, lora_path="/adapters/sql") and len({one, one}) == 1
    for wrong in (("a", 0, "x"), ("a", 1, "")):
        with pytest.raises(ValueError, match="lora_"):
            LoRARequest(*wrong)


def test_names_of_missing_features_import_and_refuse() -> None:
    from vllm.assets.image import ImageAsset
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    from vllm.multimodal.utils import encode_video_base64

    for use in (lambda: ImageAsset("stop_sign"), NCCLWeightTransferEngine, lambda: encode_video_base64([])):
        with pytest.raises(NotBuiltError, match="not in this version of Quire"):
            use()


def test_groups_that_do_not_exist_are_taken_apart() -> None:
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()
    with pytest.raises(ImportError, match="several devices"):
        from vllm.distributed.parallel_state import GroupCoordinator  # noqa: F401


def test_the_config_in_force() -> None:
    from vllm.config import (
        CacheConfig,
        VllmConfig,
        get_attr_docs,
        get_current_vllm_config,
        set_current_vllm_config,
        update_config,
    )
    from vllm.config.cache import CacheConfig as Same

    assert CacheConfig is Same
    mine = update_config(VllmConfig(), {"cache_config.block_size": 32})
    with set_current_vllm_config(mine):
        assert get_current_vllm_config() is mine
    assert get_current_vllm_config() == VllmConfig() != mine
    assert "block" in get_attr_docs(CacheConfig)["block_size"].lower()


def test_tokenizers_and_templates(tmp_path: Path) -> None:
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers import get_tokenizer

    path = EngineArgs().create_engine_config().model_config.path
    own = get_tokenizer(path)  # a .gguf file
    assert own.decode(own.encode("Hello")) == "Hello"
    assert resolve_chat_template(own) == own.chat_template and resolve_chat_template(own, "{{ 1 }}") == "{{ 1 }}"
    transformers = pytest.importorskip("transformers")
    make_tiny("OPTForCausalLM", tmp_path)
    theirs = get_tokenizer(str(tmp_path))
    assert isinstance(theirs, transformers.PreTrainedTokenizerBase) and theirs("a b").input_ids


def test_samples_of_a_benchmark() -> None:
    import argparse

    from vllm.benchmarks.datasets import add_dataset_parser, get_samples
    from vllm.tokenizers import get_tokenizer

    parser = argparse.ArgumentParser()
    add_dataset_parser(parser)
    flags = ["--dataset-name", "random", "--num-prompts", "3", "--random-input-len", "12", "--random-output-len", "5"]
    found = get_samples(parser.parse_args(flags), get_tokenizer(EngineArgs().create_engine_config().model_config.path))
    assert [(one.prompt_len, one.expected_output_len) for one in found] == [(12, 5)] * 3


def test_variables_without_effect_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    envs = importlib.import_module("vllm.envs")
    assert envs.VLLM_WORKER_MULTIPROC_METHOD == "spawn" and envs.VLLM_USE_V1 is True
    assert envs.VLLM_XLA_USE_SPMD is None
