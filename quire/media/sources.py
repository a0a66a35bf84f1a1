"""Bytes of media: from data URLs, from files under one folder, from http(s) hosts that are allowed.

In: a URL of a request, which is not trusted. Out: its bytes, at most `MAX_MEDIA_BYTES`, or an InputError that says why
not. Addresses are checked where the connection is made (base/fetch.py). Must not know: what the bytes hold.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from quire.base import env
from quire.base.fetch import FetchError, FetchPolicy, download, parse
from quire.schema.errors import InputError

_TIMEOUTS = {
    "image": env.IMAGE_FETCH_TIMEOUT,
    "video": env.VIDEO_FETCH_TIMEOUT,
    "audio": env.AUDIO_FETCH_TIMEOUT,
}
_REDIRECTS = 5
_SHOWN = 120


@dataclass(frozen=True)
class MediaSources:
    """What requests may name. `local_path`: a folder, "" for none. `domains`: the only hosts, None for all public ones;
    a host that is named may lie in a private network."""

    local_path: str = ""
    domains: tuple[str, ...] | None = None

    def read(self, url: str, modality: str) -> bytes:
        if not isinstance(url, str):
            raise InputError(f"a media URL is a string, got {type(url).__name__}", param="messages")
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return read_data_url(url)
        if scheme == "file":
            return self._read_file(url)
        if scheme in ("http", "https"):
            return self._fetch(url, modality)
        raise InputError(
            f"{modality} URL {url!r:.{_SHOWN}}: only data:, http:, https: and file: URLs are supported",
            param="messages",
        )

    def _fetch(self, url: str, modality: str) -> bytes:
        timeout = _TIMEOUTS[modality].get()
        policy = FetchPolicy(
            max_bytes=env.MAX_MEDIA_BYTES.get(),
            timeout_s=timeout,
            allowed_hosts=self.domains or (),
            max_redirects=_REDIRECTS if env.MEDIA_URL_ALLOW_REDIRECTS.get() else 0,
            only_allowed=self.domains is not None,
            deadline_s=timeout,
            quiet=True,
        )
        body = io.BytesIO()
        try:
            parse(url)
            download(url, body, policy)
        except FetchError as wrong:
            raise InputError(f"{modality} URL: {wrong}", param="messages") from None
        return body.getvalue()

    def _read_file(self, url: str) -> bytes:
        if not self.local_path:
            raise InputError(
                "file URLs are not allowed: start with --allowed-local-media-path and the folder they may name",
                param="messages",
            )
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise InputError(
                f"file URL names the host {parts.netloc!r:.{_SHOWN}}; only this machine's files can be read"
            )
        root = os.path.realpath(self.local_path)
        try:
            path = os.path.realpath(url2pathname(parts.path))
        except ValueError as wrong:  # a zero byte
            raise InputError(f"file URL {url!r:.{_SHOWN}}: {wrong}", param="messages") from None
        if os.path.commonpath([root, path]) != root:
            raise InputError(
                f"file URL {url!r:.{_SHOWN}} leads outside the folder of --allowed-local-media-path", param="messages"
            )
        return _read_regular(path, url)


def _read_regular(path: str, url: str) -> bytes:
    """A plain file: a pipe or a device would block, or never end. A link that took its place since is not followed."""
    limit = env.MAX_MEDIA_BYTES.get()
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except OSError as wrong:
        raise InputError(f"file URL {url!r:.{_SHOWN}}: {wrong.strerror}", param="messages") from None
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise InputError(f"file URL {url!r:.{_SHOWN}} is not a regular file", param="messages")
        if facts.st_size > limit:
            raise InputError(f"file URL {url!r:.{_SHOWN}} has {facts.st_size} bytes; the limit is {limit}")
        return file.read(limit)


def read_data_url(url: str) -> bytes:
    """`data:image/png;base64,…`, or percent-encoded without base64."""
    head, comma, body = url.partition(",")
    if not comma:
        raise InputError(f"data URL {url!r:.60} has no comma between its type and its data", param="messages")
    if not head.lower().endswith(";base64"):
        _check_size(len(body))
        return unquote_to_bytes(body)
    return read_base64(body)


def read_base64(text: str) -> bytes:
    _check_size(len(text) * 3 // 4)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as wrong:
        raise InputError(f"media data is not valid base64: {wrong}", param="messages") from None


def _check_size(size: int) -> None:
    if size > (limit := env.MAX_MEDIA_BYTES.get()):
        raise InputError(f"media data has about {size} bytes; the limit is {limit}", param="messages", value=size)
