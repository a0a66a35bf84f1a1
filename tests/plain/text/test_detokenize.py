"""Incremental text: equal to the whole decode at any cut, for every kind of decoder, with stop strings on top."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Pipeline

from quire.schema.params import SamplingParams
from quire.text.detokenize import ByteStream, Detokenizer, WindowStream, make_stream
from quire.text.forms.fast import FastTokenizer
from quire.text.stops import StopStrings
from quire.text.tokenizer import Tokenizer

TEXTS = [
    "Hello world, this isn't a test. Do not panic!",
    "naïve café résumé — “quoted” … Zürich ß ½",
    "你好世界，今天天气很好。こんにちは 안녕하세요",
    "🦙 llamas 👩‍👩‍👧 family 🏳️‍🌈 flag ✅",
    "combining: é à́ ñ̃ Z͑ͫ̓ͪ̂ͫ",
    "  two  spaces\n\n\ttabs\r\nlines   ",
    "def f(x):\n    return x ** 2  # 12345",
    "Ԯԯ ꙮ 𐍈 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 العربية עברית",
]
SPECIAL = ["<s>", "</s>", "<|tool|>"]


def trained_byte_level() -> Pipeline:
    pipeline = Pipeline(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    pipeline.train_from_iterator(TEXTS * 3, trainer)
    pipeline.add_tokens([AddedToken("<added>", special=False), AddedToken("né two", special=False)])
    return pipeline


def byte_fallback(*, strip: bool) -> Pipeline:
    """A small vocabulary in Llama's manner: most characters only exist as byte tokens."""
    words = ["▁Hello", "▁world", "▁", "e", "l", "o", "▁the", "é", "好", "▁▁", "He", "llo", ",", ".", "\n"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    pipeline = Pipeline(models.BPE(vocab, [("He", "llo")] if "Hello" in vocab else [], byte_fallback=True))
    pipeline.normalizer = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    pipeline.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    pipeline.add_special_tokens(SPECIAL)
    return pipeline


def trained_metaspace(scheme: str) -> Pipeline:
    pipeline = Pipeline(models.Unigram())
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    pipeline.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    pipeline.train_from_iterator(TEXTS * 3, trainer)
    return pipeline


def trained_word_piece(*, cleanup: bool) -> Pipeline:
    pipeline = Pipeline(models.WordPiece(unk_token="[UNK]"))
    pipeline.normalizer = normalizers.BertNormalizer(lowercase=True)
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece(prefix="##", cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    pipeline.train_from_iterator(TEXTS * 3, trainer)
    return pipeline


def no_decoder() -> Pipeline:
    vocab = {token: i for i, token in enumerate(["[UNK]", *SPECIAL, "a", "bc", "é", "好", "🦙"])}
    pipeline = Pipeline(models.WordLevel(vocab, unk_token="[UNK]"))
    pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    pipeline.add_special_tokens(SPECIAL)
    return pipeline


def suffixed() -> Pipeline:
    """Looks at the last token, so nothing is known token by token: whole decodes are compared."""
    pipeline = Pipeline(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    pipeline.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], end_of_word_suffix="</w>", show_progress=False
    )
    pipeline.train_from_iterator(TEXTS * 3, trainer)
    return pipeline


PIPELINES = {
    "byte-level": trained_byte_level(),
    "byte-fallback": byte_fallback(strip=False),
    "byte-fallback-strip": byte_fallback(strip=True),
    "metaspace-always": trained_metaspace("always"),
    "metaspace-never": trained_metaspace("never"),
    "word-piece": trained_word_piece(cleanup=False),
    "word-piece-cleanup": trained_word_piece(cleanup=True),
    "no-decoder": no_decoder(),
    "suffix": suffixed(),
}
BY_BYTES = [name for name in PIPELINES if name != "suffix"]


def tokenizer_of(name: str) -> FastTokenizer:
    return FastTokenizer(name, PIPELINES[name], special={"bos_token": "<s>", "eos_token": "</s>"})


def stream_text(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], rng: random.Random, **params: Any
) -> str:
    """Feed in random pieces, take deltas in between."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(max_tokens=9999, **params))
    shown, at = [], 0
    while at < len(ids):
        step = rng.randint(1, 4)
        assert detokenizer.feed(ids[at : at + step]) is None
        at += step
        if rng.random() < 0.7:
            shown.append(detokenizer.take(False, True))
    shown.append(detokenizer.take(True, True))
    text = "".join(shown)
    assert text == detokenizer.text == detokenizer.take(True, False)
    return text


def has_mixed_run(pipeline: Pipeline, ids: Sequence[int]) -> bool:
    """A run of byte tokens with good and bad characters: the library gives up all of it, Quire only the bad."""
    run = b""
    for token in [*(pipeline.id_to_token(i) for i in ids), ""]:
        if token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
        else:
            bad = run.decode("utf-8", "replace").count("�")
            if bad and run.decode("utf-8", "ignore"):
                return True
            run = b""
    return False


def random_ids(pipeline: Pipeline, rng: random.Random) -> list[int]:
    """Any ids at all; where there are byte tokens, often the bytes of a whole character."""
    first = pipeline.token_to_id("<0x00>")
    ids: list[int] = []
    for _ in range(rng.randint(0, 24)):
        if first is not None and rng.random() < 0.4:
            ids += [first + byte for byte in rng.choice("🦙é好ßa𐍈").encode()]
        elif first is not None and rng.random() < 0.8:
            ids.append(rng.choice([*range(first), *range(first + 256, pipeline.get_vocab_size())]))
        else:
            ids.append(rng.randrange(pipeline.get_vocab_size()))
    return ids


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", PIPELINES)
def test_any_cut_of_any_ids_gives_the_whole_decode(name: str, skip: bool) -> None:
    tokenizer, pipeline = tokenizer_of(name), PIPELINES[name]
    rng = random.Random(len(name) + skip)
    compared = 0
    for _ in range(400):
        ids = random_ids(pipeline, rng)
        text = stream_text(tokenizer, [], ids, rng, skip_special_tokens=skip)
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)
        shown = [i for i in ids if not (skip and i in tokenizer.skipped_ids)]
        if "fallback" not in name or not has_mixed_run(pipeline, shown):
            assert text == pipeline.decode(ids, skip_special_tokens=skip)
            compared += 1
    assert compared > 150


@pytest.mark.parametrize("name", PIPELINES)
def test_real_texts_survive_any_cut(name: str) -> None:
    tokenizer, pipeline = tokenizer_of(name), PIPELINES[name]
    rng = random.Random(7)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for _ in range(20):
            assert stream_text(tokenizer, [], ids, rng) == pipeline.decode(ids)


@pytest.mark.parametrize("name", PIPELINES)
def test_text_after_a_prompt_is_the_rest_of_the_whole(name: str) -> None:
    tokenizer, pipeline = tokenizer_of(name), PIPELINES[name]
    rng = random.Random(11)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for cut in range(len(ids) + 1):
            before, whole = tokenizer.decode(ids[:cut]), pipeline.decode(ids)
            if before.endswith("�") and not whole.startswith(before):
                before = before.rstrip("�")  # the prompt ends inside a character: the answer owns it
            assert stream_text(tokenizer, ids[:cut], ids[cut:], rng) == whole[len(before) :]


def test_only_special_tokens_before_an_answer_leave_it_first() -> None:
    tokenizer = tokenizer_of("byte-fallback-strip")
    bos, hello = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("▁Hello")
    assert bos is not None and hello is not None
    rng = random.Random(0)
    assert stream_text(tokenizer, [bos], [hello, hello], rng) == "Hello Hello"
    assert stream_text(tokenizer, [bos, hello], [hello, hello], rng) == " Hello Hello"
    assert stream_text(tokenizer, [bos], [hello], rng, skip_special_tokens=False) == " Hello"  # <s> is shown first


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback-strip", "metaspace-always"])
def test_whole_decodes_compared_give_the_same_text(name: str) -> None:
    """What tokenizers get that tell nothing of single tokens; half characters are never shown."""
    tokenizer = tokenizer_of(name)
    tokenizer.pieces = None
    rng = random.Random(3)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for cut in range(0, len(ids), 3):
            stream = WindowStream(tokenizer, ids[:cut], tokenizer.skipped_ids)
            shown = [stream.add(token_id) for token_id in ids[cut:]]
            before = tokenizer.decode(ids[:cut])
            if not before.endswith("�"):
                assert "".join([*shown, stream.flush()]) == tokenizer.decode(ids)[len(before) :]
                assert not any("�" in piece for piece in shown)
        assert stream_text(tokenizer, [], ids, rng) == tokenizer.decode(ids)


def test_half_a_character_waits_and_is_replaced_only_at_the_end() -> None:
    tokenizer = tokenizer_of("byte-level")
    first, *rest = [tokenizer.token_to_id(c) for c in "ðŁ¦Ļ"]  # the four bytes of a llama
    detokenizer = Detokenizer(tokenizer, [], SamplingParams())
    for token_id in (first, *rest[:2]):
        detokenizer.feed([token_id])
        assert detokenizer.take(False, True) == "" and detokenizer.text == ""
    detokenizer.feed([rest[2]])
    assert detokenizer.take(False, True) == "🦙"
    detokenizer.feed([first])
    assert detokenizer.take(False, True) == ""
    assert detokenizer.take(True, True) == "�"
    assert detokenizer.text == "🦙�"


def test_good_characters_survive_a_bad_byte_token() -> None:
    tokenizer = tokenizer_of("byte-fallback")
    ids = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in (*"🦙".encode(), 0xFF, *"é".encode(), 0xE4, 0xBD)]
    assert None not in ids
    assert PIPELINES["byte-fallback"].decode(ids) == "�" * 9
    assert tokenizer.decode(ids) == "🦙�é��"
    assert stream_text(tokenizer, [], ids, random.Random(0)) == "🦙�é��"


def test_a_prompt_that_ends_inside_a_character() -> None:
    tokenizer = tokenizer_of("byte-level")
    first, second, third = [tokenizer.token_to_id(c) for c in "ä½ł"]  # 你
    plain = tokenizer.token_to_id("x")
    rng = random.Random(0)
    assert stream_text(tokenizer, [plain, first, second], [third, plain], rng) == "你x"
    assert stream_text(tokenizer, [plain, first], [second, third, plain], rng) == "你x"
    assert stream_text(tokenizer, [plain, first, second], [plain], rng) == "x"  # that half belongs to the prompt
    assert stream_text(tokenizer, [plain, first, second], [], rng) == ""


def test_spaces_between_special_tokens() -> None:
    tokenizer = tokenizer_of("no-decoder")
    ids = [tokenizer.token_to_id(t) for t in ("a", "<s>", "</s>", "bc", "<s>")]
    rng = random.Random(0)
    assert stream_text(tokenizer, [], ids, rng, skip_special_tokens=False) == "a <s> </s> bc <s>"
    glued = stream_text(tokenizer, [], ids, rng, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert glued == "a <s></s> bc <s>"


def test_decoders_that_look_at_neighbours_are_compared_whole() -> None:
    assert isinstance(make_stream(tokenizer_of("suffix"), []), WindowStream)
    for name in BY_BYTES:
        assert isinstance(make_stream(tokenizer_of(name), []), ByteStream), name


def test_token_text_is_the_token_inside_a_text() -> None:
    tokenizer = tokenizer_of("byte-fallback-strip")
    hello = tokenizer.token_to_id("▁Hello")
    assert hello is not None
    assert tokenizer.token_text(hello) == " Hello"
    assert tokenizer.token_bytes(hello) == b" Hello"
    byte = tokenizer.token_to_id("<0xE4>")
    assert byte is not None
    assert tokenizer.token_bytes(byte) == b"\xe4" and tokenizer.token_text(byte) == "�"


def ends(tokenizer: Tokenizer, text: str, size: int, **params: Any) -> tuple[str | None, str, list[str]]:
    """Feed `size` ids at a time: the stop, the text, and the deltas as they were shown."""
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(**params))
    ids = tokenizer.encode(text)
    stop, shown = None, []
    for at in range(0, len(ids), size):
        stop = detokenizer.feed(ids[at : at + size])
        shown.append(detokenizer.take(stop is not None, True))
        if stop is not None:
            break
    else:
        shown.append(detokenizer.take(True, True))
    assert "".join(shown) == detokenizer.text
    return stop, detokenizer.text, shown


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_strings_across_token_borders(size: int) -> None:
    tokenizer = tokenizer_of("byte-level")
    text = "The quick brown fox. STOP and more"
    assert ends(tokenizer, text, size, stop=["STOP"])[:2] == ("STOP", "The quick brown fox. ")
    assert ends(tokenizer, text, size, stop=["STOP"], include_stop_str_in_output=True)[:2] == (
        "STOP",
        "The quick brown fox. STOP",
    )
    assert ends(tokenizer, text, size, stop=["never", "brown fox", "k b"])[:2] == ("k b", "The quic")
    assert ends(tokenizer, text, size, stop=["wn fox", "brown fox"])[:2] == ("brown fox", "The quick ")
    assert ends(tokenizer, text, size, stop=["absent", "STOQ"])[:2] == (None, text)
    assert ends(tokenizer, "ünïcödé 🦙 stops", size, stop=["🦙"])[:2] == ("🦙", "ünïcödé ")


def test_stop_strings_against_a_plain_search() -> None:
    rng = random.Random(2)
    matched = 0
    for _ in range(3000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=rng.randint(0, 12)))
        found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
        watched, at, match = StopStrings(stops), 0, None
        while at < len(text) and match is None:
            step = rng.randint(1, 4)
            match = watched.feed(text[at : at + step])
            if match is not None:
                match = (match.stop, at + match.end)
            at += step
        if found:
            end, _, stop = min(found)
            assert match == (stop, end), (text, stops)
            matched += 1
        else:
            assert match is None
            held = max((k for s in stops for k in range(len(s)) if text.endswith(s[:k])), default=0)
            assert watched.held == held, (text, stops)
    assert 500 < matched < 2900


def test_a_possible_stop_string_is_held_back_until_it_cannot_be_one() -> None:
    tokenizer = tokenizer_of("byte-level")
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=["abcd", "bX"]))
    seen = []
    for char in "xabceabcd":
        detokenizer.feed(tokenizer.encode(char))
        seen.append(detokenizer.take(False, True))
    assert seen == ["x", "", "", "", "abce", "", "", "", ""]
    assert detokenizer.text == "xabce"


def test_included_stop_strings_hold_nothing_back() -> None:
    tokenizer = tokenizer_of("byte-level")
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=["abcd"], include_stop_str_in_output=True))
    shown = []
    for char in "xabcd":
        detokenizer.feed(tokenizer.encode(char))
        shown.append(detokenizer.take(False, True))
    assert shown == list("xabcd")


def test_min_tokens_keeps_early_stop_strings() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = [tokenizer.encode(char)[0] for char in "ab ab ab"]

    def stop_after(min_tokens: int) -> tuple[int, str]:
        detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=["ab"], min_tokens=min_tokens, max_tokens=99))
        for count, token_id in enumerate(ids, 1):
            if detokenizer.feed([token_id]):
                return count, detokenizer.text
        return 0, detokenizer.text

    assert stop_after(0) == (2, "")
    assert stop_after(1) == (2, "")
    assert stop_after(2) == (5, "ab ")  # the first one was complete within two tokens
    assert stop_after(4) == (5, "ab ")  # this one begins within them and ends after
    assert stop_after(5) == (8, "ab ab ")
    assert stop_after(8) == (0, "ab ab ab")
    whole = Detokenizer(tokenizer, [], SamplingParams(stop=["ab"], min_tokens=4, max_tokens=99))
    assert whole.feed(ids) == "ab" and whole.text == "ab "


def test_a_stop_token_is_text_only_where_it_was_asked_for() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer.encode("ab") + tokenizer.encode("c")
    end = tokenizer.token_to_id("</s>")
    for include, skip, expected in [(False, True, "ab"), (True, True, "abc"), (False, False, "ab")]:
        params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
        detokenizer = Detokenizer(tokenizer, [], params)
        detokenizer.feed(ids, stop_terminated=True)
        assert detokenizer.take(True, False) == expected
    params = SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [], params)
    detokenizer.feed([*ids, end], stop_terminated=True)
    assert detokenizer.take(True, False) == "abc</s>"


def test_nothing_follows_a_stop_string() -> None:
    tokenizer = tokenizer_of("byte-level")
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=["b"]))
    assert detokenizer.feed(tokenizer.encode("abc")) == "b"
    assert detokenizer.feed(tokenizer.encode("more")) == "b"
    assert detokenizer.take(True, False) == "a"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    tokenizer = tokenizer_of("byte-fallback-strip")
    hello = tokenizer.token_to_id("▁Hello")
    assert hello is not None
    ids = [100_000, hello, 100_000, hello]
    assert stream_text(tokenizer, [], ids, random.Random(0)) == tokenizer.decode(ids) == "Hello Hello"


def test_cost_per_token_does_not_grow_with_the_text() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer.encode("the quick brown fox jumps over it ") * 40

    def seconds(detokenizer: Detokenizer) -> float:
        start = time.thread_time()
        for token_id in ids:
            detokenizer.feed([token_id])
            detokenizer.take(False, True)
        return time.thread_time() - start

    fresh, grown = [], []
    old = Detokenizer(tokenizer, [], SamplingParams(stop=["zzz", "over them"]))
    for _ in range(60):
        old.feed(ids)
    old.take(False, True)
    for _ in range(5):
        fresh.append(seconds(Detokenizer(tokenizer, [], SamplingParams(stop=["zzz", "over them"]))))
        grown.append(seconds(old))
    assert min(grown) < 4 * min(fresh)
