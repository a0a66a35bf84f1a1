"""The whole pipeline against an oracle in plain Python: every parameter, every mix of requests, every mode."""

import math
import random

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.sampling.processors import AdapterLogitsProcessor, LogitsProcessor
from quire.sampling.sampler import Sampler
from quire.schema.params import ResolvedParams
from quire.schema.step import NewRow
from tests.sampling.oracle import INF, Known, log_softmax, next_token, noise, resolved
from tests.worker.fakes import make_config

VOCAB = 48
WIDTH = 40


class Bench:
    """A sampler and the requests in its rows, kept in step the way a worker does it."""

    def __init__(self, **config):
        self.tokens = torch.zeros((16, WIDTH), dtype=torch.int32)
        self.sampler = Sampler(make_config(**config), VOCAB, self.tokens)
        self.known: list[Known] = []

    def start(self, known: list[Known]) -> None:
        self.known = known
        added = []
        for row, of in enumerate(known):
            ids = (*of.prompt, *of.outputs)
            self.tokens[row] = -5  # whatever lay there before must not matter
            self.tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            added.append((row, self.row_of(of, row)))
        assert self.sampler.update([], added, [], len(known)) == {}

    @staticmethod
    def row_of(of: Known, row: int) -> NewRow:
        return NewRow(
            request_id=str(row), epoch=0, token_ids=(*of.prompt, *of.outputs), num_prompt_tokens=len(of.prompt),
            params=of.params, seed=of.seed & ((1 << 64) - 1), stop_token_ids=tuple(of.stop_token_ids),
        )  # fmt: skip

    def step(self, logits: torch.Tensor, rows: list[int], mask=None):
        positions = np.array([len(self.known[r].prompt) + len(self.known[r].outputs) for r in rows])
        return self.sampler(logits.clone(), np.array(rows), positions, num_rows=len(self.known), mask=mask)


def random_params(rng: random.Random) -> ResolvedParams:
    def maybe(share: float, value, default):
        return value if rng.random() < share else default

    return resolved(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_p=maybe(0.4, rng.choice([0.05, 0.5, 0.9]), 1.0),
        top_k=maybe(0.4, rng.choice([1, 3, 20, 48, 1000]), 0),
        min_p=maybe(0.3, rng.choice([0.02, 0.3, 1.0]), 0.0),
        presence_penalty=maybe(0.3, rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(0.3, rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(0.3, rng.choice([0.5, 1.3, 3.0]), 1.0),
        min_tokens=rng.choice([0, 0, 3, 8]),
        max_tokens=None,
        logit_bias=maybe(0.3, {rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(3)}, None),
        allowed_token_ids=maybe(0.3, rng.sample(range(VOCAB), 12), None),
        bad_words_token_ids=maybe(
            0.4, [[rng.randrange(6) for _ in range(rng.randint(1, 4))] for _ in range(5)], None
        ),
        logprobs=rng.choice([None, None, 0, 1, 5, -1]),
        logprob_token_ids=maybe(0.2, rng.sample(range(VOCAB), 3), None),
    )  # fmt: skip


def random_known(rng: random.Random) -> Known:
    return Known(
        params=random_params(rng),
        prompt=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 10))],
        outputs=[rng.randrange(6) for _ in range(rng.randint(0, 12))],
        seed=rng.getrandbits(64),
        stop_token_ids=rng.sample(range(VOCAB), 3),
    )


def check_logprobs(of: Known, wanted, entry, mode: str) -> None:
    values = wanted.raw if mode.startswith("raw") else wanted.processed
    values = values if mode.endswith("logits") else log_softmax(values)
    params = of.params
    k = 0 if params.logprobs is None else VOCAB if params.logprobs < 0 else params.logprobs
    order = sorted(range(VOCAB), key=lambda i: (-values[i], i))[:k]
    ids = [wanted.token, *order, *(params.logprob_token_ids or ())]
    token_ids, numbers, rank = entry
    assert token_ids[0] == wanted.token
    assert set(token_ids) == set(ids) and len(token_ids) == len(ids)
    assert token_ids[1 + k :] == list(params.logprob_token_ids or ())
    for token, number in zip(token_ids, numbers, strict=True):
        same = number == values[token] or abs(number - values[token]) < 2e-4
        assert same, (mode, token, number, values[token])
    assert numbers[1 : 1 + k] == sorted(numbers[1 : 1 + k], reverse=True)
    assert rank == 1 + sum(value > values[wanted.token] for value in values) or math.isinf(values[wanted.token])


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
@pytest.mark.parametrize("seed", range(6))
def test_every_parameter_in_every_mix(seed, mode):
    rng = random.Random(seed)
    bench = Bench(logprobs_mode=mode)
    drawn = 0
    for round_ in range(25):
        known = [random_known(rng) for _ in range(rng.randint(1, 9))]
        bench.start(known)
        rows = sorted(rng.sample(range(len(known)), rng.randint(1, len(known))))
        logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1000 * seed + round_)) * 3
        sampled = bench.step(logits, rows)
        entries = {}
        for ask, picked in sampled.logprobs:
            found = picked.rows()
            for i, place in enumerate(ask.places):
                entries[place] = found.token_ids[i], found.logprobs[i], found.ranks[i]
        for place, row in enumerate(rows):
            of = known[row]
            wanted = next_token(logits[place].tolist(), of)
            if max(wanted.processed) == -INF:
                assert sampled.scores[place] == -INF
                continue
            drawn += of.params.temperature > 0
            assert int(sampled.token_ids[place]) == wanted.token, (place, of)
            assert int(bench.tokens[row, len(of.prompt) + len(of.outputs)]) == wanted.token
            asks = of.params.logprobs is not None or bool(of.params.logprob_token_ids)
            assert (place in entries) == asks
            if asks:
                check_logprobs(of, wanted, entries[place], mode)
    assert drawn > 30


