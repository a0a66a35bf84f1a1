"""Where a model's files are: the embedded default, a folder, a GGUF file, or a hub id downloaded into the local cache.

In: the model argument. Out: Located(path, kind, name), or one clear ModelNotFoundError.
Must not know: what is inside the files (facts.py, gguf_config.py, loader/).
"""

import importlib.util
import json
import os
import re
import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from quire.base import env
from quire.base.gguf import shared
from quire.base.log import logger
from quire.base.progress import waiting
from quire.base.registry import load
from quire.checkpoint import embedded
from quire.schema.errors import CheckpointError, MissingExtraError, ModelNotFoundError

log = logger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
_HUB_PREFIX = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/")  # as other programs write hub names
_PLAIN_GGUF = (0, 1, 28, 30)  # tensor types F32, F16, F64, BF16
_SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "*.vocab", "*.merges")


class Located(NamedTuple):
    path: str  # a folder or a .gguf file
    kind: Literal["folder", "gguf"]
    name: str  # the model's name unless the user sets one


def locate(
    model: str | None,
    revision: str | None = None,
    download_dir: str | None = None,
    token: bool | str | None = None,
    ignore_patterns: Sequence[str] = (),
    *,
    weights: bool = True,
    option: str = "model",
) -> Located:
    """Find a model on this machine, or download it. `weights=False` downloads only the small files (a tokenizer).
    `option`: what named it, for messages."""
    if not model:
        return Located(embedded.find(), "gguf", embedded.NAME)
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return _folder(path, model)
    if os.path.isfile(path):
        if not path.endswith(".gguf"):
            raise ModelNotFoundError(
                f"{option} {model!r} is a file, but not a .gguf file; name a folder, a .gguf file or a hub id",
                param=option,
            )
        return Located(path, "gguf", model)
    name = _HUB_PREFIX.sub("", model, count=1) if _HUB_PREFIX.match(model) else model
    if path.endswith(".gguf") or path.startswith((".", os.sep)) or not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(f"{option} {model!r}: there is no such folder or file", param=option, value=model)
    return _hub(name, revision, download_dir, token, ignore_patterns, weights, option)


def _folder(path: str, name: str, variant: str = "") -> Located:
    """A checkpoint folder; if it has only GGUF files, the matching one is the model."""
    if os.path.exists(os.path.join(path, "config.json")) and not variant:
        return Located(path, "folder", name)
    files = sorted(f for f in os.listdir(path) if f.endswith(".gguf") and variant.lower() in f.lower())
    if len(files) == 1:
        return Located(os.path.join(path, files[0]), "gguf", name)
    if files:
        raise ModelNotFoundError(
            f"{path} holds {len(files)} GGUF files ({', '.join(files[:4])}{', …' if len(files) > 4 else ''}); name one",
            param="model",
        )
    if variant:
        raise ModelNotFoundError(f"{path} holds no GGUF file with {variant!r} in its name", param="model")
    return Located(path, "folder", name)


def _hub(
    model: str,
    revision: str | None,
    download_dir: str | None,
    token: bool | str | None,
    ignore_patterns: Sequence[str],
    weights: bool,
    option: str,
) -> Located:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise MissingExtraError(f"fetching {model!r} from the model hub", "hub", "huggingface_hub")
    repository, _, variant = model.partition(":")
    token = token if token is not None else env.HF_TOKEN.get()
    ask: dict[str, Any] = {"repo_id": repository, "revision": revision, "cache_dir": download_dir, "token": token}
    ask["ignore_patterns"] = list(ignore_patterns)
    download = load("huggingface_hub:snapshot_download")
    failures = _hub_failures()
    why: BaseException | None = None
    if not env.HF_HUB_OFFLINE.get():
        try:
            allow = _files_to_fetch(repository, revision, token, variant, weights)
            with waiting(log, f"Fetching {repository} from the model hub"):
                path = download(**ask, allow_patterns=allow)
            return _folder(path, model, variant)
        except failures as wrong:
            why = wrong
    try:
        # Without patterns, a copy of which one format of the weights was fetched would count as incomplete.
        path = download(**ask, local_files_only=True, allow_patterns=list(_SMALL))
    except failures as absent:
        raise ModelNotFoundError(_hub_message(option, model, why or absent), param=option, value=model) from None
    if why is not None:
        log.warning("%s: the hub did not answer (%s); using the copy in the local cache", model, first_line(why))
    return _folder(path, model, variant)


