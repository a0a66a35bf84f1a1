"""Datasets of the benches: exact lengths, the same for the same seed, and clear words about bad files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.bench.datasets import DATASETS, DatasetOptions, Sample, make_samples
from quire.bench.verse import write_lines
from quire.checkpoint.source import locate
from quire.schema.errors import InputError
from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.fake_engine import write_model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate(None).path)


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary without words."""
    return load_tokenizer(write_model(tmp_path_factory.mktemp("model")))


def samples(tokenizer: Tokenizer, **options: Any) -> list[Sample]:
    return make_samples(tokenizer, DatasetOptions(**{"num_prompts": 12} | options))


def lengths(tokenizer: Tokenizer, found: list[Sample]) -> list[int]:
    return [len(tokenizer.encode(sample.prompt)) for sample in found]


def test_random_prompts_have_exactly_their_length(tokenizer: Tokenizer) -> None:
    found = samples(tokenizer, random_input_len=97, random_output_len=5)
    assert lengths(tokenizer, found) == [97] * 12
    assert {sample.prompt_len for sample in found} == {97} and {sample.output_len for sample in found} == {5}
    assert len({sample.prompt for sample in found}) == 12


def test_random_prompts_without_a_vocabulary_of_words(bytes_only: Tokenizer) -> None:
    found = samples(bytes_only, random_input_len=33)
    assert lengths(bytes_only, found) == [33] * 12


def test_queries_with_documents(tokenizer: Tokenizer) -> None:
    """A document and its query have the input's length together; lengths vary by document."""
    ranked = samples(
        tokenizer, dataset_name="random-rerank", random_input_len=40, random_range_ratio=0.5, random_batch_size=5
    )
    pairs = []
    for sample in ranked:
        query = len(tokenizer.encode(sample.prompt, add_special_tokens=False))
        documents = [len(tokenizer.encode(text, add_special_tokens=False)) for text in sample.more]
        assert len(documents) == 5 and sample.prompt_len == sum(query + one for one in documents)
        pairs += [query + one for one in documents]
    assert min(pairs) >= 20 and max(pairs) <= 60 and len(set(pairs)) > 10


def test_the_seed_decides(tokenizer: Tokenizer) -> None:
    for name in ("random", "random-rerank", "prefix_repetition", "sonnet"):
        one, same = (samples(tokenizer, dataset_name=name, seed=3) for _ in range(2))
        assert one == same != samples(tokenizer, dataset_name=name, seed=4)


def test_lengths_vary_within_the_ratio(tokenizer: Tokenizer) -> None:
    found = samples(
        tokenizer, num_prompts=60, random_input_len=40, random_output_len=20, random_range_ratio={"input": 0.5}
    )
    assert lengths(tokenizer, found) == [sample.prompt_len for sample in found]
    assert min(lengths(tokenizer, found)) < 30 and max(lengths(tokenizer, found)) > 50
    assert all(20 <= length <= 60 for length in lengths(tokenizer, found))
    assert {sample.output_len for sample in found} == {20}


def test_a_prefix_is_shared(tokenizer: Tokenizer) -> None:
    found = samples(tokenizer, random_input_len=10, random_prefix_len=30)
    ids = [tokenizer.encode(sample.prompt) for sample in found]
    assert {tuple(one[:30]) for one in ids} == {tuple(ids[0][:30])}
    assert len({tuple(one[30:]) for one in ids}) == 12
    assert lengths(tokenizer, found) == [40] * 12


def test_prefix_repetition(tokenizer: Tokenizer) -> None:
    found = samples(
        tokenizer, dataset_name="prefix_repetition", prefix_repetition_num_prefixes=3, prefix_repetition_prefix_len=20,
        prefix_repetition_suffix_len=5, prefix_repetition_output_len=7,
    )  # fmt: skip
    ids = [tokenizer.encode(sample.prompt) for sample in found]
    starts = [tuple(one[:20]) for one in ids]
    assert {starts.count(start) for start in starts} == {4}
    assert lengths(tokenizer, found) == [25] * 12 and found[0].output_len == 7
    with pytest.raises(InputError, match="between 1 and"):
        samples(tokenizer, dataset_name="prefix_repetition", prefix_repetition_num_prefixes=13)


