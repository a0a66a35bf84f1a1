"""Where prompts come from: drawn at random, read from a file, or written here. Each has a length in tokens and a wish.

In: a tokenizer, a seed, the dataset's own options. Out: a list of Samples, the same for the same seed.
Must not know: who answers them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.bench.verse import write_lines
from quire.schema.errors import InputError

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

SHORTEST = 4  # tokens; less measures nothing but overhead
LONGEST_PROMPT, LONGEST_TOTAL = 1024, 2048  # of a recorded conversation
RERANK = "random-rerank"  # queries with documents, which only a ranking endpoint takes
_FEW = 64  # words fewer than this make prompts that look alike
_TRIES = 8


class Sample(NamedTuple):
    prompt: str
    prompt_len: int  # tokens, as this tokenizer counts them
    output_len: int  # tokens asked for
    more: tuple[str, ...] = ()  # further texts of the same request: inputs beside the prompt, or documents to rank


@dataclass(frozen=True)
class DatasetOptions:
    """Every dataset's options, under their flags' names."""

    dataset_name: str = "random"
    dataset_path: str | None = None
    num_prompts: int = 1000
    seed: int = 0
    disable_shuffle: bool = False
    no_oversample: bool = False
    apply_chat_template: bool = False  # custom and sonnet prompts go to an endpoint that renders nothing
    input_len: int | None = None  # for any dataset that has lengths
    output_len: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_prefix_len: int = 0
    random_batch_size: int = 1
    random_range_ratio: float | dict[str, float] = 0.0
    sonnet_input_len: int = 550
    sonnet_output_len: int = 150
    sonnet_prefix_len: int = 200
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128


def check_options(options: DatasetOptions) -> None:
    """What can be told before a model is loaded."""
    if options.num_prompts < 1:
        raise InputError(f"--num-prompts must be at least 1, got {options.num_prompts}", param="num_prompts")
    if options.dataset_name in ("random", RERANK):
        _batch_size(options)
        _input_bounds(options)
    if options.dataset_name == "random":
        _output_bounds(options)
    if options.dataset_name in OF_FILES:
        _open(_path(options, OF_FILES[options.dataset_name])).close()


def make_samples(tokenizer: Tokenizer, options: DatasetOptions) -> list[Sample]:
    check_options(options)
    samples = DATASETS[options.dataset_name](tokenizer, options)
    return _enough(samples, options)


def _enough(samples: list[Sample], options: DatasetOptions) -> list[Sample]:
    """Files may hold too few: then some are asked again, unless that is not wanted."""
    if not samples:
        raise InputError(f"dataset {options.dataset_name!r} holds no usable prompt", param="dataset_path")
    missing = options.num_prompts - len(samples)
    if missing <= 0 or options.no_oversample:
        return samples[: options.num_prompts]
    return samples + Random(options.seed).choices(samples, k=missing)


# ---- random ----------------------------------------------------------------------------------------------------------


class RandomTexts:
    """Texts of an exact number of tokens.

    Words that the vocabulary holds whole, each with its space, read back as the very tokens they were made of; where a
    vocabulary has no such words, any tokens are tried and the text is trimmed until the count is right.
    """

    def __init__(self, tokenizer: Tokenizer, random: Random) -> None:
        self._tokenizer, self._random = tokenizer, random
        special = set(tokenizer.all_special_ids)
        ids = [i for i in range(tokenizer.vocab_size) if i not in special]
        texts = {i: tokenizer.token_text(i) for i in ids}
        candidates = [i for i in ids if re.fullmatch(r" [a-z]{2,}", texts[i])]
        plain = [i for i in ids if texts[i].isascii() and texts[i].isprintable() and texts[i].strip()]
        self._ids = next(some for some in (candidates, plain, ids) if len(some) >= min(_FEW, len(ids)))

    def draw(self, length: int) -> list[int]:
        return self._random.choices(self._ids, k=length)

    def text(self, ids: list[int]) -> str:
        """A text of exactly len(ids) tokens: these, or as many others as it takes."""
        tokenizer, length = self._tokenizer, len(ids)
        for _ in range(_TRIES):
            text = tokenizer.decode(ids)
            again = tokenizer.encode(text, add_special_tokens=False)
            if len(again) == length:
                return text
            ids = again[:length] if len(again) > length else again + self.draw(length - len(again))
        raise InputError(
            f"this tokenizer gives no text of exactly {length} tokens (the nearest has {len(again)}); "
            "use a dataset from a file"
        )


def random_samples(tokenizer: Tokenizer, options: DatasetOptions) -> list[Sample]:
    random = Random(options.seed)
    texts = RandomTexts(tokenizer, random)
    batch = _batch_size(options)
    added = len(tokenizer.encode(""))  # special tokens that the server will put around the prompt
    low_in, high_in = _input_bounds(options)
    low_out, high_out = _output_bounds(options)
    prefix = texts.draw(options.random_prefix_len)
    samples = []
    for _ in range(options.num_prompts):
        lengths = [max(1, random.randint(low_in, high_in) - added) for _ in range(batch)]
        text, *more = (texts.text(prefix + texts.draw(length)) for length in lengths)
        total = sum(lengths) + batch * (len(prefix) + added)
        samples.append(Sample(text, total, random.randint(low_out, high_out), tuple(more)))
    return samples


def random_rerank_samples(tokenizer: Tokenizer, options: DatasetOptions) -> list[Sample]:
    """A query, and documents to rank; with the query, each document has the input's length."""
    random = Random(options.seed)
    texts = RandomTexts(tokenizer, random)
    batch = _batch_size(options)
    added = len(tokenizer.encode(""))
    low, high = _input_bounds(options)
    samples = []
    for _ in range(options.num_prompts):
        lengths = [max(2, random.randint(low, high) - added) for _ in range(batch)]
        query_len = max(1, min(lengths) // 2)
        query = texts.text(texts.draw(query_len))
        documents = tuple(texts.text(texts.draw(length - query_len)) for length in lengths)
        samples.append(Sample(query, sum(lengths) + batch * added, 0, documents))
    return samples


def _batch_size(options: DatasetOptions) -> int:
    if options.random_batch_size < 1:
        raise InputError(
            f"--random-batch-size must be at least 1, got {options.random_batch_size}", param="random_batch_size"
        )
    return options.random_batch_size


def _ratio(options: DatasetOptions, side: str) -> float:
    ratios = options.random_range_ratio
    ratio = ratios.get(side, 0.0) if isinstance(ratios, dict) else ratios
    if not 0.0 <= ratio < 1.0:
        raise InputError(
            f"--random-range-ratio must be at least 0 and below 1, got {ratio}", param="random_range_ratio"
        )
    return float(ratio)


def _input_bounds(options: DatasetOptions) -> tuple[int, int]:
    length = options.random_input_len if options.input_len is None else options.input_len
    return _bounds(length, _ratio(options, "input"), "--random-input-len")


def _output_bounds(options: DatasetOptions) -> tuple[int, int]:
    length = options.random_output_len if options.output_len is None else options.output_len
    return _bounds(length, _ratio(options, "output"), "--random-output-len")


def _bounds(length: int, ratio: float, name: str) -> tuple[int, int]:
    if length < 1:
        raise InputError(f"{name} must be at least 1, got {length}")
    return max(1, int(length * (1 - ratio))), int(length * (1 + ratio))


def prefix_repetition_samples(tokenizer: Tokenizer, options: DatasetOptions) -> list[Sample]:
    """A few long beginnings, each followed by many different ends: what a prefix cache is for."""
    random = Random(options.seed)
    texts = RandomTexts(tokenizer, random)
    num_prefixes = options.prefix_repetition_num_prefixes
    if not 1 <= num_prefixes <= options.num_prompts:
        raise InputError(
            f"--prefix-repetition-num-prefixes must be between 1 and --num-prompts ({options.num_prompts}), "
            f"got {num_prefixes}"
        )
    suffix_len = max(1, options.prefix_repetition_suffix_len)
    prefixes = [texts.draw(options.prefix_repetition_prefix_len) for _ in range(num_prefixes)]
    added = len(tokenizer.encode(""))
    samples = []
    for index in range(options.num_prompts):
        ids = prefixes[index % num_prefixes] + texts.draw(suffix_len)
        samples.append(Sample(texts.text(ids), len(ids) + added, options.prefix_repetition_output_len))
    if not options.disable_shuffle:
        random.shuffle(samples)
    return samples


# ---- files -----------------------------------------------------------------------------------------------------------


def sharegpt_samples(tokenizer: Tokenizer, options: DatasetOptions) -> list[Sample]:
    """The first question of each recorded conversation; its answer says how much to ask for."""
    path = _path(options, OF_FILES["sharegpt"])
    entries = _read_json(path)
    pairs = [
        (str(turns[0].get("value", "")), str(turns[1].get("value", "")))
        for entry in entries
        if isinstance(entry, dict) and len(turns := entry.get("conversations") or entry.get("conversation") or []) >= 2
    ]
    if not options.disable_shuffle:
        Random(options.seed).shuffle(pairs)
    output_len_option = options.output_len if options.sharegpt_output_len is None else options.sharegpt_output_len
    samples: list[Sample] = []
    for question, answer in pairs:
        if len(samples) == options.num_prompts:
            break
        prompt_len = len(tokenizer.encode(question))
        output_len = (
            len(tokenizer.encode(answer, add_special_tokens=False)) if output_len_option is None else output_len_option
        )
        too_short = prompt_len < SHORTEST or (output_len_option is None and output_len < SHORTEST)
        if not too_short and prompt_len <= LONGEST_PROMPT and prompt_len + output_len <= LONGEST_TOTAL:
            samples.append(Sample(question, prompt_len, output_len))
    return samples


def custom_samples(tokenizer: Tokenizer, options: DatasetOptions) -> list[Sample]:
    """JSON lines with "prompt" and, where --custom-output-len is -1, "output_tokens"."""
    path = _path(options, OF_FILES["custom"])
    lines = list(_read_lines(path))
    if not options.disable_shuffle:
        Random(options.seed).shuffle(lines)
    output_len_option = options.custom_output_len if options.output_len is None else options.output_len
    samples = []
    for number, line in lines[: options.num_prompts]:
        prompt = line.get("prompt")
        if not isinstance(prompt, str):
            raise InputError(f"{path}, line {number}: 'prompt' must be a string, got {prompt!r}", param="dataset_path")
        output_len = line.get("output_tokens") if output_len_option == -1 else output_len_option
        if not isinstance(output_len, int) or output_len < 1:
            raise InputError(
                f"{path}, line {number}: 'output_tokens' must be a number of at least 1, got {output_len!r}",
                param="dataset_path",
            )
        samples.append(_rendered(tokenizer, prompt, output_len, options))
    return samples


def sonnet_samples(tokenizer: Tokenizer, options: DatasetOptions) -> list[Sample]:
    """Verse, with an instruction: --sonnet-prefix-len tokens that all share, the rest drawn line by line.

    A file of lines may be given; without one, the lines are written here.
    """
    if options.dataset_path is not None:
        with _open(options.dataset_path) as file:
            lines = [line.rstrip("\n") + "\n" for line in file if line.strip()]
    else:
        lines = [f"{line}\n" for line in write_lines(512, seed=0)]
    input_len = options.sonnet_input_len if options.input_len is None else options.input_len
    output_len = options.sonnet_output_len if options.output_len is None else options.output_len
    instruction = "Pick as many lines as you can from these poem lines:\n"
    counts = [len(ids) for ids in tokenizer.encode_batch(lines, add_special_tokens=False)]
    each = sum(counts) / len(counts)
    base = _rendered(tokenizer, instruction, output_len, options).prompt_len
    if input_len <= base or options.sonnet_prefix_len > input_len:
        raise InputError(
            f"--sonnet-input-len {input_len} must exceed the {base} tokens of the instruction and be no less than "
            f"--sonnet-prefix-len {options.sonnet_prefix_len}",
            param="sonnet_input_len",
        )
    num_lines = max(1, round((input_len - base) / each))
    num_shared = min(num_lines, max(0, round((options.sonnet_prefix_len - base) / each)))
    random = Random(options.seed)
    samples = []
    for _ in range(options.num_prompts):
        chosen = lines[:num_shared] + random.choices(lines, k=num_lines - num_shared)
        samples.append(_rendered(tokenizer, instruction + "".join(chosen), output_len, options))
    return samples


def _rendered(tokenizer: Tokenizer, prompt: str, output_len: int, options: DatasetOptions) -> Sample:
    """Through the chat template, where the endpoint does not do that itself."""
    if options.apply_chat_template and tokenizer.chat_template is not None:
        message = [{"role": "user", "content": prompt}]
        prompt = str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
        return Sample(prompt, len(tokenizer.encode(prompt, add_special_tokens=False)), output_len)
    return Sample(prompt, len(tokenizer.encode(prompt)), output_len)


def _path(options: DatasetOptions, what: str) -> str:
    if options.dataset_path is None:
        raise InputError(f"--dataset-name {options.dataset_name} needs --dataset-path, {what}", param="dataset_path")
    return options.dataset_path


def _open(path: str) -> Any:
    try:
        return open(path, encoding="utf-8")
    except OSError as wrong:
        raise InputError(f"--dataset-path {path}: {wrong.strerror}", param="dataset_path", value=path) from None


def _read_json(path: str) -> list[Any]:
    with _open(path) as file:
        try:
            content = json.load(file)
        except (ValueError, UnicodeDecodeError) as wrong:
            raise InputError(f"--dataset-path {path} is not JSON: {wrong}", param="dataset_path") from None
    if not isinstance(content, list):
        raise InputError(f"--dataset-path {path} must hold a list, got {type(content).__name__}", param="dataset_path")
    return content


def _read_lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except ValueError as wrong:
                raise InputError(f"{path}, line {number} is not JSON: {wrong}", param="dataset_path") from None
            if not isinstance(content, dict):
                raise InputError(f"{path}, line {number} must be a mapping, got {line.strip()[:60]!r}")
            yield number, content


DATASETS: dict[str, Callable[[Tokenizer, DatasetOptions], list[Sample]]] = {
    "random": random_samples,
    RERANK: random_rerank_samples,
    "sharegpt": sharegpt_samples,
    "sonnet": sonnet_samples,
    "custom": custom_samples,
    "prefix_repetition": prefix_repetition_samples,
}
OF_FILES = {"sharegpt": "the ShareGPT JSON file", "custom": "a JSONL file"}
# Names that other tools of this kind know.
LATER = (
    "burstgpt", "hf", "random-mm", "custom_audio", "custom_image", "custom_mm", "spec_bench",
    "speed_bench", "timed_trace",
)  # fmt: skip
