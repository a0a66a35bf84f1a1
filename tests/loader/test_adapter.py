"""Adapter folders: what is read of them, and one clear error for whatever is wrong with them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.layers.adapters import StepAdapters
from quire.layers.linear import Linear
from quire.layers.places import AdapterPlaces
from quire.loader.adapter import AdapterLimits, HostAdapter, read_adapter
from quire.models.build import build_model
from quire.schema.adapters import AdapterPlacement, AdapterRead, AdapterSource
from quire.schema.errors import CheckpointError
from quire.worker.adapters import WorkerAdapters
from tests.tiny_adapters import write_adapter, write_stacked
from tests.tiny_models import tiny_config, tiny_model

LIMITS = AdapterLimits(8, torch.float32)
LAYER = "base_model.model.model.layers.0.self_attn"


@pytest.fixture(scope="module")
def places() -> AdapterPlaces:
    config = tiny_config("LlamaForCausalLM").to_dict() | {"architectures": ["LlamaForCausalLM"]}
    model: Any = build_model(config, dtype=torch.float32)
    return AdapterPlaces(model, model.table())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(tiny_model("LlamaForCausalLM"), folder, rank=4, alpha=6)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def read(folder: Path, places: AdapterPlaces, limits: AdapterLimits = LIMITS) -> HostAdapter:
    return read_adapter(str(folder), places, limits)


def scales(adapter: HostAdapter) -> set[float]:
    return {piece.scale for pieces in adapter.linears.values() for piece in pieces}


def test_what_is_read(folder: Path, places: AdapterPlaces) -> None:
    adapter = read(folder, places)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    qkv = [layer for layer in adapter.linears if layer.prefix == "model.layers.0.self_attn." and layer.fused]
    assert len(qkv) == 1 and isinstance(qkv[0], Linear)
    starts = sorted((piece.start, piece.stop) for piece in adapter.linears[qkv[0]])
    assert starts == [(0, 64), (64, 96), (96, 128)]
    first = next(piece for piece in adapter.linears[qkv[0]] if piece.start == 64)
    assert torch.equal(first.a, tensors[f"{LAYER}.k_proj.lora_A.weight"])
    assert torch.equal(first.b, tensors[f"{LAYER}.k_proj.lora_B.weight"])
    assert scales(adapter) == {1.5}


def test_scales(folder: Path, places: AdapterPlaces) -> None:
    configure(folder, use_rslora=True)
    assert scales(read(folder, places)) == {3.0}
    for pattern in ("q_proj", r".*\.q_proj", "^self_attn.q_proj$"):
        configure(folder, use_rslora=False, alpha_pattern={pattern: 8})
        assert scales(read(folder, places)) == {1.5, 2.0}


def test_other_spellings(folder: Path, places: AdapterPlaces) -> None:
    """'default' in the names, all-linear, a precision of its own, names that only some layers have."""
    configure(folder, target_modules="all-linear")
    change(folder, lambda t: t.update({n.replace(".weight", ".default.weight"): t.pop(n) for n in list(t)}))
    adapter = read(folder, places, AdapterLimits(8, torch.bfloat16))
    assert all(piece.a.dtype == piece.b.dtype == torch.bfloat16 for some in adapter.linears.values() for piece in some)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, ["peft_type", "LOHA"]),
        ({"use_dora": True}, ["DoRA", "use_dora"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "lm_head"]),
        ({"bias": "all"}, ["bias", "all"]),
        ({"lora_bias": True}, ["lora_bias"]),
        ({"target_parameters": "mlp.experts.gate_up_proj"}, ["target_parameters"]),
        ({"use_bdlora": {"a": 1}}, ["use_bdlora"]),
        ({"arrow_config": {"a": 1}}, ["arrow_config"]),
        ({"kasa_config": {"a": 1}}, ["kasa_config"]),
        ({"monteclora_config": {"a": 1}}, ["monteclora_config"]),
        ({"init_lora_weights": "lora_ga"}, ["init_lora_weights", "lora_ga"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["init_lora_weights", "pissa"]),
        ({"target_modules": [3]}, ["target_modules"]),
        ({"target_modules": []}, ["target_modules"]),
        ({"r": 16}, ["r is 16", "max_lora_rank (8)"]),
        ({"r": 0}, ["r must be", "0"]),
        ({"r": "4"}, ["r must be"]),
        ({"r": True}, ["r must be"]),
        ({"r": 2}, ["rank 4", "says 2"]),
        ({"lora_alpha": None}, ["lora_alpha"]),
        ({"lora_alpha": float("inf")}, ["lora_alpha"]),
        ({"lora_alpha": 10**400}, ["lora_alpha must be a number from -1e+30 to 1e+30"]),
        ({"lora_alpha": -1e31}, ["lora_alpha must be a number from -1e+30 to 1e+30"]),
        ({"rank_pattern": {"q_proj": 99}}, ["rank_pattern", "99"]),
        ({"alpha_pattern": {"(a+)+$": 1}}, ["alpha_pattern", "(a+)+"]),
        ({"alpha_pattern": [1]}, ["alpha_pattern"]),
    ],
    ids=str,
)
def test_configurations_that_are_refused(
    folder: Path, places: AdapterPlaces, changes: dict[str, Any], words: list[str]
) -> None:
    configure(folder, **changes)
    with pytest.raises(CheckpointError) as refused:
        read(folder, places)
    assert all(word in str(refused.value) for word in words), refused.value


def drop_b(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{LAYER}.q_proj.lora_B.weight"]


def other_base(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.q_proj.lora_A.weight"] = torch.zeros(4, 65)


def large_rank(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.q_proj.lora_A.weight"] = torch.zeros(9, 64)


def three_axes(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.q_proj.lora_A.weight"] = torch.zeros(4, 8, 8)


def integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.q_proj.lora_A.weight"] = torch.zeros(4, 64, dtype=torch.int32)


def infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.q_proj.lora_B.weight"][0, 0] = float("inf")


def unknown_layer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 64)


def half_a_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 64)


def larger_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 64)
    tensors["base_model.model.lm_head.lora_B.weight"] = torch.zeros(321, 4)


def half_an_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 320)


def larger_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 321)
    tensors["base_model.model.model.embed_tokens.lora_embedding_B"] = torch.zeros(64, 4)


def embedding_as_matrix(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_A.weight"] = torch.zeros(4, 64)
    tensors["base_model.model.model.embed_tokens.lora_B.weight"] = torch.zeros(320, 4)


def matrix_as_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.q_proj.lora_embedding_A"] = torch.zeros(4, 64)


def other_embedding(tensors: dict[str, torch.Tensor]) -> None:
    """A resized one, beside its adapter."""
    tensors["base_model.model.model.embed_tokens.weight"] = torch.zeros(322, 64)


def only_copies(tensors: dict[str, torch.Tensor]) -> None:
    tensors.clear()
    tensors["base_model.model.lm_head.weight"] = torch.zeros(320, 64)


def magnitudes(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.q_proj.lora_magnitude_vector"] = torch.zeros(64)


def other_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.q_proj.weight"] = torch.zeros(64, 64)


def twice(tensors: dict[str, torch.Tensor]) -> None:
    """The fused matrix beside its parts."""
    tensors[f"{LAYER}.qkv_proj.lora_A.weight"] = torch.zeros(4, 64)
    tensors[f"{LAYER}.qkv_proj.lora_B.weight"] = torch.zeros(128, 4)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (drop_b, ["q_proj", "no lora_B"]),
        (other_base, ["q_proj", "[4, 65]", "[rank, 64]", "another model"]),
        (large_rank, ["rank 9", "max_lora_rank (8)"]),
        (three_axes, ["[4, 8, 8]"]),
        (integers, ["int32"]),
        (infinite, ["lora_B", "not finite"]),
        (unknown_layer, ["layers.99", "no layers"]),
        (half_a_head, ["lm_head", "no lora_B"]),
        (larger_head, ["lm_head", "[321, 4]", "[320, rank]", "another model"]),
        (half_an_embedding, ["embed_tokens", "no lora_embedding_B"]),
        (larger_embedding, ["embed_tokens", "[4, 321]", "[rank, 320]", "another model"]),
        (embedding_as_matrix, ["embed_tokens", "no lora_embedding_A"]),
        (matrix_as_embedding, ["q_proj", "lora_embedding_A"]),
        (other_embedding, ["embed_tokens.weight", "[322, 64]", "[320, 64]", "replace"]),
        (only_copies, ["no adapters"]),
        (magnitudes, ["DoRA"]),
        (other_tensor, ["q_proj.weight", "neither"]),
        (twice, ["qkv_proj", "as one and in parts"]),
        (dict.clear, ["no tensors"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tensors_that_are_refused(
    folder: Path, places: AdapterPlaces, edit: Callable[[dict[str, torch.Tensor]], None], words: list[str]
) -> None:
    change(folder, edit)
    with pytest.raises(CheckpointError) as refused:
        read(folder, places)
    assert all(word in str(refused.value) for word in words), refused.value


def test_numbers_that_overflow_when_they_are_stored(folder: Path, places: AdapterPlaces) -> None:
    """Rows of other adapters are multiplied by zero times these."""

    def large(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.q_proj.lora_B.weight"][0, 0] = 1e6

    change(folder, large)
    read(folder, places, AdapterLimits(8, torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"q_proj.lora_B.weight.*not finite in torch.float16"):
        read(folder, places, AdapterLimits(8, torch.float16))


def test_copies_of_the_base_model_are_compared(tmp_path: Path) -> None:
    """PEFT stores the whole embedding and head beside their adapters: equal ones are of no use, others are refused."""
    theirs = tiny_model("LlamaForCausalLM")
    ours: Any = build_model(theirs.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, dtype=torch.bfloat16)
    ours.load_weights(theirs.state_dict().items())
    places = AdapterPlaces(ours, ours.table())
    write_adapter(theirs, tmp_path, targets=("embed_tokens", "lm_head"))
    names = {
        "base_model.model.model.embed_tokens.base_layer.weight": theirs.model.embed_tokens.weight.detach(),
        "base_model.model.lm_head.base_layer.weight": theirs.lm_head.weight.detach(),
    }
    change(tmp_path, lambda tensors: tensors.update({name: tensor.clone() for name, tensor in names.items()}))
    adapter = read(tmp_path, places)
    assert len(adapter.tables) == len(adapter.linears) == 1
    for name in names:
        changed = names[name].clone()
        changed[319, 63] += 1
        change(tmp_path, lambda tensors, name=name, changed=changed: tensors.update({name: changed}))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=f"{name}.* replaces the model's own"):
            read(tmp_path, places)
        change(tmp_path, lambda tensors, name=name: tensors.update({name: names[name].clone()}))  # type: ignore[misc]
    assert read(tmp_path, places).digest == adapter.digest


EXPERTS = "base_model.model.model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def mixture() -> AdapterPlaces:
    config = tiny_config("Qwen3MoeForCausalLM").to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    model: Any = build_model(config, dtype=torch.float32)
    return AdapterPlaces(model, model.table())


def fewer_experts(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERTS}.lora_A.weight"] = torch.zeros(12, 32)
    tensors[f"{EXPERTS}.lora_B.weight"] = torch.zeros(64, 12)


def narrower_experts(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERTS}.lora_A.weight"] = torch.zeros(16, 31)


def uneven_experts(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERTS}.lora_A.weight"] = torch.zeros(17, 32)


def one_pair(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{EXPERTS}.lora_A.weight"], tensors[f"{EXPERTS}.lora_B.weight"]


def single_expert(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERTS}.3.down_proj.lora_A.weight"] = torch.zeros(4, 32)
    tensors[f"{EXPERTS}.3.down_proj.lora_B.weight"] = torch.zeros(64, 4)


@pytest.mark.parametrize(
    ("edit", "changes", "words"),
    [
        (fewer_experts, {}, ["down_proj", "rank 3", "says 4"]),
        (narrower_experts, {}, ["down_proj", "[16, 31]", "[4 * rank, 32]"]),
        (uneven_experts, {}, ["down_proj", "[17, 32]", "[4 * rank, 32]"]),
        (one_pair, {}, ["experts", "1 pairs", "2 target_parameters", "gate_up_proj, down_proj"]),
        (single_expert, {}, ["layers.1.mlp.experts", "as one and in parts"]),
        (dict.copy, {"target_parameters": []}, ["target_modules"]),
        (dict.copy, {"target_parameters": [], "target_modules": None}, ["experts", "target_parameters"]),
        (dict.copy, {"target_parameters": ["experts.other"]}, ["experts", "target_parameters"]),
        (dict.copy, {"target_parameters": [3]}, ["target_parameters"]),
        (dict.copy, {"target_parameters": ["a"] * 4097}, ["4097", "4096"]),
        (dict.copy, {"target_parameters": [f"a{n}" for n in range(17)]}, ["17 different names", "16"]),
        (dict.copy, {"r": 8}, ["rank 4", "says 8"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_stacked_experts_that_are_refused(
    tmp_path: Path, mixture: AdapterPlaces, edit: Callable[[dict[str, torch.Tensor]], None], changes: dict[str, Any],
    words: list[str],
) -> None:  # fmt: skip
    write_stacked(tiny_model("Qwen3MoeForCausalLM"), tmp_path)
    assert {len(experts) for experts in read(tmp_path, mixture).experts.values()} == {4}
    change(tmp_path, edit)
    configure(tmp_path, **changes)
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, mixture)
    assert all(word in str(refused.value) for word in words), refused.value


def test_files_that_are_missing_or_broken(folder: Path, places: AdapterPlaces) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        read(folder / "nowhere", places)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    content = weights.read_bytes()
    weights.write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        read(folder, places)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        read(folder, places)
    config.write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        read(folder, places)
    config.write_text("[]")
    with pytest.raises(CheckpointError, match="mapping"):
        read(folder, places)
    config.write_text(" " * (1 << 20) + "{}")
    with pytest.raises(CheckpointError, match="bytes"):
        read(folder, places)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read(folder, places)


def test_a_pickle_is_read_as_tensors_or_not_at_all(folder: Path, places: AdapterPlaces) -> None:
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    assert scales(read(folder, places)) == {1.5}
    torch.save({"a": Path("x")}, folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="not a usable weight file"):
        read(folder, places)
    (folder / "adapter_model.bin").write_bytes(b"\0" * (3 << 20))
    with pytest.raises(CheckpointError, match="bytes; an adapter of this model"):
        read(folder, places)


def test_only_layers_that_adapters_may_change(folder: Path, places: AdapterPlaces) -> None:
    with pytest.raises(CheckpointError, match="lora_target_modules"):
        read(folder, places, LIMITS._replace(targets=("q_proj", "k_proj")))
    everything = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert read(folder, places, LIMITS._replace(targets=everything)).linears


def test_a_pipe_in_place_of_the_configuration_is_refused(folder: Path, places: AdapterPlaces) -> None:
    path = folder / "adapter_config.json"
    path.unlink()
    os.mkfifo(path)
    refusals: list[str] = []

    def refused() -> None:
        with pytest.raises(CheckpointError, match=r"adapter_config\.json is not a regular file") as wrong:
            read(folder, places)
        refusals.append(str(wrong.value))

    reader = threading.Thread(target=refused, daemon=True)  # which would wait for ever
    reader.start()
    reader.join(60)
    assert refusals


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_patterns_are_limited_in_number(folder: Path, places: AdapterPlaces, key: str) -> None:
    configure(folder, **{key: {f"nowhere.{number}": 4 for number in range(4096)}})
    read(folder, places)
    configure(folder, **{key: {f"nowhere.{number}": 4 for number in range(4097)}})
    with pytest.raises(CheckpointError, match=f"{key} has 4097 entries; 4096 are allowed"):
        read(folder, places)


def test_more_tensors_than_the_model_has_places_for(folder: Path, places: AdapterPlaces) -> None:
    most = 3 * len(places.by_name)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {f"nowhere.{number}.lora_A.weight": torch.zeros(1) for number in range(most)}

    change(folder, add)
    with pytest.raises(CheckpointError, match=rf"it has \d+ tensors; an adapter of this model has {most} at most"):
        read(folder, places)


def test_a_digest_tells_weights_apart(folder: Path, places: AdapterPlaces) -> None:
    first = read(folder, places).digest
    assert first and read(folder, places).digest == first
    configure(folder, lora_alpha=7)
    scaled = read(folder, places).digest
    change(folder, lambda tensors: tensors[f"{LAYER}.q_proj.lora_B.weight"][0, :1].add_(1))
    assert len({first, scaled, read(folder, places).digest}) == 3


def test_weights_that_changed_are_not_read_again_under_the_same_serial(folder: Path, places: AdapterPlaces) -> None:
    adapters = WorkerAdapters(partial(read_adapter, places=places, limits=LIMITS), (), StepAdapters())

    def reading(serial: int, digest: str = "") -> AdapterRead:
        adapters.begin(AdapterSource(serial=serial, name="tuned", path=str(folder), digest=digest))
        (done,) = adapters.poll(60)
        return done

    first = reading(1)
    assert first.error is None and first.digest
    adapters.drop(1)
    assert reading(1, first.digest) == first
    adapters.drop(1)
    change(folder, lambda tensors: tensors[f"{LAYER}.q_proj.lora_B.weight"].add_(1))
    again = reading(1, first.digest)
    assert again.error is not None and "'tuned': the weights in" in again.error and "load it again" in again.error
    with pytest.raises(RuntimeError, match="no copy"):
        adapters.place([AdapterPlacement(1, 1)])
    second = reading(2)
    assert second.error is None and second.digest != first.digest, "another load reads what is there"
    adapters.close()


def test_a_read_that_never_ends_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.adapters.CLOSE_PATIENCE_S", 0.2)
    begun, go_on = threading.Event(), threading.Event()
    paths: list[str] = []

    def stuck(path: str) -> Any:
        paths.append(path)
        begun.set()
        go_on.wait(60)
        raise OSError("too late")

    adapters = WorkerAdapters(stuck, (), StepAdapters())
    for serial in (1, 2):
        adapters.begin(AdapterSource(serial=serial, name="tuned", path=str(serial)))
    assert begun.wait(60)
    adapters.close()
    go_on.set()
    errors: dict[int, Any] = {}
    while len(errors) < 2:
        errors |= {read.serial: read.error for read in adapters.poll(60)}
    assert paths == ["1"] and "removed before" in str(errors[2]), "what waited is not read any more"
