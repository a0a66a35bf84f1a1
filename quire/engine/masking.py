"""What the grammar room needs from an engine: the vocabulary as bytes, and where a model's thoughts begin and end.

In: a resolved EngineConfig. Out: Masks. The tokenizer is loaded in a compiling thread when the first constrained
request comes, never on the step's path; where thoughts are watched, in a thread of its own as the engine starts.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from quire.grammar.backend import GrammarVocabulary
from quire.grammar.compiler import CompileLimits
from quire.grammar.masks import Masks
from quire.grammar.thought import Marks, Thought
from quire.schema.errors import ConfigError
from quire.schema.messages import EngineRequest

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.text.parse.choose import ParserChoice
    from quire.text.parse.reasoning import ReasoningFormat
    from quire.text.tokenizer import Tokenizer

_TAIL = 64  # tokens at a prompt's end that tell whether a thought is open
_CONTINUED = 1 << 14  # the same for a prompt that ends within an answer
_KNOWN = 1 << 16  # tokens whose text is remembered


def make_masks(config: EngineConfig, vocab_size: int, *, ends_slow: bool = True) -> Masks:
    """`ends_slow`: as of Masks."""
    options = config.structured_outputs_config
    limits = CompileLimits(seconds=options.compile_timeout, num_workers=options.compile_workers)
    words = _Words(config, vocab_size)
    thinks = config.thinks
    if thinks:
        threading.Thread(target=words.get_ready, name="thoughts", daemon=True).start()
    return Masks(
        words.vocabulary, limits=limits, watch=words.thought if thinks else None, vocab_size=vocab_size,
        ends_slow=ends_slow,
    )  # fmt: skip


class _Words:
    """The model's tokenizer, as far as grammars ask for it."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._lock = threading.RLock()
        self.text_of = lru_cache(maxsize=_KNOWN)(self._text_of)

    def get_ready(self) -> None:
        """A tokenizer that cannot be had is the first request's to tell."""
        with contextlib.suppress(Exception):
            self.tokenizer()
            self.marks()

    def tokenizer(self) -> Tokenizer:
        with self._lock:
            return self._tokenizer

    def marks(self) -> tuple[ReasoningFormat, Marks] | None:
        with self._lock:
            return self._marks

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        model = self._config.model_config
        from quire.text.tokenizer import load_tokenizer  # lazy

        loaded: Tokenizer = load_tokenizer(
            model.tokenizer,
            mode=model.tokenizer_mode,
            revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
            download_dir=self._config.load_config.download_dir,
        )
        return loaded

    @cached_property
    def _marks(self) -> tuple[ReasoningFormat, Marks] | None:
        """None: thoughts of this family have no recognizable end."""
        options, reasoning = self._config.structured_outputs_config, self._config.reasoning_config
        tokenizer = self._tokenizer
        from quire.text.parse.choose import ParserChoice  # lazy

        chosen: ParserChoice = ParserChoice.of(
            tokenizer, reasoning=options.reasoning_parser, reasoning_plugin=options.reasoning_parser_plugin
        )
        if chosen.reasoning is None and reasoning is not None:
            from quire.text.parse.reasoning import ReasoningFormat  # lazy

            own = ReasoningFormat((reasoning.reasoning_start_str,), (reasoning.reasoning_end_str,))
            chosen = replace(chosen, reasoning=own)
        form, tags = chosen.reasoning_format(), chosen.reasoning_tokens()
        if form is None or tags is None:
            return None
        forced, ends = tags.forced, tags.ends
        if reasoning is not None and reasoning.reasoning_end_str:
            forced = tuple(tokenizer.encode(reasoning.reasoning_end_str, add_special_tokens=False))
            ends = (*ends, reasoning.reasoning_end_str.strip())
        starts = tuple(tag.encode() for tag in tags.starts)
        return form, Marks(
            starts, tuple(tag.encode() for tag in ends), tags.start, forced, self.text_of, tags.first, tags.may_stop
        )

    def _text_of(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer
        special = tokenizer.id_to_token(token_id) if token_id in tokenizer.skipped_ids else None
        return tokenizer.token_bytes(token_id) if special is None else special.encode()

    def vocabulary(self) -> GrammarVocabulary:
        tokenizer, size = self.tokenizer(), self._vocab_size
        silent = tokenizer.skipped_ids
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        ends = tuple(i for i in dict.fromkeys((*own, *self._config.model_config.eos_token_ids)) if 0 <= i < size)
        if not ends:
            raise ConfigError("structured output needs an end-of-text token, and this model names none")
        count = min(tokenizer.vocab_size, size)
        tokens = [b"" if i in silent or i in ends else tokenizer.token_bytes(i) for i in range(count)]
        special = {i: (tokenizer.id_to_token(i) or "").encode() for i in silent if i < count and i not in ends}
        return GrammarVocabulary(tokens=tokens, size=size, ends=ends, special=special)

    def thought(self, request: EngineRequest) -> Thought | None:
        """None: there is none, it is over where the prompt ends, or nothing asks about it."""
        spec = request.sampling.grammar
        waits = spec is not None and not spec.in_thought
        bound = waits and not self._config.structured_outputs_config.enable_in_reasoning
        budget = request.sampling.thinking_token_budget
        form_and_marks = self.marks() if bound or budget is not None else None
        if form_and_marks is None:
            return None
        form, marks = form_and_marks
        tail = request.prompt_token_ids[-(_CONTINUED if request.continues else _TAIL) :]
        prompt = self.tokenizer().decode(tail).rstrip()
        inside = form.harmony or form.begins_inside(prompt, continues=request.continues, thinking=request.thinking)
        closed = prompt.endswith(tuple(tag.strip() for tag in form.end)) if form.end else prompt.endswith("<|message|>")
        off = request.thinking is False and form.inside
        if not inside and (closed or off or request.continues):
            return None
        return Thought(marks, inside=inside, bound=bound, budget=budget)
