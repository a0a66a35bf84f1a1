"""ServerConfig: addresses, access, limits and logs of `quire serve`.

Declarations only (see option.py). Names are those of `vllm serve`; the ones that vLLM does not have are marked
"Quire only". Must not know: HTTP itself (the server reads this), or how an engine runs (engine.py).
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from quire.base import env
from quire.config.option import Group, declarations, group, option
from quire.config.table import Flat, refuse_unbuilt
from quire.schema.errors import ConfigError

GROUP = "Frontend"  # the heading in --help, as vLLM calls it


def json_list(value: Any) -> Any:
    """`'["a", "b"]'` (JSON, as vLLM's flags accept it) and plain strings are both lists."""
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list | tuple):
        return value
    items: list[Any] = []
    for item in value:
        if not (isinstance(item, str) and item.lstrip().startswith("[")):
            items.append(item)
            continue
        try:
            items.extend(json.loads(item))
        except ValueError as wrong:
            raise ConfigError(f"{item!r} is not a JSON list: {wrong}", value=item) from None
    return tuple(items)


def as_modules(value: Any) -> Any:
    """Texts, objects and lists of objects; objects as JSON."""
    value = [value] if isinstance(value, str | Mapping) else value
    if not isinstance(value, list | tuple):
        return value
    return tuple(json.dumps(dict(item)) if isinstance(item, Mapping) else item for item in value)


def as_prefix(value: Any) -> Any:
    """Of paths, without the slash that the next part begins with."""
    if not isinstance(value, str):
        return value
    if value and not value.startswith("/"):
        raise ConfigError(f"root_path is {value!r}; it must begin with '/'", param="root_path", value=value)
    return value.rstrip("/")


def as_paths(value: Any) -> Any:
    """'/health,/ping', as one string or as several."""
    items = json_list(value)
    if not isinstance(items, tuple) or not all(isinstance(word, str) for word in items):
        return items
    return tuple(path.strip() for word in items for path in word.split(",") if path.strip())


