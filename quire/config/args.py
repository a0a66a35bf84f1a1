"""EngineArgs: every option flat, as keywords, flags and attributes. Derived from the declarations, not written by hand.

In: keywords, a parsed namespace, or attributes set by hand. Out: `create_engine_config()`, the resolved EngineConfig.
"""

import argparse
import dataclasses
import enum
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from quire.config.engine import EngineConfig
from quire.config.memory import LoadConfig
from quire.config.model import ModelConfig
from quire.config.option import (
    Group,
    OptionField,
    UnknownOptionError,
    declarations,
    group,
    option,
    same,
    shown_value,
    unknown,
)
from quire.config.table import Flat, table


class UsageContext(enum.StrEnum):
    """Who creates the engine; it determines default batch sizes, and which steps of resolution run."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
    RENDER_SERVER = "RENDER_SERVER"


def _field(default: Any) -> Any:
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy)
    if isinstance(default, tuple):
        return dataclasses.field(default_factory=partial(list, default))
    return dataclasses.field(default=default)


def _derive(name: str, declared: Mapping[str, OptionField]) -> Any:
    """A dataclass with a field per option. Its docstring keeps dataclasses from generating one, which is slow."""
    fields = [(name, Any, _field(mine.option.unset)) for name, mine in declared.items()]
    return dataclasses.make_dataclass(name, fields, namespace={"__doc__": "Options."}, init=False, repr=False, eq=False)


_Derived: Any = _derive("_Derived", {name: flat.declared for name, flat in table().items()})


class EngineArgs(_Derived):  # type: ignore[misc]  # the attributes come from the declarations
    """Every engine option. `LLM(**dataclasses.asdict(EngineArgs(...)))` is the same engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields = {field.name: field for field in dataclasses.fields(self)}
        if len(args) > len(fields):
            raise TypeError(f"{type(self).__name__} takes at most {len(fields)} values, got {len(args)}")
        for name, value in zip(fields, args, strict=False):
            if name in kwargs:
                raise TypeError(f"{type(self).__name__} got {name!r} twice")
            kwargs[name] = value
        for name in kwargs:
            if name not in fields:
                raise UnknownOptionError(unknown("there is no engine option", name, fields), param=name)
        for name, field in fields.items():
            if name in kwargs:
                value = kwargs[name]
            elif field.default_factory is not dataclasses.MISSING:
                value = field.default_factory()
            else:
                value = field.default
            setattr(self, name, value)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __repr__(self) -> str:
        usual = {name: flat.declared.option.unset for name, flat in table().items()}
        changed = ((name, value) for name, value in vars(self).items() if not same(value, usual.get(name)))
        return f"{type(self).__name__}({', '.join(f'{name}={shown_value(name, value)}' for name, value in changed)})"

    __hash__ = None  # type: ignore[assignment]  # attributes may be set

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        from quire.config.flags import add_flags  # lazy

        add_flags(parser, table().values())
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Takes the attributes this class has; anything else in the namespace belongs to the caller."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    def create_engine_config(self, usage_context: str | None = None, headless: bool = False) -> EngineConfig:
        """Resolve: find the model, read it, fill in everything unset. Raises ConfigError if that is impossible.
        `headless`: for a program without a server, whose engines or workers belong to another machine."""
        from quire.config.resolve import resolve  # lazy

        config: EngineConfig = resolve(self, usage_context, headless)
        return config

    def create_model_config(self) -> ModelConfig:
        return self.create_engine_config().model_config

    def create_load_config(self) -> LoadConfig:
        return self.create_engine_config().load_config

    @staticmethod
    def get_batch_defaults(world_size: int, device: str = "cpu") -> tuple[dict[str, int], dict[str, int]]:
        """(most tokens in a step, most requests in a step), each by usage context, on this kind of device."""
        from quire.config.resolve import batch_defaults  # lazy

        defaults: tuple[dict[str, int], dict[str, int]] = batch_defaults(world_size, device)
        return defaults


@group
class AsyncOptions(Group):
    """Options of AsyncLLM alone."""

    enable_log_requests: bool = option(False, "Log every request as it arrives.")


_Async: Any = _derive("_Async", declarations(AsyncOptions))


@dataclasses.dataclass(init=False, repr=False, eq=False)
class AsyncEngineArgs(EngineArgs, _Async):  # type: ignore[misc]
    """EngineArgs plus the options of a serving engine."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, async_args_only: bool = False) -> argparse.ArgumentParser:
        if not async_args_only:
            EngineArgs.add_cli_args(parser)
        mine = [Flat(name, (name,), "AsyncOptions", d) for name, d in declarations(AsyncOptions).items()]
        from quire.config.flags import add_flags  # lazy

        add_flags(parser, mine)
        parser.add_argument(  # the old spelling of the default
            "--disable-log-requests",
            dest="enable_log_requests",
            action="store_false",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
        return parser