def _files_to_fetch(repository: str, revision: str | None, token: Any, variant: str, weights: bool) -> list[str]:
    """Only one format of the weights is downloaded: safetensors if there are any, then GGUF, then .bin and .pt.

    Uses model_info, which fails at once without a network; the library's other calls retry for half a minute.
    """
    info = load("huggingface_hub:HfApi")().model_info(repository, revision=revision, token=token, timeout=20)
    if not weights:
        return list(_SMALL)
    if variant:
        return [*_SMALL, f"*{variant}*.gguf", f"*{variant.upper()}*.gguf", f"*{variant.lower()}*.gguf"]
    files = [entry.rfilename for entry in info.siblings or ()]
    for forms in (("*.safetensors",), ("*.gguf",), ("*.bin", "*.pt", "*.pth")):
        if any(name.endswith(form[1:]) for name in files for form in forms):
            return [*_SMALL, *forms]
    raise ModelNotFoundError(f"{repository} on the model hub holds no weights", param="model", value=repository)


def _hub_failures() -> tuple[type[BaseException], ...]:
    """Exceptions of the hub library when something is unavailable: its own and those of its HTTP library."""
    http = load("huggingface_hub.errors:HfHubHTTPError")
    above = [kind for kind in http.__mro__ if issubclass(kind, Exception) and kind is not Exception]
    named = ("HFValidationError", "LocalEntryNotFoundError")
    return (*above, *(load(f"huggingface_hub.errors:{name}") for name in named))


def _hub_message(option: str, model: str, why: BaseException) -> str:
    kind = type(why).__name__
    if kind == "GatedRepoError":
        return f"{option} {model!r} needs permission: accept its terms on the hub and set HF_TOKEN"
    if kind == "RevisionNotFoundError":
        return f"{option} {model!r} has no such revision on the model hub"
    if kind == "RepositoryNotFoundError":
        return (
            f"{option} {model!r} is not a folder or file here and not on the model hub (or it is private: set HF_TOKEN)"
        )
    if kind == "IncompleteSnapshotError":
        return f"{option} {model!r} is only partly in the local cache: {first_line(why)}"
    if env.HF_HUB_OFFLINE.get():
        return (
            f"{option} {model!r} is not a folder or file here nor in the local cache, and HF_HUB_OFFLINE forbids "
            "asking the model hub"
        )
    return (
        f"{option} {model!r} is not a folder or file here nor in the local cache, and the model hub cannot be reached "
        f"({kind}: {first_line(why)})"
    )


def first_line(why: BaseException) -> str:
    return (str(why).strip().splitlines() or [type(why).__name__])[0][:200]


def read_json(folder: str, name: str) -> dict[str, Any]:
    """One JSON mapping of a checkpoint; CheckpointError names the file and what is wrong with it."""
    path = os.path.join(folder, name)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        there = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        seen = f"it holds {', '.join(there[:6])}{', …' if len(there) > 6 else ''}" if there else "it is empty"
        raise CheckpointError(f"{folder} holds no {name} ({seen}); is it a model folder?") from None
    except (ValueError, UnicodeDecodeError, RecursionError) as wrong:
        raise CheckpointError(f"{path} is not valid JSON: {wrong}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON mapping, got {type(content).__name__}")
    return content


def stored_dtype(folder: str) -> str:
    """The most common type in the first safetensors file, '' if there is none or it cannot be read."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    files = sorted(f for f in os.listdir(folder) if f.endswith(".safetensors")) if os.path.isdir(folder) else []
    if not files:
        return ""
    entries = _read_header(os.path.join(folder, files[0]))
    kinds = [str(e["dtype"]) for e in entries.values() if isinstance(e, dict) and "dtype" in e]
    return names.get(max(set(kinds), key=kinds.count), "") if kinds else ""


def read_tensor_names(folder: str) -> set[str]:
    """Of all safetensors files; the loader reports those that cannot be read."""
    files = sorted(f for f in os.listdir(folder) if f.endswith(".safetensors")) if os.path.isdir(folder) else []
    return {name for file in files for name in _read_header(os.path.join(folder, file))}


def _read_header(path: str) -> dict[str, Any]:
    """Nothing where it is damaged, which the loader reports in more detail."""
    with open(path, "rb") as file:
        head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < size <= 100 << 20:
            return {}
        try:
            entries = json.loads(file.read(size))
        except (ValueError, RecursionError):
            return {}
    return entries if isinstance(entries, dict) else {}


def holds_blocks(path: str) -> bool:
    """Whether some tensor of a GGUF file is quantized."""
    return any(tensor.type_id not in _PLAIN_GGUF for tensor in shared(path).tensors.values())
