"""A model hub on loopback: as much of its HTTP as the real huggingface_hub uses to download."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

SHA = "5" * 40


class FakeHubServer(ThreadingHTTPServer):
    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.repositories = repositories
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class FakeHubHandler(BaseHTTPRequestHandler):
    """What a repository holds, and its files."""

    server: FakeHubServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.paths.append(path)
        for name, files in self.server.repositories.items():
            start = f"/{name}/resolve/{SHA}/"
            if path.startswith(f"/api/models/{name}/tree/"):
                tree = [{"type": "file", "path": file, "size": len(data), "oid": SHA} for file, data in files.items()]
                return self.send(json.dumps(tree).encode(), with_body)
            if path.startswith(f"/api/models/{name}"):
                siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
                return self.send(json.dumps({"id": name, "sha": SHA, "siblings": siblings}).encode(), with_body)
            if path.startswith(start) and (data := files.get(path.removeprefix(start))) is not None:
                return self.send(data, with_body)
        return self.send_error(404)

    def send(self, data: bytes, with_body: bool) -> None:
        self.send_response(200)
        for key, value in {
            "Content-Length": len(data),
            "ETag": f'"{sha256(data).hexdigest()}"',
            "X-Repo-Commit": SHA,
        }.items():
            self.send_header(key, str(value))
        self.end_headers()
        if with_body:
            self.wfile.write(data)


@contextmanager
def serving(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHubServer]:
    with FakeHubServer(repositories) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