@group
class ServerConfig(Group):
    """The HTTP server: addresses, access, limits, logs."""

    # ---- where
    host: str | None = option(None, "Address to listen on; unset is every address of this machine.")
    port: int = option(8000, "Port to listen on; 0 picks a free one and logs it.", low=0, high=65535)
    uds: str | None = option(
        None, "Path of a unix socket (mode 0600) to listen on instead of host and port.", accepts=str | None
    )
    root_path: str | None = option(None, "Path prefix that a proxy in front strips.", take=as_prefix)
    api_server_count: int = option(
        1, "HTTP processes that share one engine.", unset=None, flags=("-asc",), low=1, high=64
    )
    disable_frontend_multiprocessing: bool = option(False, "Run the engine in the server's process.")

    headless: bool = option(
        False,
        "No HTTP: run the engines of this machine for a server on another one (data_parallel_start_rank, "
        "data_parallel_address), or its workers for an engine on another one (nnodes, node_rank, master_addr).",
    )

    # ---- TLS
    ssl_keyfile: str | None = option(None, "Private key (PEM).")
    ssl_certfile: str | None = option(None, "Certificate and its chain (PEM); turns HTTPS on.")
    ssl_ca_certs: str | None = option(None, "CA certificates for client certificates (PEM).")
    ssl_cert_reqs: int = option(0, "Client certificates: 0 none, 1 optional, 2 required.", low=0, high=2)
    ssl_ciphers: str | None = option(None, "Ciphers for TLS 1.2 and older, in OpenSSL's format.")
    enable_ssl_refresh: bool = option(False, "Reload certificate files when they change.")

    # ---- access
    api_key: tuple[str, ...] | None = option(
        None, "API keys; a client sends one as 'Authorization: Bearer KEY'. Unset is QUIRE_API_KEY or VLLM_API_KEY.",
        accepts=tuple[str, ...] | None, take=json_list, repeat=True,
    )  # fmt: skip
    api_key_scope: Literal["all", "v1"] = option(
        "all", "Quire only. Routes that require a key: all except /health and /ping, or only /v1, /v2 and /inference "
        "(as in vLLM), /pooling, /classify, /score and /rerank.",
    )  # fmt: skip
    prefix_cache_per_key: bool = option(
        True, "Quire only. With several keys, cached prefixes are shared only between requests with the same key: "
        "otherwise the time to first token would reveal what others sent.",
    )  # fmt: skip
    fair_scheduling: Literal["key", "address", "none"] = option(
        "key", "Quire only. Between whom waiting requests are served in turn: API keys, client addresses, or nobody.",
    )  # fmt: skip
    open_metrics: bool = option(False, "Quire only. /metrics requires no key.")
    allow_credentials: bool = option(False, "CORS: browsers may send credentials.")
    allowed_origins: tuple[str, ...] = option(
        (), "CORS: allowed origins, as several values or a JSON list; * is any. Unset is none.", take=json_list,
        repeat=True,
    )  # fmt: skip
    allowed_methods: tuple[str, ...] = option(("*",), "CORS: allowed methods.", take=json_list, repeat=True)
    allowed_headers: tuple[str, ...] = option(("*",), "CORS: allowed request headers.", take=json_list, repeat=True)
    lora_modules: tuple[str, ...] = option(
        (), "Adapters to serve: name=path, or JSON objects with name, path and base_model_name. Needs --enable-lora.",
        unset=None, take=as_modules, repeat=True,
    )  # fmt: skip
    middleware: tuple[str, ...] = option(
        (), "Import paths of ASGI middleware classes, or of async functions (request, call_next). Repeatable.",
        take=json_list, repeat=True,
    )  # fmt: skip

    # ---- limits
    h11_max_incomplete_event_size: int = option(
        65536, "Maximum size of a request's first line and headers, in bytes.", low=1024, human=True
    )
    h11_max_header_count: int = option(256, "Maximum number of headers of a request.", low=1)
    max_request_bytes: int = option(
        8 << 20, "Quire only. Maximum size of a request's body, in bytes; larger ones get 413.", low=1024, human=True
    )
    max_inflight_body_bytes: int = option(
        256 << 20, "Quire only. Maximum size of all bodies that a process receives and parses at once, in bytes; more "
        "get 503 and Retry-After. Never less than max_request_bytes.", low=1024, human=True,
    )  # fmt: skip
    body_timeout: float = option(
        60.0, "Quire only. Seconds in which a request's body must arrive, plus one for each 64 KiB of it; slower "
        "ones get 408. 0 means no limit.", low=0,
    )  # fmt: skip
    max_connections: int | None = option(
        None, "Quire only. Maximum connections per process; further ones get 503 and Retry-After. Unset follows "
        "from the limit on open files, at most 65,536.", low=1,
    )  # fmt: skip
    max_json_depth: int = option(128, "Quire only. Maximum nesting of a body.", low=4, high=512)
    max_json_values: int = option(
        1 << 16, "Quire only. Maximum number of JSON values in a body, not counting token ids.", low=1024
    )
    max_request_token_ids: int = option(
        1 << 20, "Quire only. Maximum number of token ids in a body (prompt, tokens, token_ids, allowed_token_ids).",
        low=1024,
    )  # fmt: skip
    max_num_choices: int = option(128, "Quire only. Maximum n of a request.", low=1)
    max_prompts_per_request: int = option(
        1024, "Quire only. Maximum number of prompts in one completion request.", low=1
    )
    max_sequences_per_request: int = option(2048, "Quire only. Maximum of prompts times n.", low=1)
    max_fan_out_bytes: int = option(
        256 << 20, "Quire only. Maximum size of an expanded request, in bytes: n times prompts times its parameters "
        "(structured_outputs, logit_bias, allowed_token_ids, bad_words, vllm_xargs, cache_salt), and n times its "
        "prompts; of pooling, also the pairs of texts and the results.", low=1024, human=True,
    )  # fmt: skip
    max_logprobs_per_request: int = option(
        1 << 25, "Quire only. Maximum log probabilities of a request: n times prompts times tokens times those per "
        "token; in a beam search, those of all candidates.", low=1,
    )  # fmt: skip
    max_beam_tokens: int = option(
        1 << 20, "Quire only. Maximum tokens of a beam search: beams times prompts times max_tokens.", low=1
    )
    max_stop_strings: int = option(
        64, "Quire only. Maximum number of stop strings, and of stop token ids, of a request.", low=1
    )
    max_stop_length: int = option(1024, "Quire only. Maximum length of a stop string, in characters.", low=1)
    max_logit_bias: int = option(4096, "Quire only. Maximum number of logit_bias entries.", low=1, high=8192)
    max_bad_words: int = option(1024, "Quire only. Maximum number of bad_words.", low=1)
    max_messages: int = option(16384, "Quire only. Maximum number of messages in a chat.", low=1)
    queue_full_status: Literal["503", "429"] = option(
        "503",
        "Quire only. Status of a response when the queue is full; either way with Retry-After.",
    )
    request_timeout: float | None = option(
        None, "Quire only. Maximum duration of a request, in seconds; then it ends with an error.", above=0
    )
    engine_stall_timeout: float = option(
        120.0, "Quire only. /health fails if requests run but no step finished for this many seconds; 0 is never.",
        low=0,
    )  # fmt: skip

    # ---- chat
    chat_template: str | None = option(None, "A chat template, or its path, instead of the model's.")
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto", "How message content is passed to the template: as text, or as parts."
    )
    trust_request_chat_template: bool = option(
        False, "Accept chat templates in requests; they run in a separate process with limits."
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(None, "Variables passed to every chat template.")
    response_role: str = option("assistant", "Role of answers if a generation prompt is added.")
    enable_auto_tool_choice: bool = option(
        False, "Parse tool calls in answers to requests with tools; needs tool_call_parser."
    )
    exclude_tools_when_tool_choice_none: bool = option(False, "tool_choice none hides tools from the template.")
    tool_call_parser: str | None = option(None, "Parser of the model's tool calls, by name.")
    tool_parser_plugin: str = option("", "Python file that registers further tool parsers.")
    tool_server: str | None = option(
        None, "MCP servers that run tools of /v1/responses, as comma-separated host:port, or demo."
    )

    # ---- answers
    return_tokens_as_token_ids: bool = option(False, "Tokens in logprobs are written as token_id:NUMBER.")
    enable_prompt_tokens_details: bool = option(False, "usage includes the number of cached prompt tokens.")
    enable_force_include_usage: bool = option(False, "Every stream ends with usage.")
    enable_request_id_headers: bool = option(True, "Responses have X-Request-Id, the client's or a new one.")
    enable_tokenizer_info_endpoint: bool = option(False, "Serve /tokenizer_info.")
    sse_keep_alive_interval: float = option(
        0.0, "Seconds of silence after which a stream sends a comment; 0 never.", low=0
    )
    fingerprint_mode: Literal["full", "hash", "custom", "none"] = option(
        "full", "system_fingerprint of answers: version and a hash of the configuration, the hash alone, or custom."
    )
    fingerprint_value: str | None = option(None, "The custom fingerprint.")
    disable_fastapi_docs: bool = option(False, "No /docs, /redoc and /openapi.json.")
    disable_console: bool = option(False, "Quire only. No chat and engine view at /.")

    # ---- logs
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "info", "Level of uvicorn's log."
    )
    disable_uvicorn_access_log: bool = option(False, "No access log.")
    disable_access_log_for_endpoints: tuple[str, ...] = option(
        (), "Paths excluded from the access log, such as /health,/metrics.", unset=None,
        accepts=str | tuple[str, ...] | None, take=lambda value: () if value is None else as_paths(value),
    )  # fmt: skip
    enable_log_requests: bool = option(False, "Log every request as it arrives.")
    enable_log_outputs: bool = option(False, "Log every answer; needs enable_log_requests.")
    enable_log_deltas: bool = option(
        True, "With enable_log_outputs: log the chunks of streams too, not only the complete text."
    )
    max_log_len: int | None = option(None, "Maximum characters of a prompt or answer in the log.", low=0)
    log_error_stack: bool = option(False, "Log the stack trace of every error in a response.", unset=None)

    # ---- several engines

    @property
    def keys(self) -> tuple[str, ...]:
        """Accepted API keys; none means that no key is required."""
        return self.api_key or ()

    @property
    def tls(self) -> bool:
        return self.ssl_certfile is not None


