"""Processed media in memory that the API processes of a server share."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.media.test_pixels_oracle import picture
from tests.media.tiny_llava import TinyLlava
from tests.server.hosted import hosted, wait_until
from tests.server.test_media_api import data_url

IMAGE = picture(64, 48)


def test_an_image_outlives_the_processes_that_read_it(tmp_path: Path) -> None:
    """A uuid names it for API processes that never saw it; its vectors are the engine's."""
    tiny = TinyLlava(tmp_path)
    flags = ("--dtype", "float32", "--max-model-len", "256", "--api-server-count", "2")
    cache = ("--mm-processor-cache-type", "shm", "--mm-shm-cache-max-object-size-mb", "8")

    def ask(url: str | None) -> Any:
        image = {"type": "image_url", "image_url": None if url is None else {"url": url}, "uuid": "a"}
        content = [image, {"type": "text", "text": "What is shown?"}]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 6,
                "ignore_eos": True, "return_token_ids": True, "logit_bias": {str(tiny.image_id): -100}}  # fmt: skip
        return server.post("/v1/chat/completions", body)

    with hosted(None, str(tmp_path), *flags, *cache, fake=False) as server:
        assert ask(None).status_code == 400
        first = ask(data_url(IMAGE)).json()["choices"][0]["token_ids"]
        assert first == tiny.answer("user: <image>\nWhat is shown?\nassistant:", [IMAGE], 6)[1]
        old = server.api_pids()
        assert len(old) == 2
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(new := server.api_pids()) == 2 and not set(new) & set(old))
        again = ask(None)
        assert again.status_code == 200, again.text
        assert again.json()["choices"][0]["token_ids"] == first
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
