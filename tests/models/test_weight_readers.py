"""Only Linear.forward multiplies. What reads a matrix past it is listed here, and leaves it alone in a step with a
veto: one whose rows have adapters, or whose modules somebody watches."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.layers.adapters import StepAdapters
from quire.layers.batch import Batch, NoAttention
from quire.layers.linear import Linear
from quire.layers.places import attach
from quire.layers.stored import MatrixLayer
from quire.models.build import build_model
from quire.ops.cpu.native import kernels
from quire.ops.few import added_rows, few_rows, part_rows
from quire.ops.lora import LowRankPiece
from quire.ops.op import Kernels
from quire.quant.arena import Arena
from quire.quant.plain import PlainChoice
from quire.quant.scheme import MatrixShape, PlainMatrix, PlainScheme, Storage, WeightScheme
from tests.paged import Paged
from tests.tiny_models import tiny_config

PACKAGE = Path(__file__).parents[2] / "quire"
ROOMS = ("attention", "layers", "loader", "models", "sampling", "worker")
# Attributes by which the numbers of a matrix are reached, and who may name them, function by function.
NAMES = frozenset({
    "stored", "numbers", "read_plain", "read_few", "read_few_parts", "few_form", "few_parts", "packed", "weight",
})  # fmt: skip
MULTIPLIES = {  # through the stored matrix, which is all that an adapter or a hook must see
    "layers/adapters.py": {"ExpertAdapters.__init__", "ExpertAdapters._multiply_sharded", "ExpertAdapters.multiply"},
    "layers/linear.py": {
        "Linear.__init__", "Linear.is_plain", "Linear.may_be_few", "Linear._slots", "Linear.extra_repr",
    },
    "layers/embed.py": {
        "Embedding._vectors", "Embedding.slots", "Head.__init__", "Head.finish", "Head.forward",
        "Head.slots", "Head.take",  # rows, as an embedding reads them
    },
    "layers/moe.py": {"Experts._across", "Experts.forward", "Experts.in_parts", "Experts.slots"},
    "layers/places.py": {"AdapterPlaces._add_experts", "AdapterPlaces._add_linear", "attach", "shards_of"},
    "layers/stored.py": {
        "MatrixLayer.hold", "MatrixLayer.finish", "ExpertLayer.hold", "ExpertLayer.finish", "matrices_of",
        "fill_dummy_experts", "num_numbers",
    },
}  # fmt: skip
READS = {  # numbers for an op that does more: only in steps without a veto
    "layers/linear.py": {"Linear.read_plain", "Linear.read_few", "Linear.read_few_parts"},
    "layers/mlp.py": {"Mlp.join", "Mlp.few_matrices", "Mlp.in_parts", "Mlp.of_rounded"},
    "layers/moe.py": {"Moe.join"},
    "layers/mla.py": {"LatentAttention._carry"},
    "models/blocks.py": {"Few.__call__", "Few.matrices", "Few.rows", "InParts.__call__", "Rounding.__call__",
                         "_weights"},
}  # fmt: skip
OTHERS = {  # have a `weight` that is no matrix, or one that no adapter changes, or decode the numbers of a file
    "layers/attention.py": {"Attention.prep"},
    "layers/audio_stem.py": {"Convolution.__init__", "Convolution.forward", "Convolution.slots"},
    "layers/kda.py": {"Kda.__init__"},
    "layers/places.py": {"AdapterPlaces.is_weight_of"},  # compares an adapter's copy with the model's own
    "layers/norm.py": {"Norm.__init__", "Norm._choose", "Norm._choose_joined", "Norm.rule", "RankNorm._normalise"},
    "layers/relative.py": {"RelativeScores.__init__", "RelativeScores.forward", "RelativeScores.slots"},
    "layers/ssm.py": {"Conv.__init__", "Conv.slots", "DeltaNet.__init__", "Mamba.__init__", "Mamba2.__init__",
                      "ShortConv.__init__"},
    "layers/table.py": {"WeightTable._arranged", "WeightTable._fill"},
    "models/blocks.py": {"attention_kind"},
    "models/draft_heads.py": {"_ShiftedNorm.__init__", "_ShiftedNorm.forward", "_ShiftedNorm.slots"},
    "models/pooled.py": {"PoolingModel.finish_weights"},
    "models/heads.py": {"HeadDense.__init__", "HeadDense.forward", "HeadDense.slots"},
    "worker/balance.py": {"ExpertBalance._check", "ExpertBalance._move_to"},  # whole experts, between two steps
}  # fmt: skip


def readers(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, str]]:
    """(function, attribute) of every place that names one of NAMES."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield from readers(node, f"{inside}.{node.name}".lstrip("."))
            continue
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield inside, node.attr
        yield from readers(node, inside)


