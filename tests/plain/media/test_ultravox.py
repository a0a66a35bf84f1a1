"""Ultravox's audio: how many vectors, which token stands for them, and what its files may not say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.media.audio import Audio
from quire.media.expand import expand_ids, expand_text, find_places
from quire.media.families.ultravox import Ultravox
from quire.media.settings import ProcessorFiles
from quire.schema.errors import InputError

CONFIG = {"audio_config": {"num_mel_bins": 16}, "text_config": {"vocab_size": 300}, "stack_factor": 8}


class Words:
    """A tokenizer of one token per word."""

    special: dict[str, str] = {}

    def __init__(self, **known: int) -> None:
        self.known = {name.replace("_", "|") if name == "_audio_" else name: at for name, at in known.items()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        for token in self.known:
            text = text.replace(token, f" {token} ")
        return [self.known.get(word, 7) for word in text.split()]

    def token_to_id(self, token: str) -> int | None:
        return self.known.get(token)


def family(config: dict[str, Any] | None = None, **processor: Any) -> Ultravox:
    return Ultravox(ProcessorFiles(CONFIG if config is None else config, processor, {}))


def audio(seconds: float) -> Audio:
    return Audio(np.zeros(int(16000 * seconds), np.float32), 16000)


@pytest.mark.parametrize(
    ("seconds", "lens"),
    [(0.001, [2]), (1.0, [100]), (30.0, [3000]), (30.001, [3000, 1]), (70.0, [3000, 3000, 1000])],
)
def test_long_audio_is_heard_in_pieces(seconds: float, lens: list[int]) -> None:
    item = family().process("audio", audio(seconds), {}, 1)
    assert item.arrays["piece_lens"].tolist() == lens
    assert item.arrays["input_features"].shape == (len(lens), 16, max(lens))
    assert item.num_vectors == sum(-(-num // 16) for num in lens)
    assert item.text == "<|audio|>" * item.num_vectors


@pytest.mark.parametrize(
    ("tokenizer", "token"),
    [
        (Words(**{"<|audio|>": 9, "<unk>": 3}), 9),  # a token of its own
        (Words(**{"<|audio|>": 300, "<|reserved_special_token_0|>": 8, "<unk>": 3}), 8),  # which has no embedding
        (Words(**{"<unk>": 3}), 3),
    ],
)
def test_the_token_that_stands_for_audio(tokenizer: Words, token: int) -> None:
    own = family()
    items = {"audio": [own.process("audio", audio(0.2), {}, 2), own.process("audio", audio(0.5), {}, 2)]}
    ids = tokenizer.encode(expand_text(own, "a <|audio|> b <|audio|> c", items, tokenizer))
    expected = [7, *[token] * 2, 7, *[token] * 4, 7]
    assert ids == expected
    assert [(one.offset, one.length) for one in find_places(own, ids, items, tokenizer)] == [(1, 2), (4, 4)]
    placeholder = tokenizer.token_to_id("<|audio|>") or token
    assert expand_ids(own, [7, placeholder, 7, placeholder, 7], items, tokenizer) == expected
    assert expand_ids(own, expected, items, tokenizer) == expected
    with pytest.raises(InputError, match="must not contain these tokens besides"):
        find_places(own, [*expected, token], items, tokenizer)


def test_a_tokenizer_without_any_such_token() -> None:
    own = family()
    items = {"audio": [own.process("audio", audio(0.2), {}, 1)]}
    with pytest.raises(InputError, match=r"has no token '<\|audio\|>', which stands for media"):
        find_places(own, [7, 7], items, Words())


@pytest.mark.parametrize(
    ("config", "processor", "name"),
    [
        ({"stack_factor": 10**9}, {}, "stack_factor"),
        ({"stack_factor": "x"}, {}, "stack_factor"),
        ({}, {"stack_factor": -1}, "stack_factor"),
        ({}, {"audio_context_size": 10**9}, "audio_context_size"),
        ({}, {"audio_context_size": 0}, "audio_context_size"),
        ({}, {"encoder_ds_factor": 4}, "encoder_ds_factor"),
        ({"audio_config": {"max_source_positions": 10**9}}, {}, "max_source_positions"),
        ({"audio_config": {"num_mel_bins": 10**9}}, {}, "num_mel_bins of audio_config"),
    ],
)  # fmt: skip
def test_numbers_of_files_are_checked(config: dict[str, Any], processor: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=name):
        family(config, **processor)
