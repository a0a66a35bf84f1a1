"""A real checkpoint through the worker alone (no scheduler, no engine): random chunks, company, moves, preemptions and
look-ahead, against transformers run on each prompt by itself."""

import random

import pytest
import torch

from quire.config import EngineArgs
from quire.sched.kv_layout import place
from quire.worker import kv_memory
from quire.worker.main import build_worker
from tests.sampling.oracle import resolved
from tests.tiny_models import VOCAB, make_tiny, write_tiny
from tests.worker.driver import BLOCK, Asked, Driver


def make_worker(folder, **options):
    args = EngineArgs(
        model=str(folder), dtype="float32", block_size=BLOCK, max_model_len=64, max_num_seqs=8,
        max_num_batched_tokens=256, **options,
    )  # fmt: skip
    worker = build_worker(args.create_engine_config())
    info = worker.load()
    layout = place(info.specs, worker.free_bytes(), num_blocks=640, max_model_len=64, max_num_seqs=8)
    worker.init_kv(layout)
    worker.warm_up()
    return worker, info


def ask(rng, count, **params):
    return [
        Asked(
            f"r{i}", [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 20))],
            resolved(max_tokens=None, **params), i, rng.randint(1, 16),
        )
        for i in range(count)
    ]  # fmt: skip


@torch.no_grad()
def reference_logits(model, tokens):
    return model(torch.tensor([tokens])).logits[0].float()


@pytest.mark.parametrize(
    "arch", ["LlamaForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM"]
)
@pytest.mark.parametrize("ahead", [0, 1])
def test_greedy_text_is_transformers_text(tmp_path, arch, ahead):
    model = make_tiny(arch, tmp_path)
    worker, info = make_worker(tmp_path)
    assert info.vocab_size == VOCAB
    rng = random.Random(ahead)
    asked = ask(rng, 12, temperature=0.0, prompt_logprobs=1, logprobs=2)
    Driver(worker.model_runner, rng, ahead=ahead, num_blocks=640).run(asked)
    for request in asked:
        logits = reference_logits(model, request.prompt + request.outputs)
        first = len(request.prompt) - 1
        assert request.outputs == logits[first:-1].argmax(-1).tolist()
        wanted = logits.log_softmax(-1)
        for place_, (token_ids, numbers, _) in request.prompt_logprobs.items():
            assert token_ids[0] == request.prompt[place_]
            assert numbers == pytest.approx(wanted[place_ - 1, token_ids].tolist(), abs=1e-3)
        assert len(request.prompt_logprobs) == len(request.prompt) - 1
        for i, rows in enumerate(request.logprobs):
            assert rows.logprobs[0] == pytest.approx(wanted[first + i, rows.token_ids[0]].tolist(), abs=1e-3)
            assert rows.ranks == [1]


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "MistralForCausalLM", "DeepseekV3ForCausalLM"])
def test_what_a_lost_request_left_in_the_cache_does_not_spread(tmp_path, monkeypatch, arch):
    """Every page starts as NaN, as pages of a request with broken numbers would be: nothing of it may be read."""
    whole = kv_memory.allocate

    def poisoned(*args):
        return whole(*args).fill_(0xFF)

    monkeypatch.setattr(kv_memory, "allocate", poisoned)
    model = make_tiny(arch, tmp_path)
    worker, _ = make_worker(tmp_path)
    rng = random.Random(0)
    asked = ask(rng, 6, temperature=0.0)
    Driver(worker.model_runner, rng, ahead=0, num_blocks=640).run(asked)
    for request in asked:
        assert request.failed is None
        logits = reference_logits(model, request.prompt + request.outputs)
        assert request.outputs == logits[len(request.prompt) - 1 : -1].argmax(-1).tolist()


def test_seeded_text_does_not_depend_on_company(tmp_path):
    write_tiny("LlamaForCausalLM", tmp_path)
    worker, _ = make_worker(tmp_path)
    texts = []
    for company in (0, 3, 9):
        rng = random.Random(company)
        mine = Asked("mine", [9, 8, 7], resolved(temperature=0.9, top_p=0.95, max_tokens=None), 1234, 30)
        Driver(worker.model_runner, rng, ahead=1, num_blocks=640).run([mine, *ask(rng, company, temperature=1.0)])
        texts.append(mine.outputs)
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) > 5


def test_dummy_weights_then_reload_in_place(tmp_path):
    """The documented way to start without weights and read them later."""
    model = make_tiny("LlamaForCausalLM", tmp_path)
    worker, _ = make_worker(tmp_path, load_format="dummy")
    before = {name: weight.data_ptr() for name, weight in worker.model_runner.model.named_parameters()}

    def text():
        request = Asked("a", [5, 6, 7, 8], resolved(temperature=0.0, max_tokens=None), 0, 12)
        Driver(worker.model_runner, random.Random(3), ahead=0, num_blocks=640).run([request])
        return request.outputs

    dummy = text()
    worker.update_config({"load_config": {"load_format": "auto"}})
    worker.reload_weights()
    outputs = text()
    assert outputs == reference_logits(model, [5, 6, 7, 8, *outputs])[3:-1].argmax(-1).tolist()
    assert dummy != outputs
    assert before == {name: weight.data_ptr() for name, weight in worker.model_runner.model.named_parameters()}
