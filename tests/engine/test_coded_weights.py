"""Matrices kept as codes for a device's kernels, here with their references on the CPU: what a checkpoint stores stays
as it is, numbers are rounded as they arrive, and no more is in memory than the codes and one matrix in work."""

from __future__ import annotations

import importlib
import json
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.config import EngineArgs
from quire.config.engine import replace
from quire.layers.stored import matrices_of, num_numbers
from quire.loader.coded_storage import coded_storage
from quire.loader.load import load_model, reload_weights
from quire.loader.online import coder_of
from quire.loader.sharded import weights_of, write_safetensors
from quire.loader.to_device import Sender
from quire.models.build import build_model
from quire.ops.coded import MIDDLE, CodedWeight, coded_linear, decode_weight, open_chunks
from quire.ops.op import Kernels
from quire.quant.arena import Arena
from quire.quant.coded import AffineCodes, Grid
from quire.quant.coded_scheme import CodedParts, CodedScheme
from quire.quant.device_codes import device_codes, join, round_to_fp8
from quire.quant.scheme import MatrixShape, by_rows
from quire.quant.shard import ALONE, ShardGroup, Span
from quire.schema.errors import ConfigError
from tests.engine.test_quantized_formats import FORMS
from tests.paged import Paged
from tests.quantized import Form, write, write_files
from tests.thread_ranks import on_ranks
from tests.tiny_models import write_tiny

IDS = [list(range(4, 40)), [300, 7, 7, 25]]
TORCH = Kernels(torch.device("cpu"))
KINDS = {  # of a fused matrix: kinds of its parts once they are loaded; None: decoded
    "gptq-4-sym": "int4", "gptq-4-asym": "int4", "gptq-4-v2": "int4", "gptq-3-asym": "int4", "gptq-2": "int4",
    "gptq-8-rows": "int8", "gptq-4-act-order": None, "awq": "int4", "fp8-tensor-static": "fp8", "fp8-rows-e5m2": None,
    "fp8-blocks": None, "fbgemm-fp8": "fp8", "ct-w8a8-int8": "int8", "ct-w8-asym": "int8", "ct-w8a8-fp8": "fp8",
    "ct-fp8-naive": "fp8", "ct-w4a16": "int4", "ct-w4a16-asym": "int4", "ct-w3-spare-bits": "int4",
    "ct-w3-act-order": None, "ct-w8a16": "int8", "ct-nvfp4": "fp4", "ct-mxfp4": "fp4", "ct-mxfp8": "fp8",
    "modelopt-fp8": "fp8",
    "modelopt-nvfp4": "fp4", "modelopt-mxfp8": "fp8", "modelopt-fp8-rows": "fp8",
    "modelopt-nvfp4-w4a16": "fp4", "bnb-nf4": None, "bnb-nf4-nested": None, "bnb-fp4": None,
    "bnb-int8": "int8", "hqq-8": None, "hqq-4": "int4", "hqq-4-floats": "int4", "hqq-4-axis-0": None, "hqq-3": "int4",
    "hqq-2": "int4", "hqq-1": "int4", "ao-int8": "int8", "ao-int8-32-asym": "int8", "ao-int8-int8": "int8",
    "ao-fp8": "fp8", "ao-fp8-fp8-rows": "fp8", "ao-fp8-fp8-tensor": "fp8", "ao-fp8-blocks": "fp8", "ao-int4": "int4",
    "ao-int4-tiles": "int4", "ao-intx-4": "int4", "ao-intx-4-asym-int8": "int4", "ao-intx-3": "int4",
    "quark-fp8-tensor-static": "fp8", "quark-fp8-rows": "fp8", "quark-fp8-blocks": "fp8", "quark-int8-rows": "int8",
    "quark-int8-tensor": "int8", "quark-mxfp4": "fp4", "quark-mxfp6-e3m2": None, "quark-mxfp6-e2m3": None,
    "quark-int4": "int4", "quark-uint4-in-order": "int4", "auto-round": "int4", "auto-round-awq": "int4",
    "auto-round-gptqmodel": "int4", "auto-round-plain": "int4",
    "ct-w8a8-int8-static": "int8", "ct-w4a8-int8": "int8", "ct-w4a8-fp8": "int4", "ct-nvfp4-w4a4": "fp4",
}  # fmt: skip


