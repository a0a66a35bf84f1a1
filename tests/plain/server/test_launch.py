"""server/launch.py before an engine is there: the address that is told, and whom an operator is warned of."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from quire.base.net import is_loopback
from quire.config import EngineArgs
from quire.config.server import server_config
from quire.schema.errors import ConfigError
from quire.server import launch


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def bound(**asked: Any) -> tuple[socket.socket, str]:
    options = server_config(**{"port": 0, **asked})
    with launch.listener(options) as (opened, url):
        launch.warn_if_open(options, opened)
        return opened, url


@pytest.mark.parametrize(
    ("host", "shown"),
    [(None, "http://0.0.0.0:"), ("0.0.0.0", "http://0.0.0.0:"), ("127.0.0.1", "http://127.0.0.1:"),
     ("localhost", "http://127.0.0.1:")],
)  # fmt: skip
def test_the_address_told_is_the_one_that_is_bound(host: str | None, shown: str) -> None:
    _, url = bound(host=host)
    assert url.startswith(shown) and int(url.removeprefix(shown)) > 0


@pytest.mark.skipif(not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_so_it_is_with_the_longer_addresses() -> None:
    _, url = bound(host="::")
    assert url.startswith("http://[::]:")


@pytest.mark.parametrize(
    ("asked", "warned"),
    [
        ({"host": None}, True),
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key_scope": "v1"}, True),
        ({"host": None, "api_key": ["k"]}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
    ],
)
def test_a_server_for_everybody_is_warned_of(
    asked: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        bound(**asked)
    found = [record.getMessage() for record in caplog.records if "asks for no key" in record.getMessage()]
    assert len(found) == int(warned)
    assert not warned or ("0.0.0.0:" in found[0] and "--api-key" in found[0] and "--host 127.0.0.1" in found[0])


def test_a_unix_socket_is_closed_to_others_anyway(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, url = bound(uds=str(tmp_path / "s"))
    assert url == f"unix:{tmp_path / 's'}" and not caplog.records


@pytest.mark.parametrize(
    ("address", "own"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("fe80::1%1", False), ("::ffff:10.0.0.1", False)],
)  # fmt: skip
def test_which_addresses_are_this_hosts_alone(address: str, own: bool) -> None:
    assert is_loopback(address) is own


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"chat_template": "{{ foo"}, "chat_template: the chat template is not valid Jinja, line 1"),
        ({"chat_template": "BROKEN_FILE"}, "chat_template: the chat template is not valid Jinja, line 2"),
        ({"chat_template": "/nope.jinja"}, "chat_template: '/nope.jinja' is not Jinja text"),
        ({"lora_modules": ["a=b"]}, "lora_modules: this engine serves no adapters: start with .*--enable-lora"),
        ({"lora_modules": ["a"]}, "lora_modules has 'a': it is neither name=path"),
    ],
)
def test_wrong_options_are_told_before_a_model_is_loaded(asked: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("a\n{% if %}")
    if asked.get("chat_template") == "BROKEN_FILE":
        asked = {"chat_template": str(tmp_path / "broken.jinja")}
    config = EngineArgs().create_engine_config()
    with pytest.raises(ConfigError, match=words):
        launch.serve(server_config(port=0, **asked), config, None)  # type: ignore[arg-type]


def test_what_may_be_a_name_of_the_tokenizers_is_left_to_it() -> None:
    launch.check_options(server_config(chat_template="rag"), EngineArgs().create_engine_config())
