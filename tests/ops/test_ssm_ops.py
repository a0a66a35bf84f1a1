"""The state-space ops against plain recurrences written out token by token, however rows are cut into pieces."""

import pytest
import torch
import torch.nn.functional as F

from quire.ops import ssm
from tests import ssm_cases as cases

SIZES = [1, 4, 16, 1 << 30]


def rows_of(work, states):
    """(tokens, state before, [(token after which, block)]) of every row, in float64."""
    tokens = range(len(work.load)) if work.tokens is None else work.tokens.tolist()
    for token, load, store in zip(tokens, work.load.tolist(), work.store.tolist(), strict=True):
        yield [token], states[load].double() if load >= 0 else torch.zeros_like(states[0]).double(), [(token, store)]
    found = []
    for begin, end, load, store in work.pieces.tolist():
        if load != ssm.KEPT:
            state = states[load].double() if load >= 0 else torch.zeros_like(states[0]).double()
            found.append(([], state, []))
        found[-1][0].extend(range(begin, end))
        found[-1][2].append((end - 1, store))
    yield from found


def recurrence(states, work, out_shape, step):
    """(outputs, states after) of step(state, token) -> (state, y)."""
    out, after = torch.full(out_shape, float("nan"), dtype=torch.float64), states.clone()
    for tokens, state, stores in rows_of(work, states):
        at = dict(stores)
        for token in tokens:
            state, out[token] = step(state, token)
            if at.get(token, -1) >= 0:
                after[at[token]] = state.to(states.dtype)
    return out, after


def check(op, args, states, work, want, tail=(), tolerance=2e-5):
    out, after = want
    own = states.clone()
    cases.close(op.reference(*args, own, work, *tail), out, tolerance)
    cases.close(own[cases.written(work)], after[cases.written(work)], tolerance)
    rest = torch.ones(len(states), dtype=torch.bool)
    rest[cases.written(work)] = False
    assert torch.equal(own[rest], states[rest])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", cases.ROWS, ids=range(3))
def test_convolution(rows, size):
    args, states, work = cases.conv_case(rows, size, "cpu", torch.float32, channels=7)
    x, weight, bias = (t.double() for t in args)

    def step(state, token):
        window = torch.cat((state, x[token][:, None]), 1)
        return window[:, 1:], F.silu((window * weight).sum(1) + bias)

    want = recurrence(states, work, x.shape, step)
    check(ssm.causal_conv, args, states, work, want, ("silu",))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", cases.ROWS, ids=range(3))