def as_on_a_device(folder: Path, **options: Any) -> Any:
    """The model that a GPU would load, with float16 numbers, on the CPU."""
    args = EngineArgs(model=str(folder), dtype="float16", device="cpu", **options)
    config = args.create_engine_config()
    about = config.model_config
    model = build_model(
        about.hf_config, dtype=torch.float16, device="cpu", max_model_len=about.max_model_len,
        storage=coded_storage(config, TORCH),
    )  # fmt: skip
    reload_weights(model, config)
    return model


def coded_of(model: Any) -> dict[str, CodedParts]:
    return {name: matrix for name, matrix in matrices_of(model) if isinstance(matrix, CodedParts)}


def test_every_format_is_named() -> None:
    assert set(KINDS) == set(FORMS)


def test_the_docs_have_the_table_of_the_tests() -> None:
    table = importlib.import_module("tests.quantized_table")  # which reads the tables of this file
    page = table.PAGE.read_text()
    assert table.written(page) == page, "run python -m tests.quantized_table"


@pytest.mark.parametrize("name", FORMS)
def test_codes_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    form, _, _ = FORMS[name]
    write_files(tmp_path, "LlamaForCausalLM", form, num_hidden_layers=2)
    plain = EngineArgs(model=str(tmp_path), dtype="float32", device="cpu").create_engine_config()
    whole = load_model(plain, "cpu")
    decoded = dict(matrices_of(whole))
    model = as_on_a_device(tmp_path)
    assert num_numbers(model, model.parameters()) == num_numbers(None, whole.parameters())
    matrices = coded_of(model)
    assert len(matrices) == 8
    for where, matrix in matrices.items():
        wanted = decoded[where].numbers
        kinds = {part.kind if isinstance(part, CodedWeight) else None for part in matrix.parts.values()}
        assert kinds == {KINDS[name]}, where
        assert list(matrix.parts) == [""] if len(matrix.shape.parts) > 1 else len(matrix.parts) == 1
        for part in matrix.coded():
            torch.testing.assert_close(decode_weight(part, torch.float32), wanted, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(matrix.decoded(), wanted.half(), rtol=2e-3, atol=1e-4)
        x = torch.randn(3, wanted.shape[1], generator=torch.Generator().manual_seed(1)).half()
        torch.testing.assert_close(matrix.multiply(x).float(), x.float() @ wanted.t(), rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("name", ["gptq-4-sym", "ct-w8a8-fp8"])
def test_a_tensor_that_holds_some_parts_of_a_matrix(tmp_path: Path, name: str) -> None:
    form, _, _ = FORMS[name]
    write_files(tmp_path, "Qwen3_5ForCausalLM", Form(form.config, form.write, r"in_proj_(qkv|z)\.weight$"))
    plain = EngineArgs(model=str(tmp_path), dtype="float32", device="cpu").create_engine_config()
    wanted = dict(matrices_of(load_model(plain, "cpu")))["layers.0.attn.up"].numbers
    up = coded_of(as_on_a_device(tmp_path))["layers.0.attn.up"]
    assert tuple(up.shape.parts) == ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z") and up.coded()
    torch.testing.assert_close(up.decoded(), wanted.half(), rtol=2e-3, atol=1e-4)


def test_parts_that_are_coded_differently_stay_apart(tmp_path: Path) -> None:
    form, _, _ = FORMS["gptq-4-sym"]
    hf = write(tmp_path, "LlamaForCausalLM", Form(form.config, form.write, r"(q_proj|up_proj)\.weight$"))
    model = as_on_a_device(tmp_path)
    qkv = coded_of(model)["layers.0.attn.qkv"]
    assert [isinstance(part, CodedWeight) for part in qkv.parts.values()] == [True, False, False]
    found = Paged(model, IDS, block_size=16).step([(row, len(ids)) for row, ids in enumerate(IDS)])
    with torch.no_grad():
        wanted = [hf(torch.tensor([ids])).logits[0] for ids in IDS]
    for mine, right in zip(found, wanted, strict=True):
        assert (mine.float() - right).norm() < 0.02 * right.norm()


@pytest.mark.parametrize(("form", "error"), [("fp8", 0.04), ("int8", 0.01), ("int4", 0.2)])
def test_numbers_are_rounded_while_they_arrive(tmp_path: Path, form: str, error: float) -> None:
    write_tiny("Qwen3ForCausalLM", tmp_path)
    config = EngineArgs(model=str(tmp_path), dtype="float16", device="cpu").create_engine_config()
    config = replace(config, **{"model_config.weight_form": form})
    about = config.model_config
    model = build_model(
        about.hf_config, dtype=torch.float16, device="cpu", max_model_len=64, storage=coded_storage(config, TORCH)
    )
    reload_weights(model, config)
    plain = dict(matrices_of(load_model(EngineArgs(model=str(tmp_path), dtype="float32", device="cpu")
                                        .create_engine_config(), "cpu")))  # fmt: skip
    matrices, coder = coded_of(model), coder_of(form)
    assert len(matrices) >= 8 and not any("head" in name or "embed" in name for name in matrices)
    assert coder is not None
    for name, matrix in matrices.items():
        (part,) = matrix.parts.values()
        assert isinstance(part, CodedWeight) and part.kind == form and part.rounds == (form == "fp8")
        wanted = plain[name].numbers
        assert 0 < (matrix.decoded().float() - wanted).norm() < error * wanted.norm()
        made = coder(wanted)  # the numbers of the file, which is in float32, not those in the model's dtype
        right = made if isinstance(made, CodedWeight) else device_codes(made)
        assert torch.equal(decode_weight(part, torch.float32), decode_weight(right, torch.float32))


HEADS = [("int4", "int8"), ("int8", "int8"), ("fp8", "int8"), ("fp8", "fp8"), ("fp8", "")]


def with_rounded_head(folder: Path, form: str, head: str, group: ShardGroup = ALONE) -> Any:
    config = EngineArgs(model=str(folder), dtype="float16", device="cpu").create_engine_config()
    config = replace(config, **{"model_config.weight_form": form, "model_config.head_form": head})
    model = build_model(
        config.model_config.hf_config, dtype=torch.float16, device="cpu", max_model_len=64,
        storage=coded_storage(config, TORCH, group),
    )  # fmt: skip
    reload_weights(model, config)
    return model


@pytest.mark.parametrize(("form", "head"), HEADS)
def test_an_output_matrix_that_is_rounded_too(tmp_path: Path, form: str, head: str) -> None:
    """To 8 bits, as on a CPU; not one that is the embedding as well. Its inputs may be rounded where those of other
    matrices are."""
    for tied in (False, True):
        folder = tmp_path / f"tied-{tied}"
        write_tiny("Qwen3ForCausalLM", folder, tie_word_embeddings=tied)
        model = with_rounded_head(folder, form, head)
        heads = [matrix for key, matrix in coded_of(model).items() if "head" in key]
        assert len(heads) == (0 if tied or not head else 1)
        for matrix in heads:
            (part,) = matrix.parts.values()
            assert isinstance(part, CodedWeight) and part.kind == head and part.group == part.width
            assert part.rounds == (form == "fp8")
            x = torch.randn(3, part.width, generator=torch.Generator().manual_seed(0)).half()
            wanted = x.float() @ matrix.decoded().float().t()
            assert (model.head(x).float() - wanted).norm() < 2e-3 * wanted.norm() > 0
            assert torch.equal(model.head.take(torch.tensor([5, 2])), matrix.decoded()[[5, 2]])
            assert {"head.codes", "head.scale"} <= set(weights_of(model))  # what save_sharded_state writes


@pytest.mark.parametrize("head", ["int8", "fp8"])
def test_ranks_that_share_a_rounded_output_matrix(tmp_path: Path, head: str) -> None:
    write_tiny("Qwen3ForCausalLM", tmp_path, tie_word_embeddings=False)
    whole = with_rounded_head(tmp_path, "fp8", head)
    x = torch.randn(3, whole.head.width, generator=torch.Generator().manual_seed(0)).half()

    def shared(group: ShardGroup) -> tuple[int, torch.Tensor]:
        model = with_rounded_head(tmp_path, "fp8", head, group)
        (part,) = model.head.stored.parts.values()
        assert isinstance(part, CodedWeight) and part.kind == head
        return part.rows, model.head(x)

    (first, logits), (second, others) = on_ranks(2, shared)
    assert 0 < first < first + second == whole.head.rows.count
    assert torch.equal(logits, others)
    torch.testing.assert_close(logits, whole.head(x), rtol=1e-3, atol=1e-3)  # of the same codes: rows are rounded alone


class Peak:
    """Counts bytes of what the scheme's coder makes and takes."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, numbers: torch.Tensor) -> CodedWeight:
        self.seen.append(numbers.numel())
        return round_to_fp8(numbers)


def test_a_matrix_is_rounded_part_by_part() -> None:
    """Never the whole of a fused matrix in 16 bits: its parts are codes before the next arrives."""
    peak = Peak()
    scheme = CodedScheme(torch.float16, Arena(torch.device("cpu")), TORCH, peak)
    matrix = scheme.create(MatrixShape({"q": Span.all(48), "k": Span.all(16), "v": Span.all(16)}, Span.all(64)))
    assert not list(matrix.parameters())  # nothing is allocated before numbers arrive
    numbers = torch.randn(80, 64, generator=torch.Generator().manual_seed(0)).half()
    targets = {name: next(matrix.slots((name,))).target for name in ("v", "q", "k")}
    for name, part in zip(("q", "k", "v"), numbers.split([48, 16, 16]), strict=True):
        targets[name].copy_(part)  # type: ignore[union-attr]
        sizes = [p.numel() * p.element_size() for _, p in matrix.parameters()]
        assert sum(sizes) <= 80 * 64 + 80 * 4
        assert all(p.dtype in (torch.float8_e4m3fn, torch.float32) for _, p in matrix.parameters())
    assert peak.seen == [48 * 64, 16 * 64, 16 * 64]
    assert [name for name, _ in matrix.parameters()] == ["codes", "scale"]
    (whole,) = matrix.coded()
    for found, wanted in zip(whole.tensors().values(), round_to_fp8(numbers).tensors().values(), strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


class Memory:
    """Bytes of everything that torch's operations made in threads that load, and that somebody still holds."""

    def __init__(self) -> None:
        self.alive = self.peak = 0
        self._seen: dict[int, Any] = {}
        self._lock = RLock()

    def see(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            if storage._cdata not in self._seen:
                forget = partial(self._forget, storage._cdata, storage.nbytes())
                self._seen[storage._cdata] = weakref.finalize(storage, forget)
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)

    def _forget(self, key: int, size: int) -> None:
        with self._lock:
            del self._seen[key]
            self.alive -= size

    def watch_thread(self) -> None:
        """This one, from now on."""
        _Watched(self).__enter__()


class _Watched(TorchDispatchMode):
    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and not made.is_meta and made.untyped_storage()._cdata not in given:
                self._memory.see(made.untyped_storage())
        return out


def sizes_of(folder: Path) -> int:
    """Write a checkpoint whose embeddings and head come last, when the rest lies there; bytes of a layer in it."""
    about: dict[str, Any] = {
        "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(about))
    kinds = {"self_attn.q": (256, 256), "self_attn.k": (128, 256), "self_attn.v": (128, 256), "self_attn.o": (256, 256),
             "mlp.gate": (512, 256), "mlp.up": (512, 256), "mlp.down": (256, 512)}  # fmt: skip
    shapes = {f"model.layers.{i}.{kind}_proj.weight": shape for i in range(4) for kind, shape in kinds.items()}
    shapes |= {
        f"model.layers.{i}.{name}_layernorm.weight": (256,) for i in range(4) for name in ("input", "post_attention")
    }
    shapes |= {"model.norm.weight": (256,), "model.embed_tokens.weight": (8192, 256), "lm_head.weight": (8192, 256)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}
    write_safetensors(str(folder / "model.safetensors"), tensors)
    return sum(tensor.nbytes for name, tensor in tensors.items() if ".0." in name)


@pytest.mark.parametrize("whole", ["", "quire.quant.coded_scheme.by_rows", "quire.layers.table.by_rows"])
@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_rounding_at_load_takes_no_more_than_what_stays_and_a_layer(
    form: str, whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several threads, whose every tensor is counted. Without pieces (`whole`) the same count goes beyond it."""
    layer, memory = sizes_of(tmp_path), Memory()
    for where in ("quire.quant.coded_scheme.by_rows", "quire.layers.table.by_rows"):
        monkeypatch.setattr(where, partial(by_rows, most=1 << 40 if where == whole else layer // 46))
    monkeypatch.setattr(Sender, "send", lambda self, tensor: tensor.clone())  # as to another device
    monkeypatch.setattr(
        "quire.loader.load.ThreadPoolExecutor", partial(ThreadPoolExecutor, initializer=memory.watch_thread)
    )
    monkeypatch.setattr("quire.loader.load.one_thread_per_operation", lambda: nullcontext(4))
    config = EngineArgs(model=str(tmp_path), dtype="float16", device="cpu").create_engine_config()
    config = replace(config, **{"model_config.weight_form": form, "model_config.quantization": "fp8"})
    model = build_model(
        config.model_config.hf_config, dtype=torch.float16, device="cpu", max_model_len=64,
        storage=coded_storage(config, TORCH),
    )  # fmt: skip
    reload_weights(model, config)
    stays = sum(part.nbytes for matrix in coded_of(model).values() for _, part in matrix.parameters())
    assert memory.alive == stays > 0  # plain parameters were there before
    assert (memory.peak <= stays + layer) == (not whole)


def test_rows_rounded_apart_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)).half()
    flat = numbers.clone()
    flat[:40] = 0  # scales that float16 holds, in the first pieces only
    for form in ("fp8", "int8", "int4"):
        scheme = CodedScheme(torch.float16, Arena(torch.device("cpu")), TORCH, coder_of(form))
        for given in (numbers, numbers[:, :96], flat, flat[:, :96]):
            monkeypatch.setattr("quire.quant.coded_scheme.by_rows", by_rows)
            wanted = scheme.stored_form(given)
            for rows in (1, 32, 95):
                monkeypatch.setattr("quire.quant.coded_scheme.by_rows", partial(by_rows, most=rows * given[0].nbytes))
                found = scheme.stored_form(given)
                assert isinstance(found, CodedWeight) and isinstance(wanted, CodedWeight)
                for one, other in zip(found.tensors().values(), wanted.tensors().values(), strict=True):
                    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_joined_parts_are_those_of_the_whole() -> None:
    from tests.coded_cases import WEIGHTS, weight_of  # the cases of the kernels

    for made in WEIGHTS.values():
        parts = [weight_of(made._replace(rows=rows)) for rows in (16, 48, 32)]
        whole = join(parts)
        assert whole is not None and whole.rows == 96
        wanted = torch.cat([decode_weight(part, torch.float32) for part in parts])
        assert torch.equal(decode_weight(whole, torch.float32), wanted)
    one, other = weight_of(WEIGHTS["int4-zeros"]), weight_of(WEIGHTS["int4-zeros"]._replace(zeros=False))
    both = join([one, other])
    assert both is not None
    assert torch.equal(decode_weight(both, torch.float32)[one.rows :], decode_weight(other, torch.float32))
    assert join([one, weight_of(WEIGHTS["int4-rows-zeros"]._replace(width=384, group=384))]) is None


@pytest.mark.parametrize(
    ("config", "kind", "group"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}, "int4", 32),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, "int4", 32),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8", 64),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}, "fp8", 32),
    ],
)
def test_dummy_weights_of_a_quantized_checkpoint(tmp_path: Path, config: Any, kind: str, group: int) -> None:
    write_tiny("Qwen3ForCausalLM", tmp_path, hidden_size=64, intermediate_size=64)
    about = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "model.safetensors").unlink()
    models = [as_on_a_device(tmp_path, load_format="dummy") for _ in range(2)]
    one, other = (coded_of(model)["layers.0.mlp.up"] for model in models)
    (part,), (again,) = one.coded(), other.coded()
    assert part.kind == kind and part.group == group and torch.equal(part.scale, again.scale)
    numbers = decode_weight(part, torch.float32)
    assert 0.018 < numbers.std() < 0.022 and not torch.equal(numbers[:64], numbers[64:])
    assert torch.isfinite(coded_linear(torch.ones(2, 64), part)).all()


def test_weights_that_replace_others_lie_where_those_did(tmp_path: Path) -> None:
    """Captured graphs read that memory. What is coded otherwise cannot lie there, and is refused."""
    numbers = torch.randn(80, 64, generator=torch.Generator().manual_seed(0)).half()
    for coder in (coder_of("fp8"), coder_of("int4"), None):
        scheme = CodedScheme(torch.float16, Arena(torch.device("cpu")), TORCH, coder)
        matrix = scheme.create(MatrixShape({"q": Span.all(48), "k": Span.all(32)}, Span.all(64)))
        for given in (numbers, numbers.flip(0)):
            for name, part in zip(("k", "q"), given.split([32, 48]), strict=True):
                matrix.keep(name, part)
            matrix.finish()
            places = [p.data_ptr() for _, p in matrix.parameters()]
            if given is numbers:
                first = places
        assert places == first
        again = scheme.create(matrix.shape)
        for name, part in zip(("k", "q"), numbers.flip(0).split([32, 48]), strict=True):
            again.keep(name, part)
        assert torch.equal(matrix.decoded(), again.decoded())
    other = CodedScheme(torch.float16, Arena(torch.device("cpu")), TORCH, coder_of("fp8")).create(matrix.shape)
    other.keep("q", numbers[:48])
    other.keep("k", numbers[48:])
    other.finish()
    with pytest.raises(ConfigError, match="must be coded as those were"):
        other._write("q", numbers[:48])


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_zero_points_between_codes_lose_no_more_than_numbers_of_16_bits(bits: int) -> None:
    """Kernels subtract the zero point in bfloat16, as here; numbers are as large as the codes' range."""
    draw = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (48, 128), generator=draw, dtype=torch.uint8)
    zero = ((1 << bits) - 1) / 2 + torch.rand((48, 2), generator=draw) - 0.5
    coded = AffineCodes(codes, bits, Grid(torch.ones(48, 2), 1, 64), Grid(zero, 1, 64))
    weight = device_codes(coded)
    assert weight is not None and weight.zero is not None
    torch.testing.assert_close(decode_weight(weight, torch.float32), coded.numbers(), rtol=1e-5, atol=1e-6)
    less = (weight.zero.t() - MIDDLE).bfloat16().repeat_interleave(64, 1)
    found = (open_chunks(weight.codes).bfloat16() - MIDDLE) - less
    assert (found.float() - coded.numbers()).abs().max() <= 2**-8 * coded.numbers().abs().max()


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("zero", [0, 1, 7, 8, 9, 16])
def test_one_zero_point_for_all_codes(zero: int, bits: int, group: int) -> None:
    """Codes of every value lie in both halves of a byte; none spills into the other."""
    codes = torch.arange(48 * 128).view(48, 128).mul(7).remainder(1 << bits).to(torch.uint8)
    scale = torch.rand((48, 128 // group), generator=torch.Generator().manual_seed(zero)) + 0.5
    coded = AffineCodes(codes, bits, Grid(scale, 1, group), zero)
    weight = device_codes(coded)
    assert weight is not None and weight.kind == "int4"
    torch.testing.assert_close(decode_weight(weight, torch.float32), coded.numbers(), rtol=1e-6, atol=1e-7)


def test_forms_that_round_nothing() -> None:
    assert coder_of("stored") is None and coder_of("plain") is None
