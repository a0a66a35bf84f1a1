"""ServerAdapters: adapters of a server: those of --lora-modules and --default-mm-loras, those loaded and unloaded over
HTTP, those resolved.

In: names and folders. Out: entries of the table of served names (served.py), once the engine has read and checked the
files; the routes /v1/load_lora_adapter and /v1/unload_lora_adapter, where ALLOW_RUNTIME_LORA_UPDATING is set. One load
or unload at a time. Must not know: dialects, what an adapter's files hold.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from starlette.responses import PlainTextResponse

from quire.base import env
from quire.base.log import logger
from quire.engine.adapters import NOT_ENABLED, absolute, media_adapters
from quire.schema.adapters import LoRARequest
from quire.schema.errors import ConfigError, InputError, ModelNotFoundError
from quire.server.errors import ERROR_RESPONSES
from quire.server.resolvers import LoRAResolverRegistry, adapter_id
from quire.server.served import ServedModel, ServedModels

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.server.route import App
    from quire.server.state import ServerState

log = logger(__name__)
_LONGEST = 4096
MOST_ADAPTERS = 4096  # names that a server has at once
UPDATING_OFF = (
    "adapters cannot be loaded while this server runs: start it with QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1 and one API "
    "process"
)


class LoraModule(NamedTuple):
    """One entry of --lora-modules."""

    name: str
    path: str
    base_model_name: str | None = None


class ServerAdapters:
    def __init__(self, served: ServedModels) -> None:
        self._served = served
        self._changing = asyncio.Lock()

    async def load_modules(self, modules: Iterable[LoraModule]) -> None:
        """Those that a server starts with; whichever cannot be loaded is a ConfigError."""
        for module in modules:
            try:
                await self.load(module.name, module.path, base=module.base_model_name)
            except InputError as wrong:
                raise ConfigError(f"lora_modules: {wrong}", param="lora_modules") from None

    async def load_media_adapters(self) -> None:
        """Those of default_mm_loras, which requests get by the media that they bring; `model` may name them too."""
        lora = self._served.base.config.lora_config
        for kind, adapter in media_adapters(None if lora is None else lora.default_mm_loras).items():
            try:
                await self.load(kind, adapter.lora_path, lora_id=adapter.lora_int_id)
            except InputError as wrong:
                raise ConfigError(f"default_mm_loras: {wrong}", param="default_mm_loras") from None

    async def load(
        self, name: str, path: str, *, base: str | None = None, load_inplace: bool = False, lora_id: int | None = None
    ) -> ServedModel:
        async with self._changing:
            entries = dict(self._served.entries())
            known = entries.get(name)
            num_adapters = sum(model.adapter is not None for model in entries.values())
            if known is None and num_adapters >= MOST_ADAPTERS:
                raise InputError(
                    f"{num_adapters} adapters are loaded and a server has {MOST_ADAPTERS} at most: unload one first",
                    param="lora_name",
                )
            if known is not None and load_inplace:
                self._check_changeable(name)
            if known is not None and (known.adapter is None or not load_inplace):
                kind = "a base model" if known.adapter is None else "an adapter; load_inplace replaces it"
                raise InputError(
                    f"The lora adapter '{name}' has already been loaded: the name is {kind}",
                    param="lora_name",
                    value=name,
                )
            parent = self._served.find(base)
            if parent.config.lora_config is None:
                raise InputError(NOT_ENABLED, param="lora_name")
            path = absolute(path)
            number = adapter_id(name) if lora_id is None else lora_id
            model = dataclasses.replace(
                parent,
                name=name,
                adapter=name,
                adapter_id=number,
                parent=base or parent.name,
                root=path,
                created=int(time.time()),
            )
            self._served.check(model, is_known=known is not None)
            await parent.engine.add_lora(LoRARequest(name, number, path, base, None, load_inplace))
            if known is not None:
                self._served.remove(name)
            self._served.add(model)
            log.info("LoRA adapter %r: %s", name, path)
            return model

    async def unload(self, name: str) -> None:
        async with self._changing:
            known = dict(self._served.entries()).get(name)
            if known is None or known.adapter is None:
                raise ModelNotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name", value=name)
            self._check_changeable(name)
            self._served.remove(name)
            await known.engine.remove_lora(known.adapter_id)
            log.info("LoRA adapter %r was unloaded", name)

    def _check_changeable(self, name: str) -> None:
        """Requests get adapters of default_mm_loras by their folder, whatever is loaded under the name."""
        lora = self._served.base.config.lora_config
        if lora is not None and name in (lora.default_mm_loras or {}):
            raise InputError(
                f"The lora adapter '{name}' is one of default_mm_loras: it cannot be replaced or unloaded",
                param="lora_name",
                value=name,
            )

    async def find(self, name: str | None) -> ServedModel:
        """What the table says; an unknown name may be an adapter that a resolver finds."""
        try:
            return self._served.find(name)
        except ModelNotFoundError:
            if not name or not env.ALLOW_RUNTIME_LORA_UPDATING.get():
                raise
            for resolver in LoRAResolverRegistry.resolvers():
                lora = await resolver.resolve_lora(self._served.base.root, name)
                if lora is not None:
                    return await self._load_resolved(name, lora)
            raise

    async def _load_resolved(self, name: str, lora: LoRARequest) -> ServedModel:
        try:
            return await self.load(name, lora.lora_path, lora_id=lora.lora_int_id)
        except InputError:
            known = dict(self._served.entries()).get(name)  # another request may have been faster
            if known is None:
                raise
            return known


def read_modules(entries: Iterable[str]) -> list[LoraModule]:
    """name=path, a JSON object with name, path and base_model_name, or a JSON list of such."""
    modules = []
    for entry in entries:
        if not isinstance(entry, str):
            modules.append(_module_of(entry, entry))
        elif entry.lstrip().startswith(("{", "[")):
            try:
                parsed = json.loads(entry)
            except (ValueError, RecursionError) as wrong:
                raise _wrong_module(entry, f"it is not JSON ({wrong})") from None
            modules += [_module_of(one, entry) for one in (parsed if isinstance(parsed, list) else [parsed])]
        else:
            name, equals, path = entry.partition("=")
            if not (name and equals and path):
                raise _wrong_module(entry, "it is neither name=path nor a JSON object")
            modules.append(LoraModule(name, path))
    return modules


def check_modules(entries: Iterable[str], config: EngineConfig) -> None:
    """ConfigError where the option can be seen to be wrong before an engine is there."""
    read_modules(entries)
    if config.lora_config is None:
        raise ConfigError(f"lora_modules: {NOT_ENABLED}", param="lora_modules")


def _module_of(parsed: object, entry: object) -> LoraModule:
    keys = LoraModule._fields
    if not isinstance(parsed, dict) or not {"name", "path"} <= parsed.keys() <= set(keys):
        raise _wrong_module(entry, f"an object needs name and path, and may have {keys[2]}")
    if not all(
        isinstance(value, str) and value for key, value in parsed.items() if value is not None or key in keys[:2]
    ):
        raise _wrong_module(entry, "every value must be a text")
    return LoraModule(**parsed)


def _wrong_module(entry: object, reason: str) -> ConfigError:
    return ConfigError(f"lora_modules has {entry!r:.200}: {reason}", param="lora_modules")


# ---- routes --------------------------------------------------------------------------------------------------------


class LoadLoRAAdapterRequest(BaseModel):
    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=_LONGEST)
    load_inplace: bool = Field(False, description="Replace an adapter of that name; requests under way keep theirs.")
    is_3d_lora_weight: bool | None = Field(None, description="Accepted; the files say it.")


class UnloadLoRAAdapterRequest(BaseModel):
    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = Field(None, ge=1, description="Accepted; the name says which.")


router = APIRouter(tags=["adapters"])
_ERRORS = {status: ERROR_RESPONSES[status] for status in (400, 401, 404)}


def install(app: App, num_processes: int) -> None:
    if env.ALLOW_RUNTIME_LORA_UPDATING.get():
        if num_processes > 1:
            log.warning(
                "adapters cannot be loaded over HTTP: each of %d API processes has a table of its own", num_processes
            )
            return
        log.warning("adapters can be loaded and unloaded over HTTP: whoever reaches this server can make it read files")
        app.include_router(router)


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse, responses=_ERRORS)  # type: ignore[arg-type]
async def load_lora_adapter(request: Request, body: LoadLoRAAdapterRequest) -> Response:
    """Read and check an adapter's folder; from then on `model` may name it."""
    state: ServerState = request.app.state.quire
    await state.adapters.load(body.lora_name, body.lora_path, load_inplace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, responses=_ERRORS)  # type: ignore[arg-type]
async def unload_lora_adapter(request: Request, body: UnloadLoRAAdapterRequest) -> Response:
    """Requests under way end with it; new ones are refused."""
    state: ServerState = request.app.state.quire
    await state.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
