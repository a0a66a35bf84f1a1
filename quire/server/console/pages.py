"""The files of the console and of /docs: read once at start, served from memory, with headers that keep strangers out.

The pages hold nothing secret, so they ask for no key; whatever they show, they fetch with the key that their user
gives them. Nothing in them names another host, and the policy they are sent with would not let them reach one.
In: options. Out: routes, and the paths among them that anybody may read. Must not know: the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI, Request, Response

from quire.config.server import ServerConfig

FILES = "/console/files"
_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class File(NamedTuple):
    body: bytes
    headers: dict[str, str]


def open_paths(options: ServerConfig) -> frozenset[str]:
    """What is served without a key."""
    return frozenset(_files(options))


def install(app: FastAPI, options: ServerConfig) -> None:
    files = _files(options)
    if not files:
        return

    async def show(request: Request) -> Response:
        return _answer(files, request)

    for path in files:
        if not path.startswith(FILES):
            app.add_api_route(path, show, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route(FILES + "/{name}", show, methods=["GET", "HEAD"], include_in_schema=False)


def _answer(files: Mapping[str, File], request: Request) -> Response:
    route, name = request.scope["route"].path, request.path_params.get("name")
    file = files.get(route if name is None else f"{FILES}/{name}")
    if file is None:
        return Response(status_code=404, headers=_HEADERS)
    if request.headers.get("if-none-match") == file.headers["etag"]:
        return Response(status_code=304, headers=file.headers)
    return Response(file.body, headers=file.headers)


def _files(options: ServerConfig) -> dict[str, File]:
    """Path -> file."""
    pages = {} if options.disable_console else {"/": "index.html"}
    if not options.disable_fastapi_docs:
        pages |= {"/docs": "docs.html", "/redoc": "docs.html"}
    if not pages:
        return {}
    files = {path: _read(name) for path, name in pages.items()}
    for file in sorted(_FOLDER.iterdir()):
        if file.suffix in _TYPES and file.suffix != ".html":
            files[f"{FILES}/{file.name}"] = _read(file.name)
    return files


def _read(name: str) -> File:
    body = (_FOLDER / name).read_bytes()
    mark = sha256(body).hexdigest()[:32]
    return File(body, {**_HEADERS, "content-type": _TYPES[Path(name).suffix], "etag": f'"{mark}"'})
