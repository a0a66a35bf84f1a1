"""ServerConfig: how `quire serve` listens, whom it lets in, what it refuses, what it logs.

Declarations only (option.py says what they mean). Names are those of vLLM's `vllm serve`; the ones vLLM does not have
are marked "Quire's own". Must not know: HTTP itself (the server reads this), or how an engine runs (engine.py).
"""

import json
from typing import Any, Literal

from quire.base import env
from quire.config.option import Group, declarations, group, option
from quire.config.table import Flat, refuse_unbuilt
from quire.schema.errors import ConfigError

GROUP = "Frontend"  # the heading in --help, as vLLM calls it


def as_list(given: Any) -> Any:
    """`'["a", "b"]'` (JSON, as vLLM's flags take it) and plain words are both lists."""
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list | tuple):
        return given
    items: list[Any] = []
    for item in given:
        if not (isinstance(item, str) and item.lstrip().startswith("[")):
            items.append(item)
            continue
        try:
            items.extend(json.loads(item))
        except ValueError as wrong:
            raise ConfigError(f"{item!r} is not a JSON list: {wrong}", value=item) from None
    return tuple(items)


def as_paths(given: Any) -> Any:
    """'/health,/ping', as one word or as several."""
    words = as_list(given)
    if not isinstance(words, tuple) or not all(isinstance(word, str) for word in words):
        return words
    return tuple(path.strip() for word in words for path in word.split(",") if path.strip())


