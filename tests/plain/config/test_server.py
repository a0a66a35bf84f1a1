"""config/server.py and cli/serve.py: every option of the server has one flag, means something, and is checked early."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.base import env
from quire.cli.serve import make_parser, options_of
from quire.config.option import READY, declarations
from quire.config.server import ServerConfig, as_paths, flats, json_list, server_config
from quire.config.table import table
from quire.schema.errors import ConfigError, NotBuiltError

ROOT = Path(__file__).parents[3]


def options(*flags: str) -> ServerConfig:
    return options_of(make_parser("quire serve").parse_args(flags))


def test_no_flag_of_the_server_is_one_of_the_engine():
    assert not {flat.name for flat in flats()} & set(table())


def test_defaults_on_the_command_line_are_those_of_the_class():
    assert options() == ServerConfig()


def test_every_available_option_is_read_by_somebody():
    """An option that is accepted and ignored is a lie."""
    files = [
        *(ROOT / "quire/server").rglob("*.py"),
        *(ROOT / "quire/cli").glob("*.py"),
        ROOT / "quire/config/server.py",
    ]
    code = "\n".join(path.read_text() for path in files)
    unread = [
        name
        for name, mine in declarations(ServerConfig).items()
        if mine.option.status is READY and not re.search(rf"(options|self)\.{name}\b", code)
    ]
    assert not unread


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (("--api-key", "a", "b"), "api_key", ("a", "b")),
        (("--api-key", "a", "--api-key", "b"), "api_key", ("a", "b")),
        (("--allowed-origins", '["https://a", "https://b"]'), "allowed_origins", ("https://a", "https://b")),
        (("--allowed-origins", "https://a", "https://b"), "allowed_origins", ("https://a", "https://b")),
        (("--allowed-methods", '["GET"]'), "allowed_methods", ("GET",)),
        (("--middleware", "a.B", "--middleware", "c:d"), "middleware", ("a.B", "c:d")),
        (("--max-request-bytes", "4K"), "max_request_bytes", 4096),
        (("-asc", "3"), "api_server_count", 3),
        (("--disable-access-log-for-endpoints", "/a, /b"), "disable_access_log_for_endpoints", ("/a", "/b")),
        (("--no-enable-log-deltas",), "enable_log_deltas", False),
        (("--default-chat-template-kwargs", '{"a": 1}'), "default_chat_template_kwargs", {"a": 1}),
        (("--request-timeout", "1.5"), "request_timeout", 1.5),
        (("--disable-log-requests",), "enable_log_requests", False),
    ],
)  # fmt: skip
def test_flags(flags, name, value):
    assert getattr(options(*flags), name) == value


def test_an_option_file_is_below_the_command_line(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("port: 9000\napi-key: [from-file]\nmax-num-seqs: 3\nmiddleware: [a.B]\n")
    args = make_parser("quire serve").parse_args(["--config", str(path), "--api-key", "typed", "--middleware", "c.D"])
    assert (args.max_num_seqs, options_of(args).port, options_of(args).keys) == (3, 9000, ("typed",))
    assert options_of(args).middleware == ("c.D",)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"port": 70000}, "port must be at least 0 and at most 65535, got 70000"),
        ({"api_server_count": 0}, "api_server_count must be at least 1"),
        ({"api_key": [" "]}, "empty api_key"),
        ({"enable_log_outputs": True}, "needs enable_log_requests"),
        ({"ssl_keyfile": "k"}, "TLS needs ssl_certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "needs ssl_ca_certs"),
        ({"api_server_count": 2, "disable_frontend_multiprocessing": True}, "needs a separate engine process"),
        ({"allow_credentials": True, "allowed_origins": ["*"]}, "name the sites"),
        ({"allowed_origins": "[1"}, "not a JSON list"),
        ({"fingerprint_value": "x"}, "must be set together"),
        ({"fingerprint_mode": "custom"}, "must be set together"),
        ({"api_key_scope": "v2"}, "it must be one of all, v1"),
        ({"request_timeout": 0}, "request_timeout must be above 0"),
        ({"root_path": "llm"}, "root_path is 'llm'; it must begin with '/'"),
    ],
)
def test_what_cannot_be_is_refused(asked, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        server_config(**asked)


@pytest.mark.parametrize("name", ["grpc", "enable_scale_out"])
def test_what_is_not_built_is_refused_by_name(name):
    with pytest.raises(NotBuiltError, match=name):
        server_config(**{name: True})


def test_a_key_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "one,key")
    env.forget_all()
    assert server_config().keys == ("one,key",)
    assert server_config(api_key=["typed"]).keys == ("typed",)


def test_keys_stay_out_of_sight():
    assert "secret" not in repr(server_config(api_key=["secret"]))


def test_lists():
    assert json_list("a") == ("a",) and json_list(["a", '["b", "c"]']) == ("a", "b", "c") and json_list(3) == 3
    assert as_paths(["/a,/b", "/c"]) == ("/a", "/b", "/c")


def test_help_finds_options_and_pages(capsys, monkeypatch):
    for topic, words in (("Frontend", "--api-key-scope"), ("api-key", "--api-key"), ("all", "--max-num-queued-tokens")):
        with pytest.raises(SystemExit) as left:
            make_parser("quire serve").parse_args([f"--help={topic}"])
        assert left.value.code == 0 and words in capsys.readouterr().out
    paged: list[str] = []
    monkeypatch.setattr("pydoc.pager", paged.append)
    with pytest.raises(SystemExit):
        make_parser("quire serve").parse_args(["--help=page"])
    assert "--api-key-scope" in paged[0] and "--max-num-seqs" in paged[0]
    with pytest.raises(SystemExit):
        make_parser("quire serve").parse_args(["--help"])
    short = capsys.readouterr().out
    assert "--help=Frontend" in short and "--api-key-scope" not in short
    listed = re.findall(r"^  (--[a-z-]+)", short, re.MULTILINE)
    assert 10 <= len([flag for flag in listed if flag != "--help"]) <= 13 and "--port" in listed
    assert len(short.splitlines()) < 100


def test_help_offers_only_what_there_is(capsys):
    """Whatever would be refused with any value is in no help, and a search for it says why."""
    with pytest.raises(SystemExit):
        make_parser("quire serve").parse_args(["--help=all"])
    everything = capsys.readouterr().out
    assert "Not available yet." not in everything and "--port" in everything
    absent = ("--enable-moe-shared-loras", "--grpc", "--enable-scale-out")
    assert not [flag for flag in absent if f"{flag} " in everything or f"{flag}," in everything]
    with pytest.raises(SystemExit):
        make_parser("quire serve").parse_args(["--help=grpc-port"])
    assert "Not available in this version: --grpc-port" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "kept"), [(None, None), ("", ""), ("/", ""), ("/llm", "/llm"), ("/llm/", "/llm")])
def test_a_prefix_ends_without_a_slash(given, kept):
    assert server_config(root_path=given).root_path == kept