def test_mamba2(rows, size):
    args, states, work = cases.ssd_case(rows, size, "cpu", torch.float32, heads=4, size=5, entries=6)
    x, dt, b, c, a_log, d, bias = (t.double() for t in args[:7])

    def step(state, token):
        rate = F.softplus(dt[token] + bias).clamp(0.0, 5.0)
        bs, cs = (t[token].repeat_interleave(2, 0) for t in (b, c))
        state = state * (-rate * a_log.exp()).exp()[:, None, None] + (rate[:, None] * x[token])[..., None] * bs[:, None]
        return state, (state * cs[:, None]).sum(-1) + d[:, None] * x[token]

    check(ssm.ssd_scan, args, states, work, recurrence(states, work, x.shape, step), tolerance=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", cases.ROWS, ids=range(3))
def test_mamba1(rows, size):
    args, states, work = cases.selective_case(rows, size, "cpu", torch.float32, channels=6, entries=5)
    x, dt, b, c, a_log, d, bias = (t.double() for t in args)

    def step(state, token):
        rate = F.softplus(dt[token] + bias)
        state = state * (-rate[:, None] * a_log.exp()).exp() + (rate * x[token])[:, None] * b[token]
        return state, state @ c[token] + d * x[token]

    check(ssm.selective_scan, args, states, work, recurrence(states, work, x.shape, step))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", cases.ROWS, ids=range(3))
def test_gated_delta(rows, size):
    args, states, work = cases.delta_case(rows, size, "cpu", torch.float32, keys=6, values=5)
    q, k, v, a, b, a_log, bias = (t.double() for t in args[:7])
    q, k = (t / (t.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))

    def step(state, token):
        qs, ks = (t[token].repeat_interleave(2, 0) for t in (q / 6**0.5, k))
        state = state * (-a_log.exp() * F.softplus(a[token] + bias)).exp()[:, None, None]
        change = (v[token] - torch.einsum("hkv,hk->hv", state, ks)) * b[token].sigmoid()[:, None]
        state = state + ks[..., None] * change[:, None]
        return state, torch.einsum("hkv,hk->hv", state, qs)

    check(ssm.delta_scan, args, states, work, recurrence(states, work, v.shape, step), tolerance=1e-4)


def test_constant_decay():
    draw, (work, num) = cases.Draw(0, "cpu"), cases.make_work(cases.ROWS[0], 16, "cpu")
    total = sum(count for _, count in cases.ROWS[0])
    x, b, c = draw(total, 3, 5), draw(total, 3, 4), draw(total, 3, 4)
    decay, states = torch.tensor([-0.1, -0.5, -0.01]), draw(num, 3, 5, 4)

    def step(state, token):
        state = state * decay.double().exp()[:, None, None] + x[token].double()[..., None] * b[token].double()[:, None]
        return state, (state * c[token].double()[:, None]).sum(-1)

    nothing = torch.zeros(3)
    args = (x, nothing.expand(total, -1), b, c, (-decay).log(), None, nothing, (1.0, 1.0))
    check(ssm.ssd_scan, args, states, work, recurrence(states, work, x.shape, step))


@pytest.mark.parametrize("rows", cases.ROWS, ids=range(3))
def test_delta_with_a_decay_per_channel(rows):
    draw, (work, num) = cases.Draw(0, "cpu"), cases.make_work(rows, 16, "cpu")
    total = sum(count for _, count in rows)
    q, k, v = draw(total, 3, 6), draw(total, 3, 6), draw(total, 3, 5)
    decay, beta, states = -draw(total, 3, 6).abs(), draw(total, 3).sigmoid(), draw(num, 3, 6, 5)
    qs, ks = (t.double() / (t.double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))

    def step(state, token):
        state = state * decay[token].double().exp()[..., None]
        change = (v[token].double() - (state * ks[token][..., None]).sum(1)) * beta[token].double()[:, None]
        state = state + ks[token][..., None] * change[:, None]
        return state, (state * qs[token][..., None]).sum(1) / 6**0.5

    args = (q, k, v, decay, beta)
    check(ssm.channel_delta_scan, args, states, work, recurrence(states, work, v.shape, step), tolerance=1e-4)


def test_single_tokens_give_what_pieces_give():
    """Batch-invariant mode cuts every row into tokens, each from the stored state of the one before."""
    rows, size = cases.ROWS[0], 16
    work, _num = cases.make_work(rows, size, "cpu")
    single, _ = cases.make_work(rows, size, "cpu", single=True)
    total = sum(count for _, count in rows)
    assert len(single.load) == 0 and len(single.pieces) == total
    assert (single.pieces[:, 1] - single.pieces[:, 0] == 1).all()
    args, states, _ = cases.delta_case(rows, size, "cpu", torch.float32, keys=6, values=5)
    one, other = states.clone(), states.clone()
    want = ssm.delta_scan.reference(*args, one, work)
    cases.close(ssm.delta_scan.reference(*args, other, single), want, 1e-4)
    cases.close(other[cases.written(work)], one[cases.written(work)], 1e-4)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gated_norm(first, shared):
    x, gate, weight, eps, group = cases.norm_case("cpu", torch.float32, shared=shared)
    opened = gate.double() * gate.double().sigmoid()
    h = x.double() if first else x.double() * opened
    parts = h.view(len(x), -1, group)
    want = (parts / (parts.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double().view(-1, group)).flatten(1)
    cases.close(
        ssm.gated_rms_norm.reference(x, gate, weight, eps, group, first), want * opened if first else want, 1e-5
    )


def test_places():
    cases.check_places(ssm.state_places.reference)


def test_nothing_is_written_for_padding():
    """A captured decode step pads its rows: no block to read, none to write, finite numbers out."""
    (x, weight, bias), states, _ = cases.conv_case([(0, 1)] * 3, 4, "cpu", torch.float32)
    none = torch.tensor([-1, 2, -1])
    work = ssm.StateWork(None, none, none, torch.empty((0, 4), dtype=torch.int32), torch.empty((0, 3)).int().numpy())
    before = states.clone()
    out = ssm.causal_conv.reference(x, weight, bias, states, work, "silu")
    assert torch.isfinite(out).all()
    kept = [i for i in range(len(states)) if i != 2]
    assert torch.equal(states[kept], before[kept]) and not torch.equal(states[2], before[2])
