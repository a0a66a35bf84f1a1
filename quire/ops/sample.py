"""Arithmetic on logits: penalties, bans, filters, seeded noise, log probabilities. The torch reference of each.

In: logits [n, V] float32, parameters as tensors with one entry per row. Functions ending in `_` change the logits they
are given. Every result of a row depends on that row alone (never on n or on its neighbours), and ties are settled by
value or by the lowest index, never left to an algorithm. Must not know: requests, rows of a worker, configuration.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.base import env
from quire.ops.act import logarithm
from quire.ops.alone import fresh, keep_apart
from quire.ops.op import op

NEG_INF = float("-inf")
NOISE_SPAN = 25.5  # the largest gumbel value minus the smallest is below this (22.19 and -2.81, see `gumbel`)
_SOME = 512  # candidates that `top_p_` considers before it sorts the full vocabulary
_CHUNK = 1 << 18  # elements that fit a core's cache, with several buffers
_COUNT_BYTES = 1 << 26  # largest temporary for token counts
_GOLDEN64 = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_GOLDEN32 = -1640531535  # 0x9E3779B1 as int32


def _alone(logits: Tensor) -> bool:
    """Whether rows must not share a library call: see ops/alone.py."""
    return logits.device.type == "cpu" and env.BATCH_INVARIANT.get()


# --- masks and bans


def ban_where_(logits: Tensor, rows: Tensor, ids: Tensor, banned: Tensor) -> None:
    """logits[rows[i], ids[i]] = -inf where banned[i]. A pair may repeat; nothing is read back from the device."""
    cut = torch.where(banned, NEG_INF, float("inf")).to(logits.dtype)
    logits.view(-1).scatter_reduce_(0, rows * logits.shape[1] + ids, cut, "amin")


def allow_only_(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """`allowed` bool [len(rows), V]: in these rows everything else becomes -inf."""
    logits[rows] = logits[rows].masked_fill_(~allowed, NEG_INF)


def bias_(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """logits[rows[i], ids[i]] += values[i]; pairs may not repeat."""
    logits[rows, ids] += values


@op
def allow_words_(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """`allow_only_` with bits: int32 [len(rows), words], lowest bit first. Ids past the words are not allowed."""
    allow_only_(logits, rows, unpack_mask(words, logits.shape[1]))


def unpack_mask(words: Tensor, vocab_size: int) -> Tensor:
    """int32 [n, words] bit masks, lowest bit first -> bool [n, V]. Ids past the mask are not allowed."""
    if words.device.type == "cpu":
        octets = words.contiguous().numpy().view(np.uint8)
        flat = torch.from_numpy(np.unpackbits(octets, axis=1, bitorder="little").view(np.bool_))
    else:
        bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
        flat = bits.flatten(1).bool()
    if flat.shape[1] >= vocab_size:
        return flat[:, :vocab_size]
    return torch.nn.functional.pad(flat, (0, vocab_size - flat.shape[1]), value=False)


def ban_words_(
    logits: Tensor, rows: Tensor, tails: Tensor, num_outputs: Tensor, prefixes: Tensor, last: Tensor
) -> None:
    """Ban the last token of each word whose other tokens are the newest outputs of its row.

    One entry per word: rows [W]; tails [W, L] the newest L tokens of that row; num_outputs [W] how many of them are
    outputs (a word never matches into the prompt); prefixes [W, L] right-aligned, -1 in front; last [W].
    """
    absent = prefixes < 0
    length = (~absent).sum(-1)
    match = (absent | (tails == prefixes)).all(-1) & (length <= num_outputs)
    ban_where_(logits, rows, last, match)  # words of a row may share their last token


def keep_times_(
    logits: Tensor,
    tokens: Tensor,  # [n, L] int: prompt, then outputs; entries past `lengths` are ignored
    prompt_lengths: Tensor,  # [n]
    lengths: Tensor,  # [n], at least 1
    *,
    first: int,  # ids from here on are times
    end: int,  # ids below are text
    plain: int,  # never written
    latest: int | None,  # that the first output may be, counted from `first`
) -> None:
    """Outputs begin with a time. Times come in pairs, but for one before the end, and none is before another. Where
    all times together are likelier than any other id, a time is next."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    is_output = (place >= prompt_lengths.unsqueeze(1)) & (place < lengths.unsqueeze(1))
    is_time = is_output & (tokens >= first)
    count = lengths - prompt_lengths
    newest = is_time.gather(1, (lengths - 1).clamp_(min=0).unsqueeze(1)).squeeze(1)
    before = is_time.gather(1, (lengths - 2).clamp_(min=0).unsqueeze(1)).squeeze(1) | (count < 2)
    where = torch.where(is_time, place, -1).amax(1)
    last_time = tokens.gather(1, where.clamp(min=0).unsqueeze(1)).squeeze(1).to(lengths.dtype)
    opens = newest & ~before  # the first of a pair is written
    lowest = torch.where(where < 0, first, last_time + (~opens).to(lengths.dtype))
    begins = count == 0
    times, others = logits[:, first:], logits[:, :first]
    ids = torch.arange(first, logits.shape[1], device=logits.device)
    banned = (ids < lowest.unsqueeze(1)) | (newest & before).unsqueeze(1)
    if latest is not None:
        banned |= begins.unsqueeze(1) & (ids > first + latest)
    times.masked_fill_(banned, NEG_INF)
    logits[:, plain] = NEG_INF
    logits[:, :end].masked_fill_(opens.unsqueeze(1), NEG_INF)
    is_next = begins | (times.float().logsumexp(1) > others.amax(1))
    others.masked_fill_(is_next.unsqueeze(1), NEG_INF)


