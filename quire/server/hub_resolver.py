"""HubResolver: adapters in repositories of the model hub that the operator lists.

A request names `org/repository` or `org/repository/folder`; the folder is downloaded into the hub library's cache, as
far as it is an adapter. What a repository holds is asked once a minute at most, however many names are tried. A name
that is not such, a repository that is not listed, and a hub that does not answer are all "not here". Must not know:
engines, what an adapter's files say.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any

from quire.base import env
from quire.base.clock import now
from quire.base.log import logger
from quire.base.registry import load
from quire.checkpoint.source import first_line
from quire.schema.adapters import LoRARequest
from quire.schema.errors import ConfigError, MissingExtraError
from quire.server.resolver_base import LoRAResolver, adapter_id

log = logger(__name__)

MOST_BYTES = 8 << 30  # of a file: a name in a request must not fill the disk
SECONDS_KNOWN = 60.0  # how long a repository's list of files counts
_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # the first that is there
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")  # neither "." nor "..", and nothing that a pattern reads
_DEEPEST = 8  # folders within a repository


class HubResolver(LoRAResolver):
    def __init__(self, repositories: Sequence[str]) -> None:
        for name in repositories:
            if not _REPOSITORY.fullmatch(name):
                raise ConfigError(
                    f"LORA_RESOLVER_HF_REPO_LIST has {name!r:.200}: expected org/repository",
                    param="LORA_RESOLVER_HF_REPO_LIST",
                )
        if importlib.util.find_spec("huggingface_hub") is None:
            raise MissingExtraError("fetching adapters from the model hub", "hub", "huggingface_hub")
        self._locks = {name: asyncio.Lock() for name in repositories}
        self._files: dict[str, tuple[float, dict[str, int | None]]] = {}  # when, and the files with their bytes

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        place = split_name(lora_name)
        if place is None or place[0] not in self._locks:
            return None
        repository, folder = place
        async with self._locks[repository]:
            path = await asyncio.to_thread(self._fetch, repository, folder)
        return None if path is None else LoRARequest(lora_name, adapter_id(lora_name), path)

    def _fetch(self, repository: str, folder: str) -> str | None:
        """The adapter's folder on this machine; None: there is none."""
        try:
            if env.HF_HUB_OFFLINE.get():
                # Without a pattern the library wants every file of the repository to be there.
                config = f"{folder}/{_CONFIG}" if folder else _CONFIG
                snapshot = self._download(repository, local_files_only=True, allow_patterns=[config])
            else:
                names = files_of_adapter(repository, folder, self._list(repository))
                if not names:
                    return None
                snapshot = self._download(repository, allow_patterns=names)
        except Exception as wrong:  # noqa: BLE001  # the library raises anything where the hub answers oddly
            log.warning("%s: the model hub has no answer (%s)", repository, first_line(wrong))
            return None
        path = os.path.join(snapshot, folder) if folder else snapshot
        return path if os.path.isfile(os.path.join(path, _CONFIG)) else None

    def _list(self, repository: str) -> dict[str, int | None]:
        asked_at, files = self._files.get(repository, (float("-inf"), {}))
        if now() - asked_at > SECONDS_KNOWN:
            info = load("huggingface_hub:HfApi")().model_info(
                repository, files_metadata=True, token=env.HF_TOKEN.get(), timeout=20
            )
            files = {entry.rfilename: entry.size for entry in info.siblings or ()}
            self._files[repository] = now(), files
        return files

    def _download(self, repository: str, **how: Any) -> str:
        path: str = load("huggingface_hub:snapshot_download")(repo_id=repository, token=env.HF_TOKEN.get(), **how)
        return path


def split_name(name: str) -> tuple[str, str] | None:
    """(repository, folder within it); None if a name is not such."""
    parts = name.split("/", _DEEPEST + 2)
    repository, folders = "/".join(parts[:2]), parts[2:]
    if len(folders) > _DEEPEST or not _REPOSITORY.fullmatch(repository) or not all(map(_FOLDER.fullmatch, folders)):
        return None
    return repository, "/".join(folders)


def files_of_adapter(repository: str, folder: str, files: dict[str, int | None]) -> list[str]:
    """Those to download; none if the folder is not an adapter, or too large to be one."""
    start = f"{folder}/" if folder else ""
    weights = [start + name for name in _WEIGHTS if start + name in files][:1]
    if start + _CONFIG not in files or not weights:
        return []
    names = [start + _CONFIG, *weights]
    for name in names:
        size = files[name]
        if size is None or not 0 <= size <= MOST_BYTES:
            log.warning("%s/%s has %s bytes; %d are fetched at most", repository, name, size, MOST_BYTES)
            return []
    return names
