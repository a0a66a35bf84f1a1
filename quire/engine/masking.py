"""What the grammar room needs from an engine: the vocabulary as bytes, and where a model's thoughts begin and end.

In: a resolved EngineConfig. Out: Masks. The tokenizer is loaded in a compiling thread when the first constrained
request comes, never on the step's path.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from quire.base import registry
from quire.grammar.backend import Vocabulary
from quire.grammar.compiler import Limits
from quire.grammar.masks import Masks
from quire.grammar.thought import Thought
from quire.schema.errors import ConfigError
from quire.schema.messages import EngineRequest

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.text.parse.choose import ParserChoice
    from quire.text.tokenizer import Tokenizer

LOAD_TOKENIZER, PARSER_CHOICE = "quire.text.tokenizer:load_tokenizer", "quire.text.parse.choose:ParserChoice.of"
_TAIL = 64  # tokens at a prompt's end that tell whether a thought is open


def make_masks(config: EngineConfig, vocab_size: int) -> Masks:
    options = config.structured_outputs_config
    limits = Limits(seconds=options.compile_timeout, num_workers=options.compile_workers)
    words = _Words(config, vocab_size)
    thinks = bool(options.reasoning_parser) and not options.enable_in_reasoning
    return Masks(words.vocabulary, limits=limits, watch=words.thought if thinks else None)


class _Words:
    """The model's tokenizer, as far as grammars ask for it."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        model = self._config.model_config
        loaded: Tokenizer = registry.load(LOAD_TOKENIZER)(
            model.tokenizer,
            mode=model.tokenizer_mode,
            revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
            download_dir=self._config.load_config.download_dir,
        )
        return loaded

    @cached_property
    def _parsers(self) -> ParserChoice:
        options = self._config.structured_outputs_config
        chosen: ParserChoice = registry.load(PARSER_CHOICE)(
            self._tokenizer, reasoning=options.reasoning_parser, reasoning_plugin=options.reasoning_parser_plugin
        )
        return chosen

    def vocabulary(self) -> Vocabulary:
        tokenizer, size = self._tokenizer, self._vocab_size
        silent = tokenizer.skipped_ids
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        ends = tuple(i for i in dict.fromkeys((*own, *self._config.model_config.eos_token_ids)) if 0 <= i < size)
        if not ends:
            raise ConfigError("structured output needs an end-of-text token, and this model names none")
        count = min(tokenizer.vocab_size, size)
        tokens = [b"" if i in silent or i in ends else tokenizer.token_bytes(i) for i in range(count)]
        return Vocabulary(tokens=tokens, size=size, ends=ends)

    def thought(self, request: EngineRequest) -> Thought | None:
        """None: there is none, or it is over where the prompt ends."""
        marks, tags = self._parsers.reasoning, self._parsers.reasoning_tokens()
        if tags is None:
            return None
        prompt = self._tokenizer.decode(request.prompt_token_ids[-_TAIL:]).rstrip()
        if prompt.endswith(tuple(tag.strip() for tag in marks.end)):
            return None
        return Thought(tags.start, tags.end, inside=marks.begins_inside(prompt))