# --- penalties


def penalize_(
    logits: Tensor,
    tokens: Tensor,  # [n, L] int: prompt, then outputs; entries past `lengths` are ignored
    prompt_lengths: Tensor,  # [n]
    lengths: Tensor,  # [n], at least 1
    *,
    presence: Tensor,  # [n] each
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Repetition over prompt and outputs (divide a positive logit, multiply a negative one), then frequency times the
    count in the outputs and presence once, both subtracted."""
    rows_at_once = max(1, _COUNT_BYTES // (4 * logits.shape[1]))
    for at in range(0, logits.shape[0], rows_at_once):
        cut = slice(at, at + rows_at_once)
        _penalize_some_(
            logits[cut], tokens[cut], prompt_lengths[cut], lengths[cut], presence[cut], frequency[cut], repetition[cut]
        )


def _penalize_some_(
    logits: Tensor, tokens: Tensor, prompts: Tensor, lengths: Tensor, presence: Tensor, frequency: Tensor, rep: Tensor
) -> None:
    index = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    known = index < lengths.unsqueeze(1)
    ids = torch.where(known, tokens, tokens[:, :1]).long()  # a repeated id writes the same value twice
    is_output = (known & (index >= prompts.unsqueeze(1))).to(logits.dtype)
    counts = torch.zeros_like(logits).scatter_add_(1, ids, is_output).gather(1, ids)
    value = logits.gather(1, ids)
    rep = rep.unsqueeze(1)
    value = torch.where(value > 0, value / rep, value * rep)
    value -= frequency.unsqueeze(1) * counts + presence.unsqueeze(1) * (counts > 0)
    logits.scatter_(1, ids, value)


# --- filters: ties with the last kept token are kept too


def scale_(logits: Tensor, temperature: Tensor) -> None:
    logits.div_(temperature.unsqueeze(1))


def min_p_(logits: Tensor, min_p: Tensor) -> None:
    """Drop tokens less likely than min_p times the most likely one. min_p 0 drops nothing."""
    least = logits.amax(-1, keepdim=True) + logarithm.on(min_p.device)(min_p).unsqueeze(1)
    logits.masked_fill_(logits < least, NEG_INF)


def top_k_(logits: Tensor, k: Tensor, largest: int) -> None:
    """Keep the k best and their ties. k [n] int64, at least 1, at most `largest`, which is at most V."""
    best = torch.topk(logits, largest, sorted=True).values
    logits.masked_fill_(logits < best.gather(1, (k - 1).unsqueeze(1)), NEG_INF)


def top_p_(logits: Tensor, p: Tensor) -> None:
    """Keep the smallest set of most likely tokens whose probabilities reach p (a token is kept if those before it sum
    to less than p), and ties of the last one. p in (0, 1]."""
    if _alone(logits):
        for i in range(len(logits)):
            row = fresh(logits[i : i + 1])
            _top_p_(row, p[i : i + 1])
            logits[i] = row[0]
    else:
        _top_p_(logits, p)


def _top_p_(logits: Tensor, p: Tensor) -> None:
    probs = torch.softmax(logits, -1)
    vocab_size = logits.shape[1]
    if logits.device.type != "cpu":  # reading back the number of candidates would wait for the device
        ordered = torch.sort(logits, dim=-1, descending=True, stable=True)
        logits.masked_fill_(logits < _nucleus_edge(ordered.values, ordered.indices, probs, p)[0], NEG_INF)
        return
    some = min(_SOME, vocab_size)
    least, reached = _nucleus_edge(*torch.topk(logits, some, sorted=True), probs, p)
    if some < vocab_size and not bool(reached.all()):
        rest = (~reached).nonzero().squeeze(1)
        ordered = torch.sort(logits[rest], dim=-1, descending=True, stable=True)
        least[rest] = _nucleus_edge(ordered.values, ordered.indices, probs[rest], p[rest])[0]
    logits.masked_fill_(logits < least, NEG_INF)


def _nucleus_edge(values: Tensor, ids: Tensor, probs: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """(smallest kept logit [n, 1], whether the cutoff is among the candidates [n]) for sorted candidates."""
    share = probs.gather(1, ids)
    total = share.cumsum(-1)
    before = torch.cat((torch.zeros_like(total[:, :1]), total[:, :-1]), 1)
    num_kept = (before < p.unsqueeze(1)).sum(-1).clamp_(min=1)
    return values.gather(1, (num_kept - 1).unsqueeze(1)), num_kept < values.shape[1]


# --- selection


def greedy(logits: Tensor) -> Tensor:
    """[n] int64: the best token, the lowest id among ties. A NaN counts as the best."""
    if logits.device.type == "cpu":  # numpy's is ten times as fast as torch's, with the same result
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys per row from a 64-bit seed (int64, two's complement) and a token's absolute position."""
    mixed = _finish64(_finish64(seeds) + positions.long() * _GOLDEN64)
    return mixed.to(torch.int32), (mixed >> 32).to(torch.int32)


def _finish64(z: Tensor) -> Tensor:
    """The splitmix64 finalizer: every input bit affects every output bit. Shifts are masked: torch's keep the sign."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def noise_bits(low: Tensor, high: Tensor, ids: Tensor) -> Tensor:
    """31 random bits (int32, not negative): a pure function of the two keys and the vocabulary index."""
    x = ids * _GOLDEN32 + low
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789  # 0x85EBCA6B
    x ^= high
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387  # 0xC2B2AE35
    x ^= (x >> 16) & 0xFFFF
    x >>= 1
    x &= 0x7FFFFFFF
    return x


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """[n] float32 in (0, 1): one number per row, of the same making as the noise of a token."""
    low, high = keys(seeds, positions)
    bits = noise_bits(low, high, torch.zeros_like(low)) >> 7  # as many as a float32 tells apart
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-24)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, decreasing with `bits`; large values (which decide) have the finest resolution.

    u in [2^-32, 1 - 2^-24] is small if the noise is large, because float32 is dense near 0 and not near 1.
    """
    u = bits.to(torch.float32)
    u.add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def sample_(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[n] int64: one token per row with probability softmax(logits), by the largest of logit + noise."""
    low, high = (key.unsqueeze(1) for key in keys(seeds, positions))
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    if logits.device.type != "cpu":
        logits += gumbel(noise_bits(low, high, ids))
        return logits.argmax(-1)
    rows_at_once = 1 if _alone(logits) else max(1, _CHUNK // logits.shape[1])
    for at in range(0, logits.shape[0], rows_at_once):
        cut = slice(at, at + rows_at_once)
        _add_noise_where_it_counts_(logits[cut], low[cut], high[cut], ids)
    return greedy(logits)


@op
def draw(
    logits: Tensor,  # [n, V], any float dtype; left alone
    seeds: Tensor,  # [n] int64
    positions: Tensor,  # [n] int64
    temperature: Tensor,  # [n] float32; 0: the best token, no draw
    min_p: Tensor,  # [n] float32; 0: all
    top_k: Tensor,  # [n] int64; 0: all
    top_p: Tensor,  # [n] float32; 1: all
) -> tuple[Tensor, Tensor]:
    """(token [n], its final score [n]): each row after its temperature, min_p, top_k and top_p."""
    logits = logits.float()
    chosen = greedy(logits)
    scores = logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
    rows = (temperature > 0).nonzero().squeeze(1)
    if not rows.numel():
        return chosen, scores
    part = logits[rows]
    scale_(part, temperature[rows])
    min_p_(part, min_p[rows])
    vocab_size = logits.shape[1]
    k = top_k[rows]
    k = torch.where((k > 0) & (k < vocab_size), k, vocab_size)
    top_k_(part, k, vocab_size)
    cut = (top_p[rows] < 1).nonzero().squeeze(1)
    if cut.numel():
        narrowed = part[cut]
        top_p_(narrowed, top_p[rows][cut])
        part[cut] = narrowed
    drawn = sample_(part, seeds[rows], positions[rows])
    chosen[rows], scores[rows] = drawn, part.gather(1, drawn.unsqueeze(1)).squeeze(1)
    return chosen, scores


@op
def sample_rows(
    logits: Tensor,  # [n, V], any float dtype; left alone
    row_index: Tensor,  # [n] int: the row of each entry in the columns below
    positions: Tensor,  # [n] int: the position of each new token
    seeds: Tensor,  # [rows] int64
    temperature: Tensor,  # [rows] float32; 0: the best token, no draw
    top_k: Tensor,  # [rows] int32; 0: all
    top_p: Tensor,  # [rows] float32; 1: all
    *,
    filters: bool,  # some row has a top_k or a top_p
    out: Tensor | None = None,  # [n] any integer type: filled with the tokens
    scores: Tensor | None = None,  # [n] float32: filled with the scores
    tokens: Tensor | None = None,  # [rows, width]: the choice is also written to tokens[row_index, positions]
) -> tuple[Tensor, Tensor]:
    """(token [n], its final score [n] float32): greedy, or drawn after temperature, top_k and top_p.

    For rows that need no other sampling option. All decisions are made on the device: nothing is read back.
    """
    index = row_index.long()
    heat = temperature[index].unsqueeze(1)
    draws = heat > 0
    scaled = logits.float() / torch.where(draws, heat, 1.0)
    if filters:
        scaled = scaled.masked_fill(scaled < _smallest_kept(scaled, top_k[index].long(), top_p[index]), NEG_INF)
    low, high = (key.unsqueeze(1) for key in keys(seeds[index], positions))
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    scaled = torch.where(draws, scaled + gumbel(noise_bits(low, high, ids)), scaled)
    chosen = scaled.argmax(-1)
    had = scaled.gather(1, chosen.unsqueeze(1)).squeeze(1)
    out = chosen if out is None else out.copy_(chosen)
    scores = had if scores is None else scores.copy_(had)
    if tokens is not None:
        tokens[index, positions.long()] = chosen.to(tokens.dtype)
    return out, scores


def _smallest_kept(logits: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """[n, 1]: the smallest logit that top_k and then top_p keep, by one full sort."""
    vocab_size = logits.shape[1]
    ordered = logits.sort(dim=-1, descending=True).values
    last = torch.where((k > 0) & (k < vocab_size), k, vocab_size) - 1
    edge = ordered.gather(1, last.unsqueeze(1))
    share = ordered.masked_fill(ordered < edge, NEG_INF).softmax(-1)
    before = share.cumsum(-1) - share
    num_kept = (before < p.unsqueeze(1)).sum(-1).clamp_(min=1)
    nucleus = ordered.gather(1, (num_kept - 1).unsqueeze(1))
    return torch.maximum(edge, torch.where(p.unsqueeze(1) < 1, nucleus, NEG_INF))


def _add_noise_where_it_counts_(logits: Tensor, low: Tensor, high: Tensor, ids: Tensor) -> None:
    """The winner is the same as with noise everywhere. Logarithms are expensive on a CPU, so tokens that cannot win are
    skipped: first those more than NOISE_SPAN below the best; then, knowing all bits, those that even the row's largest
    noise would not lift above the best token with its noise."""
    best = logits.amax(-1, keepdim=True)
    flat = _at_least(logits, best - NOISE_SPAN)
    if flat.numel() * 8 <= logits.numel():
        row = flat // ids.numel()
        bits = noise_bits(low[row, 0], high[row, 0], (flat - row * ids.numel()).to(torch.int32))
    else:
        every = noise_bits(low, high, ids)  # [n, V]
        floor = best + gumbel(every.gather(1, greedy(logits).unsqueeze(1)))
        margin = 1e-4 * (1.0 + best.abs())  # more than the rounding error of these sums
        flat = _at_least(logits, floor - gumbel(every.amin(-1, keepdim=True)) - margin)
        bits = every.view(-1)[flat]
    logits.view(-1).index_add_(0, flat, gumbel(bits))


def _at_least(logits: Tensor, least: Tensor) -> Tensor:
    """Flat indices, through numpy for speed. A row with a NaN has none: it stays NaN and is detected by its choice."""
    return torch.from_numpy(np.flatnonzero(logits.numpy() >= least.numpy()))


# --- log probabilities


@op
def log_probs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1)


keep_apart(log_probs)


def rank_of(values: Tensor, chosen: Tensor) -> Tensor:
    """[n] int64, from 1: one more than the number of strictly greater values in the row."""
    return (values > values.gather(1, chosen.unsqueeze(1))).sum(-1) + 1


@op
def chosen_and_top(values: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [n, 1 + k], values [n, 1 + k], rank of the chosen [n]): the chosen token, then the k largest."""
    top, top_ids = top_values(values, k)
    first = chosen.unsqueeze(1)
    picked = torch.cat((values.gather(1, first), top), 1)
    return torch.cat((first, top_ids), 1), picked, rank_of(values, chosen)


def top_values(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values [n, k], ids [n, k]), largest first, ties by ascending id, including which ties at the cutoff are kept."""
    if k >= values.shape[1]:
        ordered = torch.sort(values, dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    if k == 0:
        empty = values[:, :0]
        return empty, empty.long()
    if values.device.type != "cpu":  # reading back which rows are crowded would wait for the device
        ids = _first_equals(values, k)
        top, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
        return top, ids.gather(1, order)
    top, ids = torch.topk(values, k)
    crowded = ((values >= top[:, -1:]).sum(-1) > k).nonzero().squeeze(1)
    if crowded.numel():
        ids[crowded] = _first_equals(values[crowded], k)
    ids = ids.sort(-1).values
    top, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return top, ids.gather(1, order)


def _first_equals(values: Tensor, k: int) -> Tensor:
    """Ids of the k largest, the lowest ids among ties, unordered: one integer per token encodes both."""
    bits = values.contiguous().view(torch.int32).long()
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # integers in the order of the floats
    index = torch.arange(values.shape[1], device=values.device)
    return torch.topk(order * (1 << 31) - index, k).indices
