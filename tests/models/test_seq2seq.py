"""Encoder-decoder models equal transformers: logits of several rows at once over paged memory, and greedy tokens.

The driver below does what an engine will: it encodes a request's text once, in the step in which its row begins, and
gives the row blocks of a group of kind CROSS that are filled in that step and read ever after. Memory that nobody
wrote is NaN.
"""

import json
import random

import pytest
import torch
import transformers
from safetensors.torch import load_file

from quire.attention.select import select_backend
from quire.layers.batch import Batch, GroupStep
from quire.layers.packed import Texts
from quire.models.seq2seq import build_seq2seq
from quire.schema.errors import ConfigError
from quire.schema.kv import KVGroup, KVKind

VOCAB, BLOCK = 96, 4
LENGTHS = ((11, 9), (3, 14), (26, 1), (1, 6))  # of the encoder's text, of the decoder's
_T5 = dict(d_model=32, d_kv=12, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4)
_BART = dict(
    d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=2,
    encoder_ffn_dim=48, decoder_ffn_dim=40, max_position_embeddings=64, scale_embedding=True,
)  # fmt: skip
TINY = {
    "T5ForConditionalGeneration": _T5,
    "MT5ForConditionalGeneration": _T5,
    "BartForConditionalGeneration": _BART,
    "MBartForConditionalGeneration": dict(_BART, decoder_start_token_id=5),
}