def test_the_oracle_and_the_op_make_the_same_noise():
    from quire.ops import sample

    rng = random.Random(1)
    for _ in range(50):
        seed, position, token = rng.getrandbits(64), rng.randrange(1 << 20), rng.randrange(1 << 18)
        signed = torch.tensor([seed - (1 << 64) if seed >> 63 else seed])
        low, high = sample.keys(signed, torch.tensor([position]))
        mine = float(sample.gumbel(sample.noise_bits(low, high, torch.tensor([token], dtype=torch.int32))))
        assert math.isclose(mine, noise(seed, position, token), rel_tol=1e-4, abs_tol=1e-5)


def test_a_plain_greedy_batch_runs_no_step_but_the_argmax(monkeypatch):
    """Every other operation is forbidden: touching one raises."""
    from quire.ops import sample

    bench = Bench()
    bench.start([Known(resolved(temperature=0.0), [1], []) for _ in range(4)])
    for name in ("penalize_", "top_k_", "top_p_", "min_p_", "scale_", "sample_", "ban_where_", "allow_only_",
                 "ban_words_", "bias_", "log_probs", "top_values"):  # fmt: skip
        monkeypatch.setattr(sample, name, None)
    logits = torch.randn(4, VOCAB)
    assert bench.step(logits, [0, 1, 2, 3]).token_ids.tolist() == logits.argmax(-1).tolist()


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("params", "most"), [({"temperature": 0.0}, 10), ({"top_k": 20, "top_p": 0.9}, 140)])
def test_a_step_is_few_operations_whatever_the_number_of_rows(params, most):
    counts = []
    for num_rows in (2, 16):
        bench = Bench()
        bench.start([Known(resolved(**params), [1], []) for _ in range(num_rows)])
        bench.step(torch.randn(num_rows, VOCAB), list(range(num_rows)))
        with CountOps() as ops:
            bench.step(torch.randn(num_rows, VOCAB), list(range(num_rows)))
        counts.append(len(ops.names))
    assert counts[0] == counts[1] <= most


def test_a_steady_batch_reuses_its_selection():
    bench = Bench()
    bench.start([Known(resolved(temperature=0.5, top_p=0.5), [1], []) for _ in range(4)])
    one = bench.sampler.rows.select(np.array([0, 1, 2]))
    assert bench.sampler.rows.select(np.array([0, 1, 2])) is one
    assert bench.sampler.rows.select(np.array([0, 1, 3])) is not one
    two = bench.sampler.rows.select(np.array([0, 1, 2]))
    bench.sampler.rows.remove(3)
    assert bench.sampler.rows.select(np.array([0, 1, 2])) is not two


