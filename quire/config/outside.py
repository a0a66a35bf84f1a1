"""ModelRegistry: out-of-tree architectures, by their name in a checkpoint's config.json.

In: a name, and a class or function, or its import path. Out: names that a configuration can pass to another
process (local.py). docs/plugins.md has the requirements. Must not know: torch, or how a model is built.
"""

from collections.abc import Mapping
from typing import Any

from quire.config.local import name_of
from quire.schema.errors import ConfigError

_registered: dict[str, str] = {}


class ModelRegistry:
    """Class methods only, as programs written for vLLM call them."""

    @classmethod
    def register_model(cls, model_arch: str, model_cls: Any) -> None:
        """`model_cls`: a class or declaration, or 'module:Name', which is imported only when it is needed."""
        if not isinstance(model_arch, str) or not model_arch:
            raise ConfigError(f"model_arch must be the name of an architecture, got {model_arch!r}", param="model_arch")
        if isinstance(model_cls, str) and (model_cls.count(":") != 1 or not all(model_cls.split(":"))):
            raise ConfigError(f"model_cls is {model_cls!r}; a path is 'package.module:Class'", param="model_cls")
        _registered[model_arch] = name_of(model_cls)

    @classmethod
    def get_supported_archs(cls) -> set[str]:
        """Registered names; those that ship with Quire are in docs/models.md."""
        return set(_registered)


def registered(overrides: Mapping[str, str]) -> dict[str, str]:
    """Architecture -> name of its class: registrations in this process, overridden by the option."""
    return {**_registered, **overrides}