def tiny(name, **over):
    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, name)
    config = cls.config_class(**{"vocab_size": VOCAB, **TINY[name], **over})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = cls(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(std=0.3)
    return model


def ours(folder):
    model = build_seq2seq(json.loads((folder / "config.json").read_text()), dtype=torch.float32)
    model.load_weights(load_file(folder / "model.safetensors").items())
    return model


class Driver:
    """Rows of (encoder's text, decoder's text so far) over scrambled blocks."""

    def __init__(self, model, texts, written, *, room=0):
        self.model, self.texts, self.written = model, texts, [list(w) for w in written]
        self.done = [0] * len(texts)
        specs = model.kv_specs(BLOCK, "float32")
        self.backend = select_backend("cpu", specs)
        kinds = list(dict.fromkeys((spec.kind, spec.window) for spec in specs))
        assert [kind for kind, _ in kinds] == [KVKind.FULL, KVKind.CROSS]
        self.groups = [
            KVGroup(kind=k, block_size=BLOCK, window=w, layers=tuple(s.layer for s in specs if s.kind is k))
            for k, w in kinds
        ]
        rng, self.tables = random.Random(1), []
        needs = [[len(w) + room for w in written], [len(t) for t in texts]]
        num_blocks = max(sum(-(-n // BLOCK) for n in need) for need in needs) + 2
        for need in needs:
            free = rng.sample(range(num_blocks), num_blocks)
            self.tables.append([[free.pop() for _ in range(-(-n // BLOCK))] for n in need])
        memory = {s.layer: torch.full((num_blocks, s.page_bytes), 0xFF, dtype=torch.uint8) for s in specs}
        caches = {s.layer: self.backend.make_cache(s, num_blocks, memory[s.layer]) for s in specs}
        model.bind_kv(caches, {layer: g for g, group in enumerate(self.groups) for layer in group.layers})

    def step(self, grants):
        """Logits of every granted token, row by row; [(row, tokens to compute)]."""
        begins = [row for row, _ in grants if not self.done[row]]
        encoded = self.model.encode(Texts.of([self.texts[row] for row in begins])) if begins else None
        own = [self._step(0, grants, [self.done[row] + n for row, n in grants], self._places(grants))]
        given = [(row, p) for row in begins for p in range(len(self.texts[row]))]
        own.append(self._step(1, grants, [len(self.texts[row]) for row, _ in grants], given))
        places = self._places(grants)
        batch = Batch(
            token_ids=torch.tensor([self.written[row][p] for row, p in places]),
            positions=torch.tensor([p for _, p in places]), logit_index=torch.arange(len(places)),
            plans=[self.backend.plan(step, group) for step, group in zip(own, self.groups, strict=True)],
            num_tokens=len(places), encoded=encoded,
        )  # fmt: skip
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch))
        for row, count in grants:
            self.done[row] += count
        return logits.split([count for _, count in grants])

    def _places(self, grants):
        return [(row, p) for row, n in grants for p in range(self.done[row], self.done[row] + n)]

    def _step(self, g, grants, contexts, written):
        tables = torch.full((len(grants), max(map(len, self.tables[g]))), -1, dtype=torch.int32)
        for i, (row, _) in enumerate(grants):
            blocks = self.tables[g][row]
            tables[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        slots = [self.tables[g][row][p // BLOCK] * BLOCK + p % BLOCK for row, p in written]
        counts = [n for _, n in grants]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return GroupStep(tables, starts, contexts, counts, torch.tensor(slots, dtype=torch.int64))


def drawn(lengths=LENGTHS, seed=3):
    rng = random.Random(seed)
    return [[[rng.randrange(6, VOCAB) for _ in range(pair[side])] for pair in lengths] for side in (0, 1)]


def wanted(model, texts, written):
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([t]), decoder_input_ids=torch.tensor([w])).logits[0]
            for t, w in zip(texts, written, strict=True)
        ]


def error(got, want):
    return max(((g - w).abs().max() / w.abs().max()).item() for g, w in zip(got, want, strict=True))


@pytest.fixture(scope="module", params=TINY)
def case(request, tmp_path_factory):
    folder, model = tmp_path_factory.mktemp(request.param), tiny(request.param)
    model.save_pretrained(folder)
    return folder, model, ours(folder)


def test_logits_of_whole_texts(case):
    folder, theirs, model = case
    texts, written = drawn()
    want = wanted(theirs, texts, written)
    assert error(Driver(model, texts, written).step([(row, len(w)) for row, w in enumerate(written)]), want) <= 1e-4
    table = model.table()
    assert all(table.load(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items())
    assert table.missing() == []
    other = Driver(model, texts[::-1], written)  # control: what the encoder read matters
    assert error(other.step([(row, len(w)) for row, w in enumerate(written)]), want) > 1e-2


def test_logits_in_chunks(case):
    """Rows begin in different steps; later steps read what the encoder said from memory."""
    _, theirs, model = case
    texts, written = drawn(seed=4)
    driver, rng, found = Driver(model, texts, written), random.Random(2), [[] for _ in texts]
    while any(done < len(w) for done, w in zip(driver.done, written, strict=True)):
        grants = []
        for row in rng.sample(range(len(texts)), len(texts)):
            if (left := len(written[row]) - driver.done[row]) and rng.random() < 0.6:
                grants.append((row, min(left, rng.choice([1, 1, 2, 5]))))
        if grants:
            for (row, _), logits in zip(grants, driver.step(grants), strict=True):
                found[row].append(logits)
    assert error([torch.cat(pieces) for pieces in found], wanted(theirs, texts, written)) <= 1e-4


def test_greedy_tokens(case):
    _, theirs, model = case
    texts, _ = drawn(seed=5)
    driver = Driver(model, texts, [[model.arch.start]] * len(texts), room=12)
    for _ in range(12):
        for row, logits in enumerate(driver.step([(row, 1) for row in range(len(texts))])):
            driver.written[row].append(int(logits[-1].argmax()))
    for text, tokens in zip(texts, driver.written, strict=True):
        (logits,) = wanted(theirs, [text], [tokens[:-1]])
        assert logits.argmax(-1).tolist() == tokens[1:]


def test_distances_beyond_the_last_bucket(tmp_path):
    model = tiny("T5ForConditionalGeneration", relative_attention_max_distance=20, relative_attention_num_buckets=8)
    model.save_pretrained(tmp_path)
    texts, written = drawn(((60, 45), (2, 30)))
    driver = Driver(ours(tmp_path), texts, written)
    parts = [driver.step([(0, 40), (1, 1)]), driver.step([(1, 28), (0, 4)]), driver.step([(0, 1), (1, 1)])]
    got = [torch.cat((parts[0][0], parts[1][1], parts[2][0])), torch.cat((parts[0][1], parts[1][0], parts[2][1]))]
    assert error(got, wanted(model, texts, written)) <= 1e-4


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_a_head_of_its_own(name, tmp_path):
    """Checkpoints may hold a head that differs from the token table whatever their config says."""
    model = tiny(name)
    model.save_pretrained(tmp_path)
    own = torch.randn(VOCAB, 32)
    tied = ours(tmp_path)
    untied = build_seq2seq(json.loads((tmp_path / "config.json").read_text()), dtype=torch.float32)
    untied.load_weights([*load_file(tmp_path / "model.safetensors").items(), ("lm_head.weight", own)])
    hidden = torch.randn(3, 32)
    scale = tied.arch.decoder.logit_scale
    bias = 0 if tied.decoder.head.bias is None else tied.decoder.head.bias
    assert torch.allclose(untied.logits(hidden), (hidden @ own.t() + bias) * scale, atol=1e-5)
    assert torch.allclose(tied.logits(hidden), (hidden @ tied.decoder.embed.weight.t() + bias) * scale, atol=1e-5)
    assert untied.decoder.embed is untied.encoder.embed


def test_what_is_not_declared_is_refused():
    with pytest.raises(ConfigError, match="no encoder-decoder is declared under \\['BertModel'\\]"):
        build_seq2seq({"architectures": ["BertModel"]}, dtype=torch.float32)
