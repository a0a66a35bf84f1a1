"""Kernels are a value that a model holds: models of one process with other kernels, modes or dtypes keep what each was
given, in any order, and their matrices are stored as their own kernels want them."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base import env
from quire.config import EngineArgs
from quire.layers.stored import matrices_of
from quire.loader.load import make_model, reload_weights
from quire.ops.linear import linear
from quire.ops.norm import rms_norm
from quire.ops.op import FormTable, Kernels, op
from quire.ops.packed import likes_panels
from tests.paged import Paged
from tests.tiny_models import write_tiny

PROMPTS = [[7, 9, 30, 4, 11, 80, 21, 6, 45], [5, 6]]
TORCH_ONLY = Kernels(torch.device("cpu"))
HERE = Kernels.here("cpu")
needs_kernels = pytest.mark.skipif(HERE.library is None, reason="no compiled kernels")


class WithPanels(Kernels):
    """Kernels that want bfloat16 in panels, whatever the machine's want."""

    def of(self, op: Any) -> Any:
        return (lambda dtype, whole_texts=False: dtype is torch.bfloat16) if op is likes_panels else super().of(op)


def built(folder: Path, kernels: Kernels, **options: Any) -> Any:
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=64, device="cpu", **options)
    config = args.create_engine_config()
    model = make_model(config, kernels)
    reload_weights(model, config)
    return model


def logits(model: Any) -> list[torch.Tensor]:
    return Paged(model, PROMPTS, block_size=4).whole()


def forms(model: Any) -> set[str]:
    """What the model's linears multiply with."""
    return {matrix.name for _, matrix in matrices_of(model)}


@needs_kernels
@pytest.mark.parametrize("order", list(permutations(range(3)))[:4])
def test_models_of_one_process_share_no_choice(tmp_path: Path, order: tuple[int, ...]) -> None:
    write_tiny("LlamaForCausalLM", tmp_path, hidden_size=64, intermediate_size=96)
    panels = WithPanels(HERE.device, HERE.table, HERE.library)
    kinds: list[tuple[Kernels, dict[str, Any], set[str], bool]] = [
        (TORCH_ONLY, {"dtype": "float32"}, {"plain"}, False),
        (panels, {"dtype": "bfloat16"}, {"panels"}, True),
        (HERE, {"dtype": "float32", "quantization": "int8_wo"}, {"packed"}, True),
    ]
    alone = [logits(built(tmp_path, kernels, **options)) for kernels, options, _, _ in kinds]
    models = {i: built(tmp_path, kinds[i][0], **kinds[i][1]) for i in order}
    for i in (*order, *reversed(order)):
        kernels, options, wanted, is_whole = kinds[i]
        model = models[i]
        assert model.storage.kernels is kernels and forms(model) == wanted
        assert all(p.dtype in (getattr(torch, options["dtype"]), torch.uint8) for p in model.parameters())
        assert any(stretch._wholes for stretch in model._stretches) == is_whole
        for one, other in zip(logits(model), alone[i], strict=True):
            assert torch.equal(one, other)


@needs_kernels
def test_the_environment_changes_no_model_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    kernels = Kernels.here("cpu")
    model = built(tmp_path, kernels, dtype="float32")
    wanted = logits(model)
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    env.forget_all()
    assert Kernels.here("cpu").table is None
    assert kernels.of(linear).__name__ == "linear_native" and Kernels.here("cpu").of(linear) is TORCH_ONLY.of(linear)
    later = built(tmp_path, kernels, dtype="float32")  # made of the value, not of the environment
    assert all(stretch._wholes for stretch in later._stretches)
    assert not any(stretch._wholes for stretch in built(tmp_path, Kernels.here("cpu"), dtype="float32")._stretches)
    monkeypatch.delenv("QUIRE_CPU_KERNELS")
    env.forget_all()
    for one, other in zip(logits(later), wanted, strict=True):
        assert torch.equal(one, other)


def test_a_mode_belongs_to_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = Kernels(torch.device("cpu"), batch_invariant=True)
    assert fixed.of(rms_norm).__name__ == "rms_norm_apart" and TORCH_ONLY.of(rms_norm).__name__ != "rms_norm_apart"
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    assert TORCH_ONLY.of(rms_norm).__name__ != "rms_norm_apart" and Kernels.here("cpu").batch_invariant


def test_forms_of_a_table_belong_to_its_kernels() -> None:
    @op
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    table = FormTable("cpu")

    @table.made(double)
    def tripled(before: Any, kernels: Kernels) -> Any:
        return lambda x: before(x) + x

    x = torch.ones(2)
    assert Kernels(torch.device("cpu"), table).of(double)(x).tolist() == [3, 3]
    assert TORCH_ONLY.of(double)(x).tolist() == [2, 2] and double.on("cpu")(x).tolist() == [2, 2]
    assert not double.forms
