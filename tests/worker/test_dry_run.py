"""The dry run of a start lists every kernel that serving wants afterwards: else somebody's first token waits for a
compiler. Runs without a GPU: no kernel is launched, here or there; both lists are what Triton would have compiled."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
    pytest.skip("needs Triton's compiler and no GPU", allow_module_level=True)

from quire import LLM, LoRARequest, SamplingParams
from quire.attention.cross import WithPagedCross
from quire.attention.triton import TritonAttention
from quire.base import env
from quire.config.engine import EngineConfig, replace
from quire.layers.linear import Linear
from quire.layers.moe import Moe
from quire.loader import load as load_module
from quire.loader.coded_storage import coded_storage
from quire.ops.lora import most_columns
from quire.ops.op import Kernels
from quire.ops.triton import launch, register, warm
from quire.quant.scheme import Storage
from quire.quant.shard import ALONE, ShardGroup
from quire.sampling.sampler import Sampler
from quire.schema.step import Mask
from quire.worker import mixed_graphs
from quire.worker import worker as module
from quire.worker.capture import Capturer
from quire.worker.device_inputs import DeviceInputs, GraphFields
from quire.worker.inputs import StepShape
from quire.worker.mixed_graphs import MixedStep
from quire.worker.runner import ModelRunner
from tests import seq2seq_models
from tests.divided_case import Twins
from tests.fake_triton import without_gpu
from tests.gguf_blocks import write_model
from tests.tiny_adapters import linear_modules, write_adapter
from tests.tiny_models import VOCAB, make_tiny, write_tiny
from tests.worker.test_staged import UncapturedGraphs, UncapturedMixed

SIZES = (1, 2, 4, 8, 16, 24, 32, 64, 72, 128)
MIXED = tuple(size for size in mixed_graphs.SIZES if size <= 1024)
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 128, "max_num_batched_tokens": 512,
    "block_size": 64, "async_scheduling": True, "num_gpu_blocks_override": 2000, "load_format": "dummy",
    "skip_tokenizer_init": True,
}  # fmt: skip


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its forms too. Before `as_on_a_gpu`."""
    about = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(register, "_is_hopper", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    register._table.cache_clear()
    yield
    register._table.cache_clear()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ops' forms for CUDA, Triton's attention, staged inputs and the captured step, all on CPU tensors."""
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")  # a GPU has none of them
    env.forget_all()
    forms = Kernels(torch.device("cuda"), register.compiled()[0])
    monkeypatch.setattr(launch, "current_stream", lambda: lambda: 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, b=None: x.new_zeros((*x.shape[:-1], len(w))))
    usual = Kernels.of

    def of(self: Kernels, op: Any) -> Any:
        found = usual(forms, op)
        return usual(self, op) if found is op.reference else found

    monkeypatch.setattr(Kernels, "of", of)
    plain_make, plain_take = module.Worker._make_runner, ModelRunner._take

    def make_runner(self: module.Worker, layout: Any) -> ModelRunner:
        for layer in self.get_model().modules():
            if isinstance(layer, Moe):
                layer.experts.stored.one_by_one = False  # a CPU's way
        attention = TritonAttention()
        attention._sms[torch.device("cpu")] = 132
        backend = WithPagedCross(attention)
        parts, self._parts = self._parts, dataclasses.replace(self._parts, select_backend=lambda *_: backend)
        runner = plain_make(self, layout)
        self._parts = parts
        fields = GraphFields(adapters=self._adapters is not None, encoders=runner.rows.has_cross)
        runner.inputs = DeviceInputs(runner.rows, 1024, fields)
        capturer = Capturer(torch.device("cpu"))
        runner.graphs = UncapturedGraphs(
            SIZES, runner.model, runner.backend, runner.inputs, runner.sampler.plain, capturer, max_context=512
        )
        if self._adapters is not None:
            for layer in runner.model.modules():
                if isinstance(layer, Linear) and layer.adapters is not None and layer.adapters.low.stacks is None:
                    like = torch.empty(0, dtype=torch.bfloat16)
                    layer.adapters.low.set_up_stacks(
                        layer.parts.values(),
                        layer.in_size,
                        8,
                        like,
                        as_columns=Kernels.here("cpu").of(most_columns)() > 0,
                    )
            runner.adapter_graphs = UncapturedGraphs(
                SIZES, runner.model, runner.backend, runner.inputs, runner.sampler.plain, capturer, max_context=512,
                adapters=self._adapters.step,
            )  # fmt: skip
        if runner.rows.has_cross:
            return runner
        runner.mixed = DryMixed(MIXED, runner.model, runner.backend, runner.inputs, capturer)
        runner.mixed.capture()
        return runner

    def take(self: ModelRunner, flight: Any, result: torch.Tensor) -> Any:
        with torch.inference_mode():
            result.zero_()  # nothing was launched, so nothing was chosen
        return plain_take(self, flight, result)

    monkeypatch.setattr(module.Worker, "_make_runner", make_runner)
    monkeypatch.setattr(ModelRunner, "_take", take)
    with without_gpu():
        yield
    env.forget_all()


class DryMixed(UncapturedMixed):
    """The room of all sizes is made by the largest, as it is where steps are captured."""

    def send(self, shape: StepShape) -> MixedStep | None:
        if not self.used:
            self.run_uncaptured(self.sizes[-1])
        return super().send(shape)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step that is not sampled plainly comes with a grammar's mask: the tiny models have no tokenizer for one."""
    plain, plain_call = ModelRunner._sample_all, Sampler.__call__

    def call(self: Sampler, logits: torch.Tensor, *args: Any, **named: Any) -> Any:
        return plain_call(self, logits.zero_(), *args, **named)  # nothing was launched, so they are any numbers or none

    def sample_all(self: ModelRunner, flight: Any, mask: Mask | None, pending: Any) -> None:
        words = -(-self.sampler.rows.vocab_size // 32)
        index = tuple(flight.sample_grants)
        plain(self, flight, Mask(index=index, rows=b"\xff" * (4 * words * len(index)), words=words), pending)

    monkeypatch.setattr(Sampler, "__call__", call)
    monkeypatch.setattr(ModelRunner, "_sample_all", sample_all)


def serve(llm: LLM, rng: random.Random) -> None:
    """Short and long prompts, chunks, many decodes, a shared prefix, filters; and all that the sampler does beside the
    plain choice, under masks."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(4, VOCAB) for _ in range(count)]

    def run(prompts: list[list[int]], outputs: int, **sampling: Any) -> None:
        params = SamplingParams(ignore_eos=True, max_tokens=outputs, detokenize=False, **sampling)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    run([ids(5)], 3, temperature=0.0)
    run([ids(rng.randint(1, 300)) for _ in range(40)], 6, temperature=0.6)
    shared = ids(320)
    run([[*shared, *ids(8)]], 1, temperature=0.0)
    run([[*shared, *ids(rng.randint(3, 60))] for _ in range(70)], 5, temperature=1.0, top_k=20)
    run([ids(480), ids(3), ids(480), ids(40)], 4, temperature=0.0)
    run([ids(10) for _ in range(128)], 3, temperature=0.0)
    more: list[dict[str, Any]] = [
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}, {"min_p": 0.1},
        {"logit_bias": {7: 2.0}}, {"logprobs": 3}, {"prompt_logprobs": 2}, {"allowed_token_ids": [4, 5, 6]},
        {"min_tokens": 2, "stop_token_ids": [9]},
    ]  # fmt: skip
    for sampling in more:
        run([ids(rng.randint(1, 90)) for _ in range(rng.choice((1, 2, 40)))], 3, temperature=0.7, **sampling)


# Layers that differ want kernels of their own, and those that are alike the same ones.
LAYERS = {
    "Qwen3ForCausalLM": 1, "Qwen3MoeForCausalLM": 1, "Gemma3ForCausalLM": 6, "DeepseekV3ForCausalLM": 2,
    "Gemma3nForCausalLM": 6,
}  # fmt: skip


@pytest.mark.parametrize("arch", LAYERS)
def test_serving_wants_no_kernel_that_was_not_listed(
    arch: str, as_on_a_gpu: None, masks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(arch, tmp_path, num_hidden_layers=LAYERS[arch])
    wanted = check_listed(str(tmp_path), lambda llm: serve(llm, random.Random(3)), monkeypatch)
    assert len(wanted) > 15 and any(job["name"] == "_allow_kernel" for job in wanted)


@pytest.mark.parametrize(("arch", "size", "interleave"), [("Qwen3ForCausalLM", 4, 1), ("DeepseekV3ForCausalLM", 2, 16)])
def test_divided_contexts_want_no_kernel_that_was_not_listed(
    arch: str, size: int, interleave: int, as_on_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without graphs of decodes either: contexts of the trial are long enough for what one rank keeps of them."""
    heads = {"num_attention_heads": 4} | ({} if arch.startswith("Deepseek") else {"num_key_value_heads": 1})
    write_tiny(arch, tmp_path, num_hidden_layers=LAYERS[arch], max_position_embeddings=2048, **heads)
    plain = module.Worker._load

    def load(self: module.Worker) -> Any:
        self.group = ShardGroup(0, size, context=Twins(0, size, interleave))
        return plain(self)

    monkeypatch.setattr(module.Worker, "_load", load)
    monkeypatch.setitem(globals(), "SIZES", (1,))
    rng = random.Random(3)
    shared = [rng.randrange(4, VOCAB) for _ in range(320 * size)]

    def ask(llm: LLM) -> None:
        params = SamplingParams(ignore_eos=True, max_tokens=4, detokenize=False, temperature=0.0)
        for count in (1, 30, 100):
            prompts: Any = [{"prompt_token_ids": [*shared, *[5 + i] * (1 + i % 30)]} for i in range(count)]
            llm.generate(prompts, params, use_tqdm=False)

    wanted = check_listed(str(tmp_path), ask, monkeypatch, max_model_len=2048)
    assert any(job["name"] == "_shared_kernel" for job in wanted)


@pytest.mark.parametrize(
    ("kinds", "matmuls"), [({"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K"}, 7), ({"": "Q8_0"}, 5)]
)
def test_blocks_of_gguf_files_want_no_kernel_that_was_not_listed(
    kinds: dict[str, str],
    matmuls: int,
    on_hopper: None,
    as_on_a_gpu: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of one row, in which queries, keys and values are several matmuls or one; and of more."""
    file = write_model(tmp_path / "model.gguf", kinds)
    monkeypatch.setattr(load_module, "storage_for", coded_storage)
    rng = random.Random(3)

    def ask(llm: LLM) -> None:
        params = SamplingParams(ignore_eos=True, max_tokens=3, detokenize=False, temperature=0.0)
        for count in (1, 2, 5, 40, 90):
            prompts: Any = [{"prompt_token_ids": [5 + rng.randrange(99)] * rng.randint(1, 60)} for _ in range(count)]
            llm.generate(prompts, params, use_tqdm=False)

    wanted = check_listed(str(file), ask, monkeypatch, quantization="gguf", load_format="auto")
    assert sum(job["name"] == "_few_blocks_kernel" for job in wanted) == matmuls


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", seq2seq_models.WHISPER])
def test_encoder_decoders_want_no_kernel_that_was_not_listed(
    name: str, as_on_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq2seq_models.make_model(name, tmp_path)
    rng = random.Random(3)

    def ask(llm: LLM) -> None:
        params = SamplingParams(ignore_eos=True, max_tokens=3, detokenize=False, temperature=0.0)
        for count in (1, 5, 40, 90):
            llm.generate([_pair(name, rng) for _ in range(count)], params, use_tqdm=False)

    wanted = check_listed(str(tmp_path), ask, monkeypatch, max_model_len=64)
    assert any(job["name"] == "_attend_kernel" for job in wanted)


def _pair(name: str, rng: random.Random) -> Any:
    begin = {"prompt_token_ids": [seq2seq_models.FAMILIES[name]["decoder_start_token_id"], *[7] * rng.randrange(30)]}
    if name == seq2seq_models.WHISPER:
        audio = seq2seq_models.draw_audio(rng.randrange(9)), seq2seq_models.RATE
        return {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": audio}}, "decoder_prompt": begin}
    given = {"prompt_token_ids": seq2seq_models.draw_text(rng.randrange(9), rng.randint(1, 60))}
    return {"encoder_prompt": given, "decoder_prompt": begin}


@pytest.mark.parametrize("kernels", [{"_own_kernel"}, {"_shrink_kernel", "_expand_kernel"}])
def test_adapters_want_no_kernel_that_was_not_listed(
    kernels: set[str], as_on_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every layer, in decodes of few and of many rows and in steps with prompts."""
    if len(kernels) > 1:
        usual = Kernels.of
        monkeypatch.setattr(Kernels, "of", lambda self, op: (lambda: 0) if op is most_columns else usual(self, op))
    model = make_tiny("Qwen3ForCausalLM", tmp_path / "model", num_hidden_layers=1)
    paths = [write_adapter(model, tmp_path / f"a{n}", seed=n, rank=4 * n, modules=linear_modules(model, None)).path
             for n in (1, 2)]  # fmt: skip

    def ask(llm: LLM) -> None:
        loras = [None, *[LoRARequest(f"a{n}", n, path) for n, path in enumerate(paths, 1)]]
        params = SamplingParams(ignore_eos=True, max_tokens=3, detokenize=False, temperature=0.0)
        for count in (1, 5, 90):
            prompts: Any = [{"prompt_token_ids": [5 + i % 7] * (1 + i % 30)} for i in range(count)]
            own = [loras[(i + 1) % 3] for i in range(count)]
            llm.generate(prompts, params, lora_request=own, use_tqdm=False)

    more = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    wanted = check_listed(str(tmp_path / "model"), ask, monkeypatch, **more)
    assert kernels <= {job["name"] for job in wanted}


WIDE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("form", ["plain", "fp8", "int8", "int4", "blocks"])
def test_captured_steps_want_no_kernel_that_was_not_listed(
    form: str, arch: str, on_hopper: None, as_on_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of numbers of rows and of tokens that the dry run leaves out, whichever kernels they take."""
    write_tiny(arch, tmp_path, num_hidden_layers=1, **WIDE, **({"moe_intermediate_size": 512} if "Moe" in arch else {}))
    if form == "blocks":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCKS}))

    def store(config: EngineConfig, kernels: Kernels, group: ShardGroup = ALONE) -> Storage:
        kept = "stored" if form == "blocks" else form
        return coded_storage(replace(config, **{"model_config.weight_form": kept}), kernels, group)

    def capture(llm: LLM) -> None:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        with torch.inference_mode():
            for size in (1, 2, 3, 5, 8, 12, 16, 17, 24, 32, 33, 40, 48, 64, 65, 96, 127, 128):
                runner.graphs.run_uncaptured(size)
            for size in reversed(runner.mixed.sizes):  # the largest makes the room of all
                runner.mixed.run_uncaptured(size)

    monkeypatch.setattr(load_module, "storage_for", store)
    wanted = check_listed(str(tmp_path), capture, monkeypatch)
    modules = {job["module"].rpartition(".")[2] for job in wanted if job["name"] != "_decode_kernel"}
    is_rounded = form == "fp8" and arch == "Qwen3ForCausalLM"
    assert ("skinny_rounded" in modules) == is_rounded and len(modules) > 6


@pytest.mark.parametrize(
    ("most_rows", "sizes"), [(256, (1, 2, 4, 8, 16, 32, 64, 128, 256)), (8, (1, 2, 4, 8)), (200, (1,))]
)
@pytest.mark.parametrize("head", ["int8", "fp8"])
def test_output_matrices_in_8_bits_want_no_kernel_that_was_not_listed(
    head: str,
    most_rows: int,
    sizes: tuple[int, ...],
    on_hopper: None,
    as_on_a_gpu: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of any number of rows, by a vocabulary that has tiles for all multiprocessors: drafts and log probabilities of
    prompts have more of them than there may be requests."""
    write_tiny("Qwen3ForCausalLM", tmp_path, num_hidden_layers=1, **WIDE, vocab_size=40000, tie_word_embeddings=False)
    monkeypatch.setitem(globals(), "SIZES", sizes)

    def store(config: EngineConfig, kernels: Kernels, group: ShardGroup = ALONE) -> Storage:
        rounded = replace(config, **{"model_config.weight_form": "fp8", "model_config.head_form": head})
        return coded_storage(rounded, kernels, group)

    def sample(llm: LLM) -> None:
        model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
        with torch.inference_mode():
            for rows in (
                1,
                2,
                3,
                8,
                9,
                16,
                17,
                32,
                33,
                40,
                64,
                65,
                96,
                97,
                128,
                129,
                160,
                192,
                193,
                200,
                256,
                257,
                400,
                419,
            ):
                model.narrow_logits(torch.zeros(rows, WIDE["hidden_size"], dtype=torch.bfloat16))

    monkeypatch.setattr(load_module, "storage_for", store)
    wanted = check_listed(str(tmp_path), sample, monkeypatch, max_num_seqs=most_rows)
    names = {job["name"] for job in wanted}
    assert {"_whole_kernel", "_parts_kernel", "_quantize_kernel"} <= names
    assert ("_coded_kernel" in names) == (head == "fp8")  # instead of the library, which a CPU does not have
    assert len({json.dumps(job["constant_vals"]) for job in wanted if job["name"] == "_parts_kernel"}) == 5


def check_listed(
    path: str, use: Callable[[LLM], None], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[dict[str, Any]]:
    """The kernels that `use` wants of an engine; all of them were listed by the dry run of its start."""
    listed, wanted = warm.Recorder(90), warm.Recorder(90)
    stack = ExitStack()
    plain_load, plain_init = module.Worker.load, module.Worker.init_kv

    def load(self: module.Worker) -> Any:
        info = plain_load(self)
        with self._trial() as trial, launch.recorded(register.launchers(), listed):
            trial.all(self.config.scheduler_config.max_num_batched_tokens, SIZES)
        return info

    def init_kv(self: module.Worker, layout: Any) -> None:
        plain_init(self, layout)
        stack.enter_context(launch.recorded(register.launchers(), wanted))

    monkeypatch.setattr(module.Worker, "load", load)
    monkeypatch.setattr(module.Worker, "init_kv", init_kv)
    with stack:
        llm = LLM(path, **OPTIONS | options)
        use(llm)
        llm.close()
    known = list(listed.jobs.values())
    missing = [job for job in wanted.jobs.values() if job not in known]
    assert not missing, [(job["name"], job["signature"], job["constant_vals"], job["attrs_keys"]) for job in missing]
    return list(wanted.jobs.values())


@pytest.mark.parametrize("max_model_len", [33, 128])
def test_contexts_shorter_than_what_rows_may_share(
    max_model_len: int, as_on_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial steps and a step of many decodes: no table is read past its last column."""
    write_tiny("Qwen3ForCausalLM", tmp_path, num_hidden_layers=1)
    plain_load = module.Worker.load

    def load(self: module.Worker) -> Any:
        info = plain_load(self)
        with self._trial() as trial, launch.recorded(register.launchers(), warm.Recorder(90)):
            trial.all(self.config.scheduler_config.max_num_batched_tokens, SIZES)
        return info

    monkeypatch.setattr(module.Worker, "load", load)
    with launch.recorded(register.launchers(), warm.Recorder(90)):
        llm = LLM(str(tmp_path), **OPTIONS | {"max_model_len": max_model_len, "block_size": 4})
        params = SamplingParams(ignore_eos=True, max_tokens=3, detokenize=False, temperature=0.0)
        found = llm.generate([{"prompt_token_ids": [5] * 20}] * 64, params, use_tqdm=False)
        llm.close()
    assert [len(out.outputs[0].token_ids) for out in found] == [3] * 64
