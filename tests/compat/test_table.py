"""compat/vllm: every documented name resolves to Quire, or says why it does not."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import vllm
from vllm import table

import quire.config
from quire.config import EngineArgs, unavailable
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
    with pytest.raises(ImportError, match=rf"Quire has no {module}.*: {re.escape(table.MISSING[entry])}"):
        exec(f"from {module} import {name}" if name else f"import {module}.something")


def test_a_reason_denies_only_what_is_not_built() -> None:
    """A feature that does not exist is denied in the words of unavailable.txt, whose rows go when the feature comes."""
    denies = re.compile(r"\b(yet|not built|not in this version|this version|start-up only)\b")
    absent = {why for why in table.MISSING.values() if denies.search(why)}
    assert absent <= set(unavailable._read()[1].values())


def test_what_is_missing_can_be_looked_for() -> None:
    """hasattr says no, as of any module; an import says why, also of one name of a module that has others."""
    assert not hasattr(vllm, "initialize_ray_cluster") and not hasattr(vllm.utils, "no_such_helper")
    for line, why in (
        ("from vllm.utils import no_such_helper", "helpers of vLLM's own"),
        ("from vllm.sequence import IntermediateTensors", "vLLM's pipeline stages"),
        ("from vllm.entrypoints.openai.protocol import Nope", "vLLM's HTTP server"),
        ("import vllm.attention.layer", "vLLM's attention"),
    ):
        with pytest.raises(ImportError, match=rf"Quire has no vllm\..*: .*{why}"):
            exec(line)


def test_below_a_module_without_names_the_reason_is_given_too() -> None:
    for module in ("model_loader.utils", "models.llama"):
        with pytest.raises(ModuleNotFoundError, match=f"no vllm.model_executor.{module}: these are vLLM's own models"):
            importlib.import_module(f"vllm.model_executor.{module}")
    with pytest.raises(ModuleNotFoundError, match=r"no vllm\.distributed\.device_communicators: these are the ins"):
        importlib.import_module("vllm.distributed.device_communicators.pynccl")


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
    started = (
        ("vllm.entrypoints.openai.api_server", "serve"), ("vllm.entrypoints.openai.run_batch", "-i"),
        ("vllm.collect_env", "collect-env"), ("quire", "collect-env"),
    )  # fmt: skip
    for module, word in started:
        done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and word in done.stdout, done.stderr
        assert "__main__" not in done.stdout


def test_collect_env_prints_what_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    from vllm import collect_env

    from quire.cli.main import main as command

    collect_env.main()
    printed = capsys.readouterr().out
    command(["collect-env"])
    shown = capsys.readouterr().out
    assert [line.partition(":")[0] for line in printed.splitlines()] == [
        line.partition(":")[0] for line in shown.splitlines()
    ]


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
    with pytest.raises(ImportError, match="insides of vLLM's ranks"):
        from vllm.distributed.parallel_state import GroupCoordinator  # noqa: F401


def test_a_process_without_ranks_is_alone() -> None:
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from vllm.distributed.parallel_state import get_world_group, model_parallel_is_initialized

    assert (get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()) == (0, 1)
    world = get_world_group()
    assert (world.rank, world.local_rank, world.ranks, world.is_first_rank, world.is_last_rank) == (
        0,
        0,
        [0],
        True,
        True,
    )
    world.barrier()
    assert get_pp_group() == world and not model_parallel_is_initialized()


def test_a_rank_knows_its_place_among_all_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.parallel_state import get_tp_group, get_world_group

    group = SimpleNamespace(WORLD="all")
    joined = SimpleNamespace(
        get_rank=lambda: 1, get_world_size=lambda: 2, get_backend=lambda: "gloo", group=group, barrier=lambda of: None
    )
    monkeypatch.setattr("vllm.ranks._joined", lambda: joined)
    world = get_world_group()
    assert (world.rank, world.world_size, world.local_rank, world.is_last_rank) == (1, 2, 1, True)
    with pytest.raises(NotBuiltError, match=r"get_tp_group: .*parallel_config"):
        get_tp_group()


def test_a_subscriber_reads_kv_events() -> None:
    from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockStored, EventBatch, KVEventBatch

    events = [BlockStored([b"a"], None, [1, 2], 2, None, MEDIUM_GPU, None), AllBlocksCleared()]
    sent = msgspec.msgpack.encode(EventBatch(1.0, events, 3))
    assert msgspec.msgpack.decode(sent, type=KVEventBatch) == KVEventBatch(1.0, events, 3)


def test_flags_of_a_config_class() -> None:
    import argparse

    from vllm.config import CacheConfig, OffloadConfig, UVAOffloadConfig
    from vllm.engine.arg_utils import get_kwargs

    parser = argparse.ArgumentParser()
    parser.add_argument("--block-size", **get_kwargs(CacheConfig)["block_size"])
    assert parser.parse_args(["--block-size", "32"]).block_size == 32
    assert OffloadConfig().uva == UVAOffloadConfig()


def test_the_config_in_force() -> None:
    from vllm.config import (
        CacheConfig,
        OptimizationLevel,
        VllmConfig,
        get_attr_docs,
        get_current_vllm_config,
        replace,
        set_current_vllm_config,
        update_config,
    )
    from vllm.config.cache import CacheConfig as Same

    assert CacheConfig is Same
    mine = update_config(VllmConfig(), {"cache_config.block_size": 32})
    with set_current_vllm_config(mine):
        assert get_current_vllm_config() is mine
    assert get_current_vllm_config() == VllmConfig() != mine
    assert replace(CacheConfig(), block_size=32).block_size == 32
    assert VllmConfig(optimization_level=OptimizationLevel.O1).optimization_level == 1
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
    assert envs.is_set("VLLM_WORKER_MULTIPROC_METHOD") and not envs.is_set("VLLM_XLA_USE_SPMD")
    envs.enable_envs_cache()
