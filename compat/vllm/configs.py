"""What vllm.config has besides its classes: the config in force, changed copies, texts about fields, types by name."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import fields
from typing import Any, Protocol

from quire.base.registry import load
from quire.config.option import declarations

ConfigType = type[Any]
_current: ContextVar[Any] = ContextVar("vllm_config")
# What the end of an architecture's name says: how it is run, and what it is turned into.
_BY_SUFFIX = (
    ("ForCausalLM", ("generate", "none")),
    ("ForConditionalGeneration", ("generate", "none")),
    ("ChatModel", ("generate", "none")),
    ("LMHeadModel", ("generate", "none")),
    ("ForTextEncoding", ("pooling", "embed")),
    ("EmbeddingModel", ("pooling", "embed")),
    ("ForSequenceClassification", ("pooling", "classify")),
    ("ForTokenClassification", ("pooling", "classify")),
    ("RewardModel", ("pooling", "embed")),
    ("Model", ("pooling", "embed")),
)


class OptimizationLevel(enum.IntEnum):
    """What -O0 to -O3 are called."""

    O0 = 0
    O1 = 1
    O2 = 2
    O3 = 3


class SupportsMetricsInfo(Protocol):
    def metrics_info(self) -> dict[str, str]: ...


@contextlib.contextmanager
def set_current_vllm_config(vllm_config: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    token = _current.set(vllm_config)
    try:
        yield
    finally:
        _current.reset(token)


def get_current_vllm_config() -> Any:
    """What set_current_vllm_config set around this call; a plain one elsewhere."""
    found = _current.get(None)
    return load("quire.config:EngineConfig")() if found is None else found


def get_cached_compilation_config() -> Any:
    return get_current_vllm_config().compilation_config


def update_config(config: Any, overrides: Mapping[str, Any]) -> Any:
    """A copy with other values."""
    return load("quire.config:replace")(config, **overrides)


def is_init_field(cls: ConfigType, name: str) -> bool:
    return next((field.init for field in fields(cls) if field.name == name), False)


def get_attr_docs(cls: type[Any]) -> dict[str, str]:
    """Field -> what it is for."""
    return {name: declared.option.doc for name, declared in declarations(cls).items()}


def get_kwargs(cls: type[Any]) -> dict[str, dict[str, Any]]:
    """Field -> what add_argument of an argparse parser is called with for its flag."""
    flat, arguments_for = load("quire.config.table:Flat"), load("quire.config.flags:arguments_for")
    return {
        name: arguments_for(flat(name, (name,), cls.__name__, declared)) for name, declared in declarations(cls).items()
    }


def str_dtype_to_torch_dtype(type: str) -> Any:
    return load(f"torch:{type}")


def iter_architecture_defaults() -> Iterator[tuple[str, tuple[str, str]]]:
    yield from _BY_SUFFIX


def try_match_architecture_defaults(
    architecture: str, *, runner_type: str | None = None, convert_type: str | None = None
) -> tuple[str, tuple[str, str]] | None:
    for suffix, (runner, convert) in _BY_SUFFIX:
        if architecture.endswith(suffix) and runner_type in (None, runner) and convert_type in (None, convert):
            return suffix, (runner, convert)
    return None