def found_readers() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            names = {function for function, _ in readers(ast.parse(path.read_text()))}
            if names:
                found[path.relative_to(PACKAGE).as_posix()] = names
    return found


def test_every_reader_is_listed() -> None:
    """A new one belongs into READS, and asks Batch.through_linears before it reads."""
    found = found_readers()
    for path, functions in found.items():
        listed = MULTIPLIES.get(path, set()) | READS.get(path, set()) | OTHERS.get(path, set())
        assert functions <= listed, f"{path}: {sorted(functions - listed)} read matrices and are not listed"
    for path, functions in (*MULTIPLIES.items(), *READS.items(), *OTHERS.items()):
        assert functions <= found.get(path, set()), f"{path}: {sorted(functions - found.get(path, set()))} are gone"


# --- numbers that only Linear.forward finds


class HiddenMatrix(PlainMatrix):
    """Looks plain, but what can be read is not a number; only `multiply` knows better."""

    multiplied = 0

    def finish(self) -> None:
        if not self.weight.isnan().any():
            self._true = self.weight.detach().clone()
            self.weight.data.fill_(float("nan"))

    def multiply(self, x: Tensor) -> Tensor:
        HiddenMatrix.multiplied += 1
        return self._linear(x, self._true, self.bias)

    def multiply_wide(self, x: Tensor) -> Tensor:
        return self.multiply(x.float())

    def take(self, index: Tensor) -> Tensor:
        return nn.functional.embedding(index, self._true)

    def multiply_with(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._linear(x, self._true, bias)


class Hidden(PlainScheme):
    def create(self, shape: MatrixShape) -> HiddenMatrix:
        return HiddenMatrix(shape, self)


class HiddenChoice(PlainChoice):
    def __init__(self, dtype: torch.dtype, arena: Arena, kernels: Kernels) -> None:
        super().__init__(dtype, arena, kernels)
        self._hidden = Hidden(dtype, arena, kernels)

    def of_matrix(self, name: str) -> WeightScheme:
        return self._hidden


def built(arch: str, held: Kernels, *, hidden: bool) -> Any:
    config = tiny_config(arch).to_dict() | {"architectures": [arch]}
    arena = Arena(held.device)
    choice = (HiddenChoice if hidden else PlainChoice)(torch.float32, arena, held)
    storage = Storage(torch.float32, arena, held, choice)
    model = build_model(config, dtype=torch.float32, storage=storage)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.2 + (1.0 if "norm" in name else 0.0))
    model.finish_weights()
    return model


class Echo(NoAttention):
    """Attends to the token itself: its value."""

    def run(self, q: Tensor, k: Tensor, v: Tensor | None, cache: Any, **rest: Any) -> Tensor:
        v = k[..., : rest["v_size"]] if v is None else v
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def forward(model: Any, *, veto: bool, slots: Tensor | None = None) -> Tensor:
    ids = torch.arange(3) + 5
    with torch.inference_mode():
        batch = Batch(ids, torch.arange(3), [Echo()], ids, 3, through_linears=veto, adapter_index=slots)
        return model.logits(model.forward(batch))