def test_grammar_masks_join_the_other_bans():
    allowed = torch.zeros(1, -(-VOCAB // 32), dtype=torch.int32)
    allowed[0, 0] = 1 << 3 | 1 << 7
    bench = Bench()
    bench.start([Known(resolved(temperature=0.0, allowed_token_ids=[7, 9]), [1], []) for _ in range(2)])
    logits = torch.zeros(2, VOCAB)
    logits[:, 9] = 5.0
    sampled = bench.step(logits, [0, 1], mask=(torch.tensor([1]), allowed))
    assert sampled.token_ids.tolist() == [9, 7]


# --- custom processors


class Lift(LogitsProcessor):
    """Adds extra_args["lift"] to the token after the last output (or prompt) token: changes the best token."""

    invariant = False

    def __init__(self, vllm_config, device, is_pin_memory):
        assert device.type == "cpu" and is_pin_memory is False
        self.rows = {}

    def is_argmax_invariant(self):
        return self.invariant

    def update_state(self, batch_update):
        from quire.sampling.processors import process_dict_updates

        process_dict_updates(
            self.rows,
            batch_update,
            lambda p, prompt, out: (p.extra_args["lift"], prompt, out) if p.extra_args else None,
        )

    def apply(self, logits):
        for row, (lift, prompt, out) in self.rows.items():
            last = (prompt + out)[-1]
            logits[row, (last + 1) % logits.shape[1]] += lift
        return logits


class Cut(Lift):
    """Forbids odd tokens below the median: never the best one."""

    invariant = True

    def apply(self, logits):
        changed = logits.clone()
        for row in self.rows:
            changed[row, 1::2] = torch.where(logits[row, 1::2] < logits[row].median(), -INF, logits[row, 1::2])
        return changed


def lift(of: Known, row):
    row = list(row)
    if of.params.extra_args:
        row[([*of.prompt, *of.outputs][-1] + 1) % VOCAB] += of.params.extra_args["lift"]
    return row


def cut(of: Known, row):
    if not of.params.extra_args:
        return row
    median = sorted(row)[(len(row) - 1) // 2]
    return [-INF if i % 2 and value < median else value for i, value in enumerate(row)]


@pytest.mark.parametrize("seed", range(4))
def test_custom_processors_run_at_their_place_for_their_rows(seed):
    rng = random.Random(seed)
    for round_ in range(15):
        bench = Bench(logits_processors=(Lift, Cut))
        known = []
        for _ in range(rng.randint(1, 8)):
            of = random_known(rng)
            extra = {"lift": rng.uniform(-4, 4)} if rng.random() < 0.6 else None
            of.params = msgspec.structs.replace(of.params, extra_args=extra)
            of.custom, of.invariant = [lift], [cut]
            known.append(of)
        bench.start(known)
        for step in range(3):  # the output lists must grow between the steps
            rows = sorted(rng.sample(range(len(known)), rng.randint(1, len(known))))
            seed_ = 100_000 * seed + 100 * round_ + step
            logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed_)) * 3
            sampled = bench.step(logits, rows)
            for place, row in enumerate(rows):
                wanted = next_token(logits[place].tolist(), known[row])
                if max(wanted.processed) > -INF:
                    assert int(sampled.token_ids[place]) == wanted.token
                known[row].outputs = [*known[row].outputs, int(sampled.token_ids[place])]
            bench.sampler.update([], [], [], len(known))


class Adapter(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        kind = (params.extra_args or {}).get("kind")
        if kind == "bad init":
            raise KeyError("no such thing")
        return {"two": force_count, "three": force_prompt, "bad": fail}.get(kind)


def force_count(output_ids, logits):
    keep = logits[len(output_ids)].item()
    logits[:] = -INF
    logits[len(output_ids)] = keep
    return logits


def force_prompt(prompt_ids, output_ids, logits):
    forced = torch.full_like(logits, -INF)
    forced[prompt_ids[len(output_ids)]] = 0.0
    return forced


def fail(output_ids, logits):
    raise RuntimeError("this callable fails")


def test_the_adapter_wraps_callables_of_both_shapes_and_a_failing_one_loses_its_own_request():
    bench = Bench(logits_processors=(Adapter,))
    kinds = [None, "two", "three", "bad", "bad init"]
    params = [resolved(temperature=0.0, extra_args={"kind": kind} if kind else None) for kind in kinds]
    bench.start([Known(p, [11, 12, 13, 14], []) for p in params])
    for step in range(3):
        logits = torch.randn(5, VOCAB)
        sampled = bench.step(logits, [0, 1, 2, 3, 4])
        assert sampled.token_ids.tolist()[:3] == [int(logits[0].argmax()), step, 11 + step]
        assert set(sampled.failed) == {3, 4}
        assert "this callable fails" in sampled.failed[3] and "no such thing" in sampled.failed[4]
        for row, of in enumerate(bench.known):
            of.outputs = [*of.outputs, int(sampled.token_ids[row])]
        assert bench.sampler.update([], [], [], 5) == {}


class Fragile(Lift):
    def update_state(self, batch_update):
        super().update_state(batch_update)
        if any(value == 13 for value, _, _ in self.rows.values()):
            raise RuntimeError("thirteen")

    def apply(self, logits):
        if any(value == 99 for value, _, _ in self.rows.values()):
            raise RuntimeError("ninety-nine")
        return logits[:1] if any(value == 98 for value, _, _ in self.rows.values()) else super().apply(logits)


def test_a_whole_processor_that_fails_loses_the_batch_and_serves_the_next():
    def known(value):
        return Known(resolved(temperature=0.0, extra_args={"lift": value} if value else None), [1], [])

    bench = Bench(logits_processors=(Fragile,))
    bench.known = [known(0.0), known(13)]
    added = [(row, bench.row_of(of, row)) for row, of in enumerate(bench.known)]
    refused = bench.sampler.update([], added, [], 2)
    assert set(refused) == {0, 1} and "thirteen" in refused[0]
    assert bench.sampler.update([], [], [], 2) == {}  # the one that failed is gone, and its state with it
    for bad, word in ((99, "ninety-nine"), (98, "shape")):
        bench.start([known(0.0), known(bad)])
        failed = bench.step(torch.randn(2, VOCAB), [0, 1]).failed
        assert set(failed) == {0, 1} and word in failed[0]
    bench.start([known(50.0), known(0.0)])
    sampled = bench.step(torch.zeros(2, VOCAB), [0, 1])
    assert sampled.failed == {} and sampled.token_ids.tolist() == [2, 0]