def test_sonnet_is_about_as_long_as_asked_and_shares_its_start(tokenizer: Tokenizer) -> None:
    found = samples(tokenizer, dataset_name="sonnet", sonnet_input_len=300, sonnet_prefix_len=100)
    assert all(abs(length - 300) < 45 for length in lengths(tokenizer, found))
    ids = [tokenizer.encode(sample.prompt) for sample in found]
    assert len({tuple(one[:80]) for one in ids}) == 1 and len({tuple(one) for one in ids}) == 12
    with pytest.raises(InputError, match="must exceed"):
        samples(tokenizer, dataset_name="sonnet", sonnet_input_len=5, sonnet_prefix_len=2)


def test_verse_has_no_line_twice() -> None:
    lines = write_lines(512, seed=0)
    assert len(set(lines)) == 512 and lines == write_lines(512, seed=0)


def test_sharegpt_takes_first_questions_of_fit_length(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def talk(*turns: str) -> dict[str, Any]:
        return {"conversations": [{"from": "x", "value": turn} for turn in turns]}

    long = "word " * 1500
    path = tmp_path / "talks.json"
    talks = [
        talk("What is the capital of France?", "It is Paris, a large city."), talk("only one turn here"),
        talk(long, "too long a question"), talk("short", "no"), talk("Tell me a long story now.", long),
    ]  # fmt: skip
    path.write_text(json.dumps(talks))
    options = dict(dataset_name="sharegpt", dataset_path=str(path), num_prompts=5)
    found = samples(tokenizer, **options, no_oversample=True)
    assert {sample.prompt for sample in found} == {"What is the capital of France?", "Tell me a long story now."}
    answer = len(tokenizer.encode("It is Paris, a large city.", add_special_tokens=False))
    assert answer in [sample.output_len for sample in found]
    assert len(samples(tokenizer, **options)) == 5  # asked again
    assert {sample.output_len for sample in samples(tokenizer, **options, sharegpt_output_len=9)} == {9}


def test_custom_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One two three", "output_tokens": 3}\n\n{"prompt": "Four five", "output_tokens": 4}\n')
    options = dict(dataset_name="custom", dataset_path=str(path), num_prompts=2, disable_shuffle=True)
    assert [s.prompt for s in samples(tokenizer, **options)] == ["One two three", "Four five"]
    assert [s.output_len for s in samples(tokenizer, **options)] == [256, 256]
    assert [s.output_len for s in samples(tokenizer, **options, custom_output_len=-1)] == [3, 4]
    rendered = samples(tokenizer, **options, apply_chat_template=True)
    assert "<|im_start|>user\nOne two three<|im_end|>" in rendered[0].prompt
    assert rendered[0].prompt_len == len(tokenizer.encode(rendered[0].prompt, add_special_tokens=False))


@pytest.mark.parametrize(
    "text, says",
    [
        ('{"prompt": 5}\n', "line 1: 'prompt' must be a string"),
        ("{}\n{\n", "line 2 is not JSON"),
        ('["a"]\n', "line 1 must be a mapping"),
        ("\n", "holds no usable prompt"),
        ('{"prompt": "a b"}\n', "'output_tokens' must be a number of at least 1, got None"),
    ],
)
def test_bad_lines_are_named(text: str, says: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        samples(tokenizer, dataset_name="custom", dataset_path=str(path), custom_output_len=-1)


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(num_prompts=0), "--num-prompts must be at least 1"),
        (dict(random_input_len=0), "--random-input-len must be at least 1"),
        (dict(random_range_ratio=1.0), "below 1"),
        (dict(dataset_name="sharegpt"), "needs --dataset-path"),
        (dict(dataset_name="custom", dataset_path="/no/such/file"), "No such file"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], says: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match=says):
        samples(tokenizer, **options)


def test_every_dataset_is_tested_here() -> None:
    assert set(DATASETS) == {"random", "random-rerank", "sharegpt", "sonnet", "custom", "prefix_repetition"}
