"""ServedModels: the one table from names in requests to models: base model, adapters, further engines.

In: an engine and the server's options; later, entries that are added and removed while the server runs. Out: for a name
the ServedModel that answers, 404 for any other. Routes see only the ServedModel of their call (route.py looks it up),
so an entry needs no change in any dialect. Touched by one event loop. Must not know: HTTP, dialects.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire import __version__
from quire.schema.errors import InputError, ModelNotFoundError
from quire.text.chat import choose_template
from quire.text.parse.choose import ParserChoice
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.config.server import ServerConfig
    from quire.llm.online import AsyncLLM

_SHOWN = 200  # characters of a client's own words in a message
_LISTED, _LISTED_CHARS = 20, 80  # names in a message, and characters of each
_LONGEST_NAME = 256


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What answers under a name, and all that its dialects have to know of it.

    An adapter's is a copy of its base's with `name`, `adapter`, `parent` and `root` replaced."""

    name: str  # what answers call it, whatever alias the request has
    engine: AsyncLLM
    config: EngineConfig
    root: str  # where its weights came from
    max_model_len: int
    adapter: str | None = None  # the name under which the engine has loaded one
    adapter_id: int = 0  # the engine's number of it
    parent: str | None = None  # of an adapter: the name of its base model
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None  # the server's own, as text; None: the model's
    parsers: ParserChoice = field(default_factory=ParserChoice)
    fingerprint: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    @classmethod
    def of(cls, engine: AsyncLLM, options: ServerConfig) -> ServedModel:
        """The base model of an engine."""
        config = engine.vllm_config
        template = options.chat_template
        if template is not None and engine.tokenizer is not None:
            template = choose_template(engine.tokenizer, template)  # a wrong one is found now, not at the first chat
        return cls(
            name=_names(config)[0],
            engine=engine,
            config=config,
            root=config.model_config.model,
            max_model_len=engine.front.inputs.max_model_len,
            default_sampling=dict(config.model_config.default_sampling),
            chat_template=template,
            parsers=choose_parsers(config, options, engine.tokenizer),
            fingerprint=_fingerprint(config, options),
        )

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InputError("the server has no tokenizer (skip_tokenizer_init): only token ids can be sent and got")
        return tokenizer

    @property
    def takes_media(self) -> bool:
        return self.engine.front.inputs.takes_media

    @property
    def media_order(self) -> str:
        """Where media stand in content that is a string (text/chat.py)."""
        options = self.config.model_config.multimodal_config
        return "between" if options is not None and options.interleave_mm_strings else "first"

    @cached_property
    def keeps_special(self) -> tuple[bool, bool]:
        """Whether special tokens must stay in an answer's text: without tools, with them."""
        return self.parsers.keeps_special_tokens(with_tools=False), self.parsers.keeps_special_tokens(with_tools=True)


class ServedModels:
    """The table. A request that runs keeps its ServedModel, also when the entry is removed."""

    def __init__(self, base: ServedModel, names: Iterable[str] = ()) -> None:
        """`names`: all that the base model is known by; its own, if there are none."""
        self.base = base  # for requests that name no model
        self._models = dict.fromkeys((*names,) or (base.name,), base)

    @classmethod
    def of(cls, engine: AsyncLLM, options: ServerConfig) -> ServedModels:
        return cls(ServedModel.of(engine, options), _names(engine.vllm_config))

    def get(self, name: str | None) -> ServedModel | None:
        """None: no such name so far."""
        return self._models.get(name) if name else self.base

    def find(self, name: str | None) -> ServedModel:
        if (model := self.get(name)) is not None:
            return model
        assert name
        raise ModelNotFoundError(
            f"The model `{name:.{_SHOWN}}` does not exist. Valid aliases: {self._listed()}.",
            param="model",
            value=name[:_SHOWN],
        )

    def entries(self) -> tuple[tuple[str, ServedModel], ...]:
        """Every name with its model, in the order in which they were added."""
        return tuple(self._models.items())

    def add(self, model: ServedModel) -> None:
        self.check(model)
        self._models[model.name] = model

    def check(self, model: ServedModel, *, is_known: bool = False) -> None:
        """InputError if it cannot be added. `is_known`: it is to take the place of the one that has its name."""
        name = model.name
        if not name or len(name) > _LONGEST_NAME or not name.isprintable():
            raise InputError(
                f"a served name has 1 to {_LONGEST_NAME} printable characters, got {len(name)}: {name!r:.{_SHOWN}}",
                param="model",
            )
        if name in self._models and not is_known:
            raise InputError(f"the name {name!r} is served already", param="model", value=name)
        if model.parent is not None:
            self.find(model.parent)

    def remove(self, name: str) -> ServedModel:
        """Requests under this name are refused from now on."""
        model = self.find(name)
        if model is self.base:
            raise InputError(f"{name!r} is the server's base model and cannot be removed", param="model", value=name)
        return self._models.pop(name)

    def _listed(self) -> str:
        names = [name if len(name) <= _LISTED_CHARS else f"{name[:_LISTED_CHARS]}…" for name in self._models]
        more = len(names) - _LISTED
        return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def choose_parsers(config: EngineConfig, options: ServerConfig, tokenizer: Tokenizer | None = None) -> ParserChoice:
    """By the options' names; a wrong one is a ConfigError. Without a tokenizer only the names are checked."""
    reasoning = config.structured_outputs_config
    return ParserChoice.of(
        tokenizer,
        tool=options.tool_call_parser,
        reasoning=reasoning.reasoning_parser,
        tool_plugin=options.tool_parser_plugin,
        reasoning_plugin=reasoning.reasoning_parser_plugin,
    )


def _names(config: EngineConfig) -> tuple[str, ...]:
    model = config.model_config
    return tuple(model.served_model_names or (model.served_model_name,))


def _fingerprint(config: EngineConfig, options: ServerConfig) -> str | None:
    """As vLLM writes it: who, which version, and a mark of the configuration that answers depend on."""
    mode = options.fingerprint_mode
    if mode == "none":
        return None
    if mode == "custom":
        return options.fingerprint_value
    model = config.model_config
    what = (model.model, model.revision, model.dtype, model.quantization, model.max_model_len, model.seed)
    mark = hashlib.sha256(repr(what).encode()).hexdigest()[:8]
    return mark if mode == "hash" else f"quire-{__version__}-{mark}"
