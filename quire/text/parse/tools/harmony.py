"""openai: gpt-oss, in the harmony format. Also the reasoning parser openai_gptoss.

    <|channel|>analysis<|message|>The user wants...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"zone": "CET"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>

without the line breaks. An answer is a row of messages; its prompt ends with <|start|>assistant. The channel analysis
is thought, final is content, and commentary is content unless it has a recipient: then it is a call, in whatever
channel. Messages of one kind are joined by a line break.
"""

import re

from quire.text.parse.call_form import CallForm
from quire.text.parse.json_calls import read_body
from quire.text.parse.json_text import skip_space
from quire.text.parse.tags import Emit, Steps, Tags, TextSource
from quire.text.parse.writer import LONGEST_NAME, DeltaWriter, ToolFormat

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_CLOSES = ("<|end|>", "<|return|>", "<|call|>")
_HEADS = Tags(_START, _CHANNEL, *_CLOSES)
_HEADER_ENDS = Tags(_MESSAGE, _START, *_CLOSES)
_BODY_ENDS = Tags(*_CLOSES, _START, _CHANNEL)
_OPEN_ENDS = (_START, _CHANNEL)
_CALL_ENDS = Tags(*_CLOSES)
_RECIPIENT = re.compile(r"\bto=([^\s<]{1,256})")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w{1,32})")
FINAL = f"{_CHANNEL}final{_MESSAGE}"  # the answer follows
TO_FINAL = f"<|end|>{_START}assistant{FINAL}"
TAGS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_CLOSES)


class Harmony:
    """Reads a row of messages. Without `calls`, what is said to a function is content."""

    def __init__(self, calls: bool = True) -> None:
        self._calls = calls

    def __call__(self, source: TextSource, out: DeltaWriter) -> Steps[None]:
        kinds_seen: set[str] = set()
        while True:
            tag = yield from source.until(_HEADS, out.content)
            if not tag:
                return
            if tag not in _CLOSES:
                source.record(tag)
                yield from self._message(source, out, kinds_seen)

    def _message(self, source: TextSource, out: DeltaWriter, kinds_seen: set[str]) -> Steps[None]:
        _, tag = yield from source.text_until(_HEADER_ENDS, keep=(_START,))
        header = source.recorded()
        if tag != _MESSAGE:
            out.content(header)
            return
        channel = _CHANNEL_NAME.search(header)
        recipient = _RECIPIENT.search(header)
        name = recipient.group(1).removeprefix("functions.") if recipient else ""
        if self._calls and name and len(name) <= LONGEST_NAME:
            out.open(name)
            yield from skip_space(source)
            tag = yield from read_body(source, out, _CALL_ENDS)
        elif channel is not None and channel.group(1) == "analysis":
            yield from source.until(_BODY_ENDS, _joined(out.reasoning, "analysis", kinds_seen), keep=_OPEN_ENDS)
        else:
            yield from source.until(_BODY_ENDS, _joined(out.content, "content", kinds_seen), keep=_OPEN_ENDS)


def _joined(emit: Emit, kind: str, kinds_seen: set[str]) -> Emit:
    """`emit`, with a line break first if there was a message of this kind before."""
    parted = kind not in kinds_seen

    def write(text: str) -> None:
        nonlocal parted
        emit(text if parted else "\n" + text)
        parted = True
        kinds_seen.add(kind)

    return write


_FORM = CallForm(  # the mark that ends a call ends the answer
    f"{{name}} {_CONSTRAIN}json{_MESSAGE}",
    triggers=(f"{_CHANNEL}commentary to=functions.",),
    others=(f"{_START}assistant to=", f"{_CHANNEL}analysis to=", f"{_CHANNEL}final to="),
    alone=True,
    in_thought=True,
)
FORMAT = ToolFormat(Harmony(), TAGS, forms=(_FORM,))
TEXT_ONLY = ToolFormat(Harmony(calls=False), TAGS)
