"""An engine without a model: a worker that repeats its prompt, so that every test knows what must come out.

The answer to a prompt is the prompt again, over and over. `extra_args` of a request make things happen at its k-th
token: eos_at (end of text), fail_at (this request alone), raise_at (an exception in the step), exit_at (the process is
gone), kill_at (SIGKILL), and sleep (seconds per step that has this request); gate (a path) holds the step of its fourth
token up until there is such a file: by then its first has been told. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.executor.base import BACKENDS, resolve_verb
from quire.schema.adapters import AdapterRead, AdapterSource
from quire.schema.errors import CheckpointError
from quire.schema.kv import KVKind, KVLayout, KVSpec, ModelInfo
from quire.schema.step import LogprobRows, Mask, NewRow, StepPlan, StepResult

VOCAB, EOS, FURTHER_EOS = 260, 2, 3
GATED, GATE_PATIENCE_S = 4, 300.0
SPECIAL = ("<pad>", "<s>", "</s>", "<end>")
CHAT = (
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def ids_of(text: str) -> list[int]:
    """Byte b is token b + 4."""
    return [byte + len(SPECIAL) for byte in text.encode()]


class FakeModel:
    name = "repeats its prompt"


class FakeRunner:
    def __init__(self) -> None:
        self.model = FakeModel()


class FakeWorker:
    def __init__(self) -> None:
        self.model_runner = FakeRunner()
        self.rows: dict[str, tuple[NewRow, list[int]]] = {}

    def num_rows(self) -> int:
        return len(self.rows)

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "awake"

    def fail(self, words: str) -> None:
        raise LookupError(words)


def double(worker: FakeWorker, number: int) -> int:
    """A function of the worker, by import path."""
    return number * 2


def name_of_model(model: FakeModel) -> str:
    return model.name


def break_model(model: Any) -> None:
    """Every later step of a real model raises."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise FloatingPointError("a kernel went wrong")

    model.forward = fail


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class FakeExecutor:
    """As an executor with one worker; counts what was asked of it."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.worker = FakeWorker()
        self.driver_worker = _Driver(self.worker)
        self.plan: StepPlan | None = None
        self.num_steps = 0
        self.flying = self.most_flying = 0
        self.is_shut_down = False
        self.read: list[AdapterRead] = []  # adapters
        self.dropped: list[int] = []

    def ask(self, verb: Any, *args: Any) -> list[Any]:
        return [getattr(self, verb.__name__)(*args)]

    def read_adapter(self, source: AdapterSource) -> None:
        """Every folder holds one, but for those that end in 'broken'."""
        broken = source.path.endswith("broken")
        self.read.append(AdapterRead(serial=source.serial, error="it is broken" if broken else None))

    def poll_adapters(self, timeout: float) -> list[AdapterRead]:
        read, self.read = self.read, []
        return read

    def drop_adapter(self, serial: int) -> None:
        self.dropped.append(serial)

    def load(self) -> ModelInfo:
        if self.config.additional_config.get("bad_checkpoint"):
            raise CheckpointError("tensor 'lm_head' has shape [3], wanted [260, 64]")
        if self.config.additional_config.get("exit_in_load"):
            os._exit(11)
        spec = KVSpec(layer="l0", kind=KVKind.FULL, block_size=self.config.cache_config.block_size, num_kv_heads=1,
                      head_size=8)  # fmt: skip
        return ModelInfo(specs=(spec,), vocab_size=VOCAB, max_positions=512, num_parameters=1, weight_bytes=1)

    def free_bytes(self) -> int:
        return 1 << 20

    def init_kv(self, layout: KVLayout) -> None:
        self.layout = layout

    def warm_up(self) -> None:
        pass

    def prepare_idle(self) -> bool:
        return False

    def forward(self, plan: StepPlan) -> None:
        self.plan = plan
        self.num_steps += 1
        for request_id in plan.left:
            del self.worker.rows[request_id]
        for row in plan.joined:
            assert row.request_id not in self.worker.rows
            self.worker.rows[row.request_id] = (row, list(row.token_ids))

    def sample(self, step: int, mask: Mask | None) -> _Done:
        plan = self.plan
        assert plan is not None and plan.step == step
        sampled, logprobs, failed = [], [], {}
        for index, grant in enumerate(plan.grants):
            row, tokens = self.worker.rows[grant.request_id]
            if not grant.samples:
                sampled.append([])
                logprobs.append(None)
                continue
            assert len(tokens) == grant.start + grant.count
            extra = row.params.extra_args or {}
            number = len(tokens) - row.num_prompt_tokens + 1
            token = tokens[(number - 1) % row.num_prompt_tokens]
            token = EOS if extra.get("eos_at") == number else token
            if mask is not None and index in mask.index:
                token = _allowed(mask, mask.index.index(index), token)
            if message := _trouble(extra, number):
                failed[grant.request_id] = message
            tokens.append(token)
            sampled.append([token])
            logprobs.append(_rows([token], row.params.logprobs, row.params.logprob_token_ids))
        prompts = {}
        for grant in plan.grants:
            row, tokens = self.worker.rows[grant.request_id]
            if row.params.prompt_logprobs is not None and grant.start < row.num_prompt_tokens - 1:
                given = tokens[grant.start + 1 : min(grant.start + grant.count + 1, row.num_prompt_tokens)]
                prompts[grant.request_id] = _rows(given, row.params.prompt_logprobs)
        asked = any(entry is not None for entry in logprobs)
        return _Done(
            StepResult(
                step=plan.step, sampled=sampled, logprobs=logprobs if asked else None, prompt_logprobs=prompts,
                failed=failed,
            )
        )  # fmt: skip

    def call(self, verb: str, args: list[Any], kwargs: dict[str, Any], timeout: float | None) -> list[Any]:
        return [resolve_verb(verb)(self.worker, *args, **kwargs)]

    def call_function(self, function: Any, args: list[Any], kwargs: dict[str, Any], timeout: float | None) -> list[Any]:
        return [function(self.worker, *args, **kwargs)]

    def shutdown(self) -> None:
        self.is_shut_down = True


class _Driver:
    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker


def _allowed(mask: Mask, row: int, token: int) -> int:
    """The token itself, or the first that a grammar lets follow."""
    bits = mask.rows[row * mask.words * 4 : (row + 1) * mask.words * 4]
    choices = (i for i in (token, *range(VOCAB)) if bits[i >> 3] >> (i & 7) & 1)
    return next(choices)


def _trouble(extra: dict[str, Any], number: int) -> str | None:
    if not extra:
        return None
    time.sleep(extra.get("sleep", 0.0))
    if number == GATED and "gate" in extra:
        _wait_for(extra["gate"])
    if extra.get("raise_at") == number:
        raise ArithmeticError("the step went wrong")
    if extra.get("exit_at") == number:
        os._exit(7)
    if extra.get("kill_at") == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return "this one cannot go on" if extra.get("fail_at") == number else None


def _wait_for(path: str) -> None:
    patience = time.monotonic() + GATE_PATIENCE_S
    while not os.path.exists(path):
        assert time.monotonic() < patience, f"nobody made {path}"
        time.sleep(0.005)


def _rows(chosen: list[int], num_top: int | None, named: tuple[int, ...] = ()) -> LogprobRows | None:
    """Chosen tokens have rank 2; ids 10, 11, … are the likeliest everywhere. `named`: ids that were asked for."""
    if num_top is None:
        return None
    top = [*range(10, 10 + (VOCAB - 10 if num_top == -1 else num_top)), *named]
    return LogprobRows(
        [[token, *top] for token in chosen], [[-2.0, *[-1.0 - i for i in range(len(top))]] for _ in chosen],
        [2] * len(chosen),
    )  # fmt: skip


def write_model(folder: Path) -> str:
    """A folder with a configuration and a byte tokenizer, and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=VOCAB, hidden_size=64, intermediate_size=96,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        eos_token_id=[EOS, FURTHER_EOS], bos_token_id=1, torch_dtype="float32",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generation = dict(eos_token_id=[EOS, FURTHER_EOS], temperature=0.5, top_p=0.9, max_new_tokens=33)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    byte_of = _byte_names()
    vocab = {token: i for i, token in enumerate(SPECIAL)} | {byte_of[b]: b + len(SPECIAL) for b in range(256)}
    assert set(byte_of.values()) == set(alphabet)
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", pad_token="<pad>",
                 chat_template=CHAT)  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return str(folder)


def _byte_names() -> dict[int, str]:
    """How a byte-level vocabulary writes each byte: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def use_fake(monkeypatch: Any) -> None:
    """Engines started from now on, here or in a process of their own, have the fake worker."""
    monkeypatch.setitem(BACKENDS._paths, "uni", FakeExecutor)
    monkeypatch.setattr("quire.engine.process_client.MAIN", "tests.fake_engine:main")
    monkeypatch.setattr("quire.engine.process_client.EARLY", "")


def main(boot: bytes) -> None:
    """First function of an engine process with the fake worker."""
    from quire.engine.proc import main as engine_main

    BACKENDS.register("uni", FakeExecutor)
    engine_main(boot)


def batch(arguments: list[str]) -> int:
    """`quire run-batch` in a process of its own, with the fake worker in it."""
    from quire.base.env import forget_all
    from quire.cli.batch import run_batch

    os.environ["QUIRE_ENABLE_V1_MULTIPROCESSING"] = "0"
    forget_all()
    BACKENDS.register("uni", FakeExecutor)
    return run_batch(arguments, "quire run-batch")