class Fused(Kernels):
    """References, of a device that would rather have few rows, or matmuls in parts, another way."""

    def __init__(self, rows: int, parts: int, added: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        object.__setattr__(self, "_most", {few_rows: rows, part_rows: parts, added_rows: added})

    def of(self, op: Any) -> Any:
        most = vars(self)["_most"].get(op)
        return op.reference if most is None else lambda *_: most


WAYS = [("LlamaForCausalLM", 3, 0), ("Qwen2ForCausalLM", 3, 0), ("Qwen3MoeForCausalLM", 3, 0),
        ("LlamaForCausalLM", 1, 8), ("Qwen3MoeForCausalLM", 1, 8), ("DeepseekV3ForCausalLM", 0, 0)]  # fmt: skip


@pytest.mark.parametrize(("arch", "rows", "parts"), WAYS)
def test_a_veto_sends_every_matmul_through_its_linear(arch: str, rows: int, parts: int) -> None:
    plain, hidden = (built(arch, Fused(rows, parts), hidden=hidden) for hidden in (False, True))
    fused, wanted = forward(plain, veto=False), forward(plain, veto=True)
    torch.testing.assert_close(fused, wanted, rtol=1e-4, atol=1e-4)
    assert forward(hidden, veto=False).isnan().any()  # without one, somebody reads past it: the test can fail
    HiddenMatrix.multiplied = 0
    assert torch.equal(forward(hidden, veto=True), wanted)
    linears = sum(isinstance(module, Linear) for module in hidden.modules())
    assert HiddenMatrix.multiplied >= linears


@pytest.mark.parametrize(("arch", "rows", "parts"), WAYS)
def test_whoever_watches_a_linear_sees_it(arch: str, rows: int, parts: int) -> None:
    """A hook on any matrix is a veto as long as it is there."""
    model = built(arch, Fused(rows, parts), hidden=True)
    wanted = forward(model, veto=True)
    linears = [module for module in model.layers.modules() if isinstance(module, MatrixLayer)]
    for linear in linears[:5]:
        seen: list[int] = []
        hook = linear.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        assert torch.equal(forward(model, veto=False), wanted) and seen
        hook.remove()
        assert forward(model, veto=False).isnan().any() and len(seen) == 1


def with_adapters(model: Any, held: Kernels) -> Any:
    """Adapters of every matmul in the second of two slots."""
    model.adapters = StepAdapters()
    draw = torch.Generator().manual_seed(1)
    for layer in attach(model, model.adapters, 2, 4, torch.empty(0), held):
        if isinstance(layer, Linear) and layer.adapters is not None:
            a, b = (torch.randn(shape, generator=draw) * 0.3 for shape in ((4, layer.in_size), (layer.out_size, 4)))
            layer.adapters.put(2, [LowRankPiece(0, layer.out_size, a, b, 0.5)])
    return model


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_matmuls_in_parts_add_adapters_unless_somebody_watches(arch: str) -> None:
    """And in longer steps than they say they add them in, every matmul goes through its Linear."""
    slots = torch.tensor([2, 0, 2], dtype=torch.int32)
    held = {added: Fused(1, 8, added) for added in (3, 2)}
    plain = with_adapters(built(arch, held[2], hidden=False), held[2])
    wanted, base = forward(plain, veto=False, slots=slots), forward(plain, veto=False)
    changed = (wanted - base).abs().amax(1)
    assert changed[0] > 0.1 and changed[2] > 0.1 and changed[1] < 1e-4  # of such an attention, rows are on their own
    fused = with_adapters(built(arch, held[3], hidden=False), held[3])
    torch.testing.assert_close(forward(fused, veto=False, slots=slots), wanted, rtol=1e-4, atol=1e-4)
    through, past = (with_adapters(built(arch, held[n], hidden=True), held[n]) for n in (2, 3))
    torch.testing.assert_close(forward(through, veto=False, slots=slots), wanted, rtol=1e-4, atol=1e-4)
    assert forward(past, veto=False, slots=slots).isnan().any()
    hook = past.layers[0].attn.o.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(forward(past, veto=False, slots=slots), wanted, rtol=1e-4, atol=1e-4)
    hook.remove()


@pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
def test_blocks_in_one_call_honour_the_veto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without an adapter stay in one call while those with one go through every Linear."""
    model = built("LlamaForCausalLM", Kernels.here("cpu"), hidden=False)
    calls: list[bool] = []
    run = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: calls.append(True) or run(self, x))
    found = []
    for veto in (False, True, False):
        paged = Paged(model, [[7, 9, 30, 4], [5, 6]], block_size=4)
        usual = model.forward
        monkeypatch.setattr(model, "forward", lambda batch, usual=usual, veto=veto: usual(vetoed(batch, veto)))
        calls.clear()
        found.append(torch.cat(paged.whole()))
        assert bool(calls) == veto
        monkeypatch.setattr(model, "forward", usual)
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def vetoed(batch: Batch, veto: bool) -> Batch:
    batch.through_linears = veto
    return batch
