"""Resolvers: where an adapter that a request names and nobody has loaded may come from.

A plug-in registers resolvers by name; a server asks them in turn, and the first that answers with a LoRARequest wins.
Of those that come with Quire, one looks for a folder of that name under LORA_RESOLVER_CACHE_DIR, the other
(hub_resolver.py) into repositories of the model hub. Must not know: engines, the table of served names.
"""

from __future__ import annotations

import asyncio
import os

from quire.base import env
from quire.schema.adapters import LoRARequest
from quire.server.resolver_base import LoRAResolver, adapter_id

__all__ = ["FilesystemResolver", "LoRAResolver", "LoRAResolverRegistry", "ResolverTable", "adapter_id", "is_plain_name"]

FILESYSTEM, HUB = "lora_filesystem_resolver", "lora_hf_hub_resolver"  # their names among plug-ins
_CONFIG = "adapter_config.json"
_LONGEST_NAME = 256


class ResolverTable:
    """Registered resolvers, by name, in the order in which they came."""

    def __init__(self) -> None:
        self._resolvers: dict[str, LoRAResolver] = {}
        self._hub: LoRAResolver | None = None  # it remembers what repositories hold
        self._hub_repositories: tuple[str, ...] = ()

    def register_resolver(self, resolver_name: str, resolver: LoRAResolver) -> None:
        self._resolvers[resolver_name] = resolver

    def get_resolver(self, resolver_name: str) -> LoRAResolver:
        if resolver_name not in self._resolvers:
            known = ", ".join(self._resolvers) or "none"
            raise KeyError(f"no LoRA resolver is named {resolver_name!r}; registered are {known}")
        return self._resolvers[resolver_name]

    def get_supported_resolvers(self) -> set[str]:
        return set(self._resolvers)

    def resolvers(self) -> list[LoRAResolver]:
        """Those of plug-ins, then Quire's own that have a folder or repositories and that PLUGINS includes."""
        folder, repositories, chosen = (
            env.LORA_RESOLVER_CACHE_DIR.get(), env.LORA_RESOLVER_HF_REPO_LIST.get(), env.PLUGINS.get(),
        )  # fmt: skip
        own: list[LoRAResolver] = []
        if folder and (chosen is None or FILESYSTEM in chosen):
            own.append(FilesystemResolver(folder))
        if repositories and (chosen is None or HUB in chosen):
            if self._hub is None or self._hub_repositories != repositories:
                self._hub_repositories = repositories
                from quire.server.hub_resolver import HubResolver  # lazy

                self._hub = HubResolver(repositories)
            own.append(self._hub)
        return [*self._resolvers.values(), *own]


LoRAResolverRegistry = ResolverTable()


class FilesystemResolver(LoRAResolver):
    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(os.path.expanduser(folder))

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if not is_plain_name(lora_name):
            return None
        path = os.path.join(self._folder, lora_name)
        if not await asyncio.to_thread(os.path.isfile, os.path.join(path, _CONFIG)):
            return None
        return LoRARequest(lora_name=lora_name, lora_int_id=adapter_id(lora_name), lora_path=path)


def is_plain_name(name: str) -> bool:
    """One part of a path: a client's text must not lead anywhere else."""
    is_one_part = name not in (".", "..") and not set(name) & {"/", "\\"}
    return is_one_part and 0 < len(name) <= _LONGEST_NAME and name.isprintable()