@group
class ServerConfig(Group):
    """The HTTP server: where it listens, who may ask, limits, logs."""

    # ---- where
    host: str | None = option(None, "Address to listen on; unset is every address of this machine.")
    port: int = option(8000, "Port to listen on; 0 takes a free one and says which.", low=0, high=65535)
    uds: str | None = option(
        None, "Path of a unix socket (mode 0600) to listen on instead of host and port.", accepts=str | None
    )
    root_path: str | None = option(None, "Path prefix that a proxy in front strips.")
    api_server_count: int = option(
        1, "Processes that speak HTTP, sharing one engine.", unset=None, flags=("-asc",), low=1, high=64
    )
    disable_frontend_multiprocessing: bool = option(False, "Run the engine inside the server's own process.")

    # ---- TLS
    ssl_keyfile: str | None = option(None, "Private key (PEM).")
    ssl_certfile: str | None = option(None, "Certificate and its chain (PEM); turns HTTPS on.")
    ssl_ca_certs: str | None = option(None, "Authorities that client certificates are checked against (PEM).")
    ssl_cert_reqs: int = option(0, "Client certificates: 0 none, 1 checked when given, 2 required.", low=0, high=2)
    ssl_ciphers: str | None = option(None, "Ciphers for TLS 1.2 and older, as OpenSSL writes them.")
    enable_ssl_refresh: bool = option(False, "Take up new certificate files when they change, without a restart.")

    # ---- who may ask
    api_key: tuple[str, ...] | None = option(
        None, "Keys; a client sends one as 'Authorization: Bearer KEY'. Unset takes QUIRE_API_KEY or VLLM_API_KEY.",
        accepts=tuple[str, ...] | None, take=as_list, repeat=True,
    )  # fmt: skip
    api_key_scope: Literal["all", "v1"] = option(
        "all", "Quire's own. Which routes ask for a key: all but /health and /ping, or (vLLM's rule) /v1, /v2 and "
        "/inference alone.",
    )  # fmt: skip
    prefix_cache_per_key: bool = option(
        True, "Quire's own. With several keys, cached prefixes are shared only between requests with the same key: "
        "otherwise the time to a first token would show what others sent.",
    )  # fmt: skip
    open_metrics: bool = option(False, "Quire's own. /metrics asks for no key.")
    allow_credentials: bool = option(False, "CORS: a browser may send cookies and keys.")
    allowed_origins: tuple[str, ...] = option(
        (), "CORS: sites whose pages may ask, as words or a JSON list; * is any. Unset is none.", take=as_list,
        repeat=True,
    )  # fmt: skip
    allowed_methods: tuple[str, ...] = option(("*",), "CORS: methods they may use.", take=as_list, repeat=True)
    allowed_headers: tuple[str, ...] = option(("*",), "CORS: headers they may send.", take=as_list, repeat=True)
    middleware: tuple[str, ...] = option(
        (), "Import paths of ASGI middleware classes, or of async functions (request, call_next). Repeatable.",
        take=as_list, repeat=True,
    )  # fmt: skip

    # ---- limits
    h11_max_incomplete_event_size: int = option(
        65536, "Most bytes of a request's first line and headers.", low=1024, human=True
    )
    h11_max_header_count: int = option(256, "Most headers of a request.", low=1)
    max_request_bytes: int = option(
        8 << 20, "Quire's own. Most bytes of a request's body; a larger one is refused with 413.", low=1024, human=True
    )
    max_inflight_body_bytes: int = option(
        256 << 20, "Quire's own. Most bytes of bodies that a process receives and reads at the same time; more are "
        "refused with 503 and Retry-After. Never less than max_request_bytes.", low=1024, human=True,
    )  # fmt: skip
    body_timeout: float = option(
        60.0, "Quire's own. Seconds in which a request's body must be there, and one more for each 64 KiB of it; a "
        "slower one is refused with 408. 0 is never.", low=0,
    )  # fmt: skip
    max_connections: int | None = option(
        None, "Quire's own. Most connections of a process; further ones are refused with 503 and Retry-After. Unset is "
        "what the limit on open files leaves, 65,536 at most.", low=1,
    )  # fmt: skip
    max_json_depth: int = option(128, "Quire's own. Deepest nesting of a body.", low=4, high=512)
    max_json_values: int = option(
        1 << 16, "Quire's own. Most values of a body beside lists of token ids: each takes time and memory.", low=1024
    )
    max_request_token_ids: int = option(
        1 << 20, "Quire's own. Most token ids in the lists of a body (prompt, tokens, token_ids, allowed_token_ids).",
        low=1024,
    )  # fmt: skip
    max_num_choices: int = option(128, "Quire's own. Largest n of a request.", low=1)
    max_prompts_per_request: int = option(1024, "Quire's own. Most prompts in one completion request.", low=1)
    max_sequences_per_request: int = option(2048, "Quire's own. Most prompts times n.", low=1)
    max_fan_out_bytes: int = option(
        256 << 20, "Quire's own. Most bytes that a request may come to: n times prompts times its parameters "
        "(structured_outputs, logit_bias, allowed_token_ids, bad_words, vllm_xargs, cache_salt), and n times its "
        "prompts.", low=1024, human=True,
    )  # fmt: skip
    max_logprobs_per_request: int = option(
        1 << 25, "Quire's own. Most log probabilities of a request: n times prompts times tokens times those at each "
        "token; in a beam search, those of all extensions that are weighed.", low=1,
    )  # fmt: skip
    max_beam_tokens: int = option(
        1 << 20, "Quire's own. Most tokens of a beam search: beams times prompts times max_tokens.", low=1
    )
    max_stop_strings: int = option(64, "Quire's own. Most stop strings, and stop token ids, of a request.", low=1)
    max_stop_length: int = option(1024, "Quire's own. Longest stop string, in characters.", low=1)
    max_logit_bias: int = option(4096, "Quire's own. Most entries of logit_bias.", low=1, high=8192)
    max_bad_words: int = option(1024, "Quire's own. Most bad_words.", low=1)
    max_messages: int = option(16384, "Quire's own. Most messages of a chat.", low=1)
    queue_full_status: Literal["503", "429"] = option(
        "503",
        "Quire's own. Status of a request that finds the waiting queue full; either way Retry-After comes with it.",
    )
    request_timeout: float | None = option(
        None, "Quire's own. Seconds a request may take in all; then it ends with an error that says so.", above=0
    )
    engine_stall_timeout: float = option(
        120.0, "Quire's own. /health fails when requests run and no step finished for so many seconds; 0 is never.",
        low=0,
    )  # fmt: skip

    # ---- chat
    chat_template: str | None = option(None, "A chat template, or the path of a file with one, instead of the model's.")
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto", "How message contents reach the template: as text, or as parts."
    )
    trust_request_chat_template: bool = option(
        False, "Take chat templates from requests; they run bounded, in a process of their own."
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(None, "Variables every chat template gets.")
    response_role: str = option("assistant", "Role of answers when a generation prompt is added.")
    enable_auto_tool_choice: bool = option(
        False, "Find the calls in answers to requests with tools; needs tool_call_parser."
    )
    exclude_tools_when_tool_choice_none: bool = option(False, "tool_choice none hides tools from the template.")
    tool_call_parser: str | None = option(None, "How the model writes tool calls: a family's name.")
    tool_parser_plugin: str = option("", "Python file that registers further tool parsers.")
    tool_server: str | None = option(
        None, "Where tools of /v1/responses run: MCP servers, host:port with commas between, or demo."
    )

    # ---- answers
    return_tokens_as_token_ids: bool = option(False, "Tokens of logprobs are written as token_id:NUMBER.")
    enable_prompt_tokens_details: bool = option(False, "usage says how many prompt tokens were cached.")
    enable_force_include_usage: bool = option(False, "Every stream ends with its usage.")
    enable_request_id_headers: bool = option(True, "Answers carry X-Request-Id, the client's own or a new one.")
    enable_tokenizer_info_endpoint: bool = option(False, "Serve /tokenizer_info.")
    sse_keep_alive_interval: float = option(0.0, "Seconds of silence after which a stream sends a comment; 0 never.",
                                            low=0)  # fmt: skip
    fingerprint_mode: Literal["full", "hash", "custom", "none"] = option(
        "full", "system_fingerprint of answers: version and a hash of the configuration, the hash alone, or your own."
    )
    fingerprint_value: str | None = option(None, "The custom fingerprint.")
    disable_fastapi_docs: bool = option(False, "No /docs, /redoc and /openapi.json.")
    disable_console: bool = option(False, "Quire's own. No chat and engine view at /.")

    # ---- logs
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "info", "Lowest level of uvicorn's own log lines."
    )
    disable_uvicorn_access_log: bool = option(False, "No line per HTTP request.")
    disable_access_log_for_endpoints: tuple[str, ...] = option(
        (), "Paths without such a line, such as /health,/metrics.", unset=None, accepts=str | tuple[str, ...] | None,
        take=lambda given: () if given is None else as_paths(given),
    )  # fmt: skip
    enable_log_requests: bool = option(False, "Log every request as it arrives.")
    enable_log_outputs: bool = option(False, "Log every answer; needs enable_log_requests.")
    enable_log_deltas: bool = option(True, "With enable_log_outputs: log the pieces of streams, not only their sum.")
    max_log_len: int | None = option(None, "Longest prompt or answer written to the log, in characters.", low=0)
    log_error_stack: bool = option(False, "Log the stack of every error an answer reports.", unset=None)

    # ---- several engines

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that let a client in; none means: everybody."""
        return self.api_key or ()

    @property
    def tls(self) -> bool:
        return self.ssl_certfile is not None


def flats() -> list[Flat]:
    """Every option of the server, as flags.py adds them."""
    return [Flat(name, (name,), GROUP, mine) for name, mine in declarations(ServerConfig).items()]


def server_config(**given: Any) -> ServerConfig:
    """Checked and complete: keys from the environment are in place, combinations that cannot be are refused."""
    if not given.get("api_key"):
        key = env.API_KEY.get()
        given["api_key"] = None if key is None else (key,)
    if given.get("log_error_stack") is None:
        given["log_error_stack"] = env.SERVER_DEV_MODE.get()
    options = ServerConfig(**given)
    refuse_unbuilt(options)
    _check(options)
    return options


def _check(o: ServerConfig) -> None:
    """Combinations that cannot be: which, the option to name, and the words."""
    wants_tls = bool(o.ssl_keyfile or o.ssl_ca_certs or o.enable_ssl_refresh)
    rules = (
        (o.enable_auto_tool_choice and not o.tool_call_parser, "tool_call_parser",
         "enable_auto_tool_choice needs tool_call_parser, the way the model writes calls"),
        (o.enable_log_outputs and not o.enable_log_requests, "enable_log_outputs",
         "enable_log_outputs needs enable_log_requests"),
        ((o.fingerprint_mode == "custom") != (o.fingerprint_value is not None), "fingerprint_value",
         "fingerprint_value and fingerprint_mode='custom' go together"),
        (any(not key.strip() for key in o.keys), "api_key",
         "an empty api_key would let everybody in; leave api_key unset for that"),
        (wants_tls and not o.ssl_certfile, "ssl_certfile",
         "TLS needs ssl_certfile (and ssl_keyfile, unless the certificate file holds the key)"),
        (o.ssl_cert_reqs and not o.ssl_ca_certs, "ssl_cert_reqs",
         f"ssl_cert_reqs={o.ssl_cert_reqs} needs ssl_ca_certs to check against"),
        (o.disable_frontend_multiprocessing and o.api_server_count > 1, "api_server_count",
         f"api_server_count={o.api_server_count} needs an engine process of its own; disable_frontend_multiprocessing "
         "forbids it"),
        (o.api_server_count > 1 and env.ENABLE_RESPONSES_API_STORE.get(), "api_server_count",
         f"ENABLE_RESPONSES_API_STORE keeps responses in one process, and api_server_count is {o.api_server_count}: "
         "the process that is asked for one may not be the one that has it"),
        (o.allow_credentials and "*" in o.allowed_origins, "allow_credentials",
         "allow_credentials with allowed_origins * would let any site use a visitor's credentials; name the sites"),
    )  # fmt: skip
    for is_broken, param, words in rules:
        if is_broken:
            raise ConfigError(words, param=param)
