"""How byte-level vocabularies cut text into words before merging: one row per name a GGUF file may give.

Owns: the table. The regular expressions are data that each model publishes in its own tokenizer.json.
Comes in: the value of `tokenizer.ggml.pre`. Goes out: Split, plain data; text/forms/gguf.py builds from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cl100k(digits: str, letters: str = r"\p{L}", others: str = r"[^\s\p{L}\p{N}]") -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?{others}+[\r\n]*|{_TAIL}"


def _cased(digits: str, *, after: str = "", newline: str = r"[\r\n/]*", but: str = "") -> str:
    """Words by case: an upper-case run may lead a lower-case one."""
    upper, lower = rf"[{_UPPER}{but}]", rf"[{_LOWER}{but}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    by_case = rf"{lead}{upper}*{lower}+{after}|{lead}{upper}+{lower}*{after}"
    return rf"{by_case}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{newline}|{_TAIL}"


def _ranges(points: str) -> str:
    """Code points in hexadecimal, alone or as first-last -> the inside of a character class."""
    spans = (span.partition("-") for span in points.split())
    return "".join(f"{chr(int(first, 16))}-{chr(int(last or first, 16))}" for first, _, last in spans)


_DEEPSEEK_SPLIT = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# the cased alphabets as DeepSeek's first tokenizer lists them, by code point (some look like other letters)
_ALPHABETS = _ranges(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_PUNCTUATION = _ranges("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_HAN_KANA = f"[{_ranges('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_HAN_HANGUL = f"[{_ranges('4E00-9FA5 800-4E00 AC00-D7FF')}]+"


@dataclass(frozen=True)
class Split:
    """`cuts` run in order, each on the pieces of the one before: a regular expression, or one of the named steps
    "<digits>" (each digit alone), "<numbers>" (runs of digits), "<punctuation>" (runs), "<gpt2>" (GPT-2's own words,
    which also turns text into bytes; where it is absent that happens last)."""

    cuts: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token as a whole is taken so
    add_bos: bool = False  # where the file does not say


_GPT2 = Split(("<gpt2>",))
_DIGITS = Split(("<digits>", "<gpt2>"))
_LLAMA3 = Split((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = Split((_cl100k(r"\p{N}"),), nfc=True)
_DEEPSEEK3 = Split((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK_SPLIT))
_GPT4O = Split((_cased(r"\p{N}{1,3}", after=f"{_CONTRACTIONS}?"),))
_KIMI = r"\p{Han}+|" + _cased(r"\p{N}{1,3}", after=f"{_CONTRACTIONS}?", newline=r"[\r\n]*", but=r"&&[^\p{Han}]")
_BLOOM = Split((" ?[^(\\s|[.,!?…。，、।۔،])]+",))
_BAILING = Split(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)

SPLITS: dict[str, Split] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "jais": _GPT2,
    "gigachat": _GPT2,
    "mellum": _GPT2,
    "modern-bert": replace(_GPT2, nfc=True),
    "granite-docling": _GPT2,
    "trillion": _GPT2,
    "exaone4": _GPT2,
    "a.x-4.0": _GPT2,
    "roberta-bpe": _GPT2,
    "jina-v1-en": _GPT2,
    "jina-v2-code": _GPT2,
    "jina-v2-es": _GPT2,
    "jina-v2-de": _GPT2,
    "jina-es": _GPT2,
    "jina-de": _GPT2,
    "mpt": replace(_GPT2, nfc=True),
    "olmo": replace(_GPT2, nfc=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "minerva": _DIGITS,
    "minerva-7b": _DIGITS,
    "mellum2": _DIGITS,
    "command-r": replace(_DIGITS, nfc=True, add_bos=True),
    "falcon": Split(("<punctuation>", "<gpt2>", "<numbers>", "[0-9][0-9][0-9]")),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "lfm2": _LLAMA3,
    "jina-v5-nano": _LLAMA3,
    "dbrx": replace(_LLAMA3, ignore_merges=False, add_bos=False),
    "smaug-bpe": replace(_LLAMA3, ignore_merges=False),
    "chatglm-bpe": replace(_LLAMA3, ignore_merges=False, add_bos=False),
    "glm4": replace(_LLAMA3, add_bos=False),
    "glm5": replace(_LLAMA3, add_bos=False),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "kormo": _QWEN2,
    "f2llmv2": _QWEN2,
    "hunyuan": replace(_QWEN2, nfc=False),
    "solar-open": replace(_QWEN2, nfc=False),
    "stablelm2": replace(_QWEN2, nfc=False),
    "grok-2": replace(_QWEN2, nfc=False),
    "qwen35": Split((_cl100k(r"\p{N}", r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]"),), nfc=True),
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?[{_ALPHABETS}]+",
            rf"\s?[{_PUNCTUATION}]+",
            r"\s+$",
            _HAN_HANGUL,
            "<digits>",
        )
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, "<digits>")),
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "joyai-llm": _DEEPSEEK3,
    "tekken": Split((_cased(r"\p{N}"),), ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O,
    "llama4": replace(_GPT4O, add_bos=True),
    "kanana2": _GPT4O,
    "minimax-m2": _GPT4O,
    "kimi-k2": Split((_KIMI,)),
    "bloom": _BLOOM,
    "poro-chat": _BLOOM,
    "gpt3-finnish": _BLOOM,
    "viking": Split((*_BLOOM.cuts, "<digits>")),
    "bailingmoe": _BAILING,
    "bailingmoe2": _BAILING,
    "llada-moe": _BAILING,
    "seed-coder": Split(
        (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}",)
    ),
}