def flats() -> list[Flat]:
    """Every option of the server, as rows for flags.py."""
    return [Flat(name, (name,), GROUP, mine) for name, mine in declarations(ServerConfig).items()]


def server_config(**requested: Any) -> ServerConfig:
    """Validated and complete: keys from the environment are filled in, impossible combinations refused."""
    if not requested.get("api_key"):
        key = env.API_KEY.get()
        requested["api_key"] = None if key is None else (key,)
    if requested.get("log_error_stack") is None:
        requested["log_error_stack"] = env.SERVER_DEV_MODE.get()
    options = ServerConfig(**requested)
    refuse_unbuilt(options)
    _check(options)
    return options


def _check(o: ServerConfig) -> None:
    """Impossible combinations: the condition, the option to name, and the message."""
    wants_tls = bool(o.ssl_keyfile or o.ssl_ca_certs or o.enable_ssl_refresh)
    rules = (
        (o.enable_auto_tool_choice and not o.tool_call_parser, "tool_call_parser",
         "enable_auto_tool_choice needs tool_call_parser, the format of the model's calls"),
        (o.enable_log_outputs and not o.enable_log_requests, "enable_log_outputs",
         "enable_log_outputs needs enable_log_requests"),
        ((o.fingerprint_mode == "custom") != (o.fingerprint_value is not None), "fingerprint_value",
         "fingerprint_value and fingerprint_mode='custom' must be set together"),
        (any(not key.strip() for key in o.keys), "api_key",
         "an empty api_key would allow everybody; leave api_key unset for that"),
        (wants_tls and not o.ssl_certfile, "ssl_certfile",
         "TLS needs ssl_certfile (and ssl_keyfile, unless the certificate file contains the key)"),
        (o.ssl_cert_reqs and not o.ssl_ca_certs, "ssl_cert_reqs",
         f"ssl_cert_reqs={o.ssl_cert_reqs} needs ssl_ca_certs"),
        (o.disable_frontend_multiprocessing and o.api_server_count > 1, "api_server_count",
         f"api_server_count={o.api_server_count} needs a separate engine process, but "
         "disable_frontend_multiprocessing is set"),
        (o.api_server_count > 1 and env.ENABLE_RESPONSES_API_STORE.get(), "api_server_count",
         f"ENABLE_RESPONSES_API_STORE keeps responses in one process, and api_server_count is {o.api_server_count}: "
         "a request for one may reach another process"),
        (o.allow_credentials and "*" in o.allowed_origins, "allow_credentials",
         "allow_credentials with allowed_origins * would let any site use a visitor's credentials; name the sites"),
    )  # fmt: skip
    for is_broken, param, message in rules:
        if is_broken:
            raise ConfigError(message, param=param)
