"""`quire pull NAME` and `quire list`: download models from the hub, and list local ones.

checkpoint/source.py resolves names; the hub library lists its cache.
Must not know: engines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from quire.base.registry import load
from quire.checkpoint import embedded
from quire.checkpoint.source import Located, locate
from quire.config import FlexibleArgumentParser
from quire.schema.errors import ConfigError, ModelNotFoundError

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


class ModelListing(NamedTuple):
    name: str
    size: int
    form: str
    changed: float | None


def pull(arguments: Sequence[str], program: str) -> int:
    parser = FlexibleArgumentParser(
        prog=program,
        description="Download a model from the hub, or the small default one; it then loads offline.",
        epilog="example:  quire pull Qwen/Qwen3-0.6B     quire pull hf.co/org/repo:Q4_K_M     quire pull default",
    )  # fmt: skip
    parser.add_argument(
        "model", nargs="+", metavar="NAME", help="org/repo; org/repo:Q4_K_M for one GGUF file of it; default"
    )
    parser.add_argument("--revision", help="branch, tag or commit")
    parser.add_argument("--download-dir", help="folder to keep it in, instead of the hub library's cache")
    args = parser.parse_args(arguments)
    for name in args.model:
        if os.path.exists(os.path.expanduser(name)):
            raise ModelNotFoundError(
                f"{name!r} is a local path; pull takes the name of a model on the hub", param="model"
            )
        located = fetched(name, args.revision, args.download_dir)
        print(f"{located.name}  {shown_size(size_of(located.path))}  {located.path}")
    return 0


def fetched(name: str, revision: str | None, folder: str | None) -> Located:
    if name != embedded.WORD:
        return locate(name, revision, folder)
    for option, value in (("revision", revision), ("download-dir", folder)):
        if value is not None:
            raise ConfigError(f"--{option} is for models of the hub: the default model has one file, in Quire's cache",
                              param=option.replace("-", "_"))  # fmt: skip
    return Located(embedded.fetch(), "gguf", embedded.NAME)


def list_models(arguments: Sequence[str], program: str) -> int:
    parser = FlexibleArgumentParser(prog=program, description="List the models on this machine.")
    parser.add_argument("--download-dir", help="folder to look in, instead of the hub library's cache")
    args = parser.parse_args(arguments)
    rows = [*the_default(), *cached(args.download_dir)]
    if not rows:
        print("no local models: `quire pull org/repo` downloads one, `quire pull default` the small default model")
        return 0
    width = max(len("NAME"), *(len(row.name) for row in rows))
    print(f"{'NAME':<{width}}  {'SIZE':>9}  {'FORM':<24}  CHANGED")
    for row in rows:
        changed = "" if row.changed is None else time.strftime("%Y-%m-%d", time.localtime(row.changed))
        print(f"{row.name:<{width}}  {shown_size(row.size):>9}  {row.form:<24}  {changed}".rstrip())
    return 0


def the_default() -> Iterator[ModelListing]:
    try:
        located = locate(None)
    except ModelNotFoundError:
        return
    yield ModelListing(embedded.NAME, size_of(located.path), "gguf, the default", None)


def cached(folder: str | None) -> Iterator[ModelListing]:
    """Models in the hub library's cache; repositories without weights are skipped."""
    if find_spec("huggingface_hub") is None:
        return
    try:
        hub_cache = load("huggingface_hub:scan_cache_dir")(folder)
    except load("huggingface_hub.errors:CacheNotFound"):
        return
    for repository in sorted(hub_cache.repos, key=lambda one: str(one.repo_id).lower()):
        files = {str(file.file_name) for revision in repository.revisions for file in revision.files}
        if repository.repo_type == "model" and (form := form_of(files)):
            yield ModelListing(
                str(repository.repo_id), int(repository.size_on_disk), form, float(repository.last_modified)
            )


def form_of(files: set[str]) -> str:
    """'safetensors', or 'gguf: ' and the variants of the files; '' without weights."""
    suffix = next((ending for ending in _WEIGHTS if any(name.endswith(ending) for name in files)), "")
    if suffix != ".gguf":
        return suffix.removeprefix(".")
    stems = sorted(os.path.basename(name).removesuffix(".gguf") for name in files if name.endswith(".gguf"))
    kinds = [stem.replace(".", "-").rpartition("-")[2] for stem in stems]
    return f"gguf: {', '.join(kinds[:3])}{', …' if len(kinds) > 3 else ''}"


def size_of(path: str) -> int:
    if os.path.isfile(path):
        return os.path.getsize(path)
    inside = (os.path.join(at, name) for at, _, names in os.walk(path) for name in names)
    return sum(os.path.getsize(file) for file in inside if os.path.exists(file))


def shown_size(num_bytes: int) -> str:
    amount: Any = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
