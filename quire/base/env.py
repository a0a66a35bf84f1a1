"""Every environment variable Quire reads: typed, documented, read once. Nothing else touches os.environ.

A variable NAME is read as QUIRE_NAME, then VLLM_NAME (programs and deployments written for vLLM keep working), then
the default. The first reading is kept: changing the environment afterwards has no effect (tests call `forget`).
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
# A word of a variable's name that says: this is nobody else's business.
_SECRET_WORDS = frozenset((
    "APIKEY", "AUTH", "AUTHORIZATION", "COOKIE", "CREDENTIAL", "CREDENTIALS", "JWT", "KEY", "KEYS", "PASS",
    "PASSPHRASE", "PASSWD", "PASSWORD", "PAT", "PWD", "SECRET", "SECRETS", "TOKEN",
))  # fmt: skip
_SECRET_PARTS = ("APIKEY", "CREDENTIAL", "PASSWORD", "PASSWD", "SECRET")
_SECRET_PREFIXES = ("AWS_", "AZURE_")
_NO_SECRETS = frozenset(("PWD", "OLDPWD"))  # the shell's folders
_HEADERS = re.compile(r"OTEL_\w*HEADERS")
_URL_WITH_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
# What an interpreter needs to start, find its libraries and write text.
_PLAIN = frozenset((
    "PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONUSERBASE",
    "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUTF8", "PYTHONIOENCODING", "OMP_NUM_THREADS",
))  # fmt: skip
_UNREAD: Any = object()
ALL: dict[str, Variable[Any]] = {}


class VariableError(ValueError):
    """A variable is set to something it cannot be."""


class Variable(Generic[Value]):
    def __init__(
        self,
        name: str,
        default: Value,
        parse: Callable[[str], Value],
        doc: str,
        *,
        choices: tuple[str, ...] = (),
        plain: bool = False,  # an established name read as it is, without a prefix
    ) -> None:
        self.name, self.default, self.parse, self.doc, self.choices = name, default, parse, doc, choices
        self.spellings = (name,) if plain else (f"QUIRE_{name}", f"VLLM_{name}")
        self._value: Value = _UNREAD
        ALL[name] = self

    def get(self) -> Value:
        if self._value is _UNREAD:
            self._value = self._read()
        return self._value

    def is_set(self) -> bool:
        return any(s in os.environ for s in self.spellings)

    @property
    def spelling(self) -> str:
        """That it is set by, or would be."""
        return next((name for name in self.spellings if name in os.environ), self.spellings[0])

    def forget(self) -> None:
        self._value = _UNREAD

    def _read(self) -> Value:
        for spelling in self.spellings:
            if (text := os.environ.get(spelling)) is None:
                continue
            try:
                value = self.parse(text)
            except ValueError as wrong:
                raise VariableError(f"environment variable {spelling}={text!r}: {wrong}") from None
            if self.choices and value not in self.choices:
                raise VariableError(
                    f"environment variable {spelling}={text!r}: choose one of {', '.join(self.choices)}"
                )
            return value
        return self.default


def forget_all() -> None:
    for variable in ALL.values():
        variable.forget()


def names(*prefixes: str) -> list[str]:
    """Every variable that is set and begins so."""
    return sorted(name for name in os.environ if name.startswith(prefixes))


def text(name: str) -> str | None:
    """What stands there, for whoever asks about a variable that Quire itself does not read."""
    return os.environ.get(name)


def settings() -> dict[str, str]:
    """What is set of Quire's own variables, for a process of another host: no secrets, nothing of this host alone."""
    local = {spelling for variable in (HOST_IP, PORT, CACHE_ROOT) for spelling in variable.spellings}
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("QUIRE_", "VLLM_")) and name not in local and not is_secret(name, value)
    }


def adopt(variables: dict[str, str]) -> None:
    """Set what is not set here yet; before any of them is read."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def child_environment(changes: dict[str, str]) -> dict[str, str]:
    """For a program that does what its user could do: this process's environment, changed."""
    return {**os.environ, **changes}


def without_secrets(*, keep: str | tuple[str, ...] = "") -> dict[str, str]:
    """For engines, workers and API processes: everything but secrets, because plug-ins and users' own classes may read
    any variable. `keep`: names that begin so stay. PASS_ENV names others that shall stay."""
    passed = PASS_ENV.get()
    return {
        name: value
        for name, value in os.environ.items()
        if name in passed or (keep and name.startswith(keep)) or not is_secret(name, value)
    }


def sandbox_environment() -> dict[str, str]:
    """For children that work on what a client sent: no more than an interpreter needs."""
    return {name: value for name, value in os.environ.items() if name in _PLAIN or name.startswith("LC_")}


def is_secret(name: str, value: str = "") -> bool:
    """By its name, or because the value is an address with a password in it."""
    name = name.upper()
    if name in _NO_SECRETS:
        return False
    return (
        not _SECRET_WORDS.isdisjoint(name.split("_"))
        or name.startswith(_SECRET_PREFIXES)
        or any(part in name for part in _SECRET_PARTS)
        or _HEADERS.fullmatch(name) is not None
        or _URL_WITH_PASSWORD.search(value) is not None
    )


def let_idle_threads_sleep() -> None:
    """Threads of OpenMP, which torch starts, would spin for milliseconds after each of its parallel operations, on the
    cores that the compiled kernels compute on. Heard only before torch is imported; what a user has set stays."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def keep_on_this_host() -> None:
    """Ranks of one host talk over its loopback interface only. Heard before a process group is made; what a user has
    set stays."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")


def use_interface(name: str) -> None:
    """Ranks of several hosts talk over this one; what a user has set stays."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)


def _flag(text: str) -> bool:
    low = text.strip().lower()
    if low in ("1", "true", "yes", "on"):
        return True
    if low in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("write 1 or 0")


def _whole(text: str, words: str = "a whole number") -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"write {words}") from None


def _optional_int(text: str) -> int | None:
    return _whole(text) if text.strip() else None


def _number(text: str, words: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"write {words}")
    return value


def _gib(text: str) -> float:
    return _number(text, "a number of GiB, 0 or more")


def _seconds(text: str) -> float:
    words = "a number of seconds above 0"
    if (value := _number(text, words)) <= 0:
        raise ValueError(f"write {words}")
    return value


def _seconds_or_never(text: str) -> float:
    return 0.0 if _number(text, "a number of seconds, or 0") == 0 else _seconds(text)


def _above_zero(text: str) -> int:
    words = "a whole number above 0"
    if (value := _whole(text, words)) < 1:
        raise ValueError(f"write {words}")
    return value


def _port(text: str) -> int | None:
    if "://" in text:
        raise ValueError("wanted a port number, got a URI (a Kubernetes service called 'vllm' or 'quire' sets this)")
    return _whole(text, "a port number")


LOGGING_LEVEL = Variable(
    "LOGGING_LEVEL", "INFO", str.upper, "Log level.", choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
)
LOGGING_STREAM = Variable(
    "LOGGING_STREAM",
    "stderr",
    lambda text: text.rsplit("/", 1)[-1],
    "Where log lines go.",
    choices=("stdout", "stderr"),
)
LOGGING_CONFIG_PATH = Variable[str | None](
    "LOGGING_CONFIG_PATH", None, str, "A JSON file with a Python logging configuration (dictConfig)."
)
CONFIGURE_LOGGING = Variable("CONFIGURE_LOGGING", True, _flag, "0: leave the `quire` logger alone.")
ENABLE_V1_MULTIPROCESSING = Variable[bool | None](
    "ENABLE_V1_MULTIPROCESSING",
    None,
    _flag,
    "1: LLM runs its engine in a process of its own; 0: AsyncLLM runs it in this one.",
)
CACHE_ROOT = Variable("CACHE_ROOT", os.path.join("~", ".cache", "quire"), str, "Where Quire keeps files of its own.")
TRITON_CACHE_DIR = Variable[str | None](
    "TRITON_CACHE_DIR", None, str, "Where compiled kernels are kept; unset is `triton` under CACHE_ROOT.", plain=True
)
COMPILE_PROCESSES = Variable(
    "COMPILE_PROCESSES", None, _optional_int,
    "Processes that compile kernels at a start without a kernel cache; unset takes the machine's cores, 0 none.",
)  # fmt: skip
CPU_KVCACHE_SPACE = Variable(
    "CPU_KVCACHE_SPACE", 0.0, _gib, "GiB for the KV cache on CPU; 0 takes a share of free memory."
)
CPU_NUM_THREADS = Variable(
    "CPU_NUM_THREADS",
    None,
    _optional_int,
    "Threads of each CPU worker; unset divides what the machine allows among them.",
)
CPU_OMP_THREADS_BIND = Variable(
    "CPU_OMP_THREADS_BIND", "auto", lambda text: text.strip().lower(),
    "Processors that the CPU worker's threads are kept on, as 0-3,8, of several workers one list each, as 0-3|4-7; "
    "auto and nobind leave that to the system.",
)  # fmt: skip
PP_LAYER_PARTITION = Variable(
    "PP_LAYER_PARTITION", "", str.strip,
    "Layers of each pipeline stage, as 9,11,12; unset makes equal shares.",
)  # fmt: skip
CPU_NUM_OF_RESERVED_CPU = Variable(
    "CPU_NUM_OF_RESERVED_CPU", 0, _whole,
    "Cores left to other work when the number of threads of the CPU worker is not given.",
)  # fmt: skip
CPU_PACKED_CACHE = Variable(
    "CPU_PACKED_CACHE", True, _flag,
    "0: weights packed for the CPU kernels are neither kept in `packed` under CACHE_ROOT nor read from there.",
)  # fmt: skip
CPU_KERNELS = Variable(
    "CPU_KERNELS", "auto", str.lower,
    "Compiled CPU kernels: auto takes the best instruction set, off none of them, a name that one.",
    choices=("auto", "off", "neon", "dotprod", "avx2", "avx512", "avx512bf16", "amx"),
)  # fmt: skip
CPU_KERNELS_FILE = Variable(
    "CPU_KERNELS_FILE", "", str,
    "Compiled CPU kernels to load instead of those installed with Quire; for builds with sanitizers.",
)  # fmt: skip
OMP_NUM_THREADS = Variable(
    "OMP_NUM_THREADS",
    None,
    lambda text: _optional_int(text.split(",")[0]),
    "Threads of every OpenMP program; CPU_NUM_THREADS goes before it.",
    plain=True,
)
TARGET_DEVICE = Variable(
    "TARGET_DEVICE", "", str.lower, "What device=auto means; unset takes a GPU where there is one.",
    choices=("", "cpu", "cuda"),
)  # fmt: skip
CUDA_VISIBLE_DEVICES = Variable[str | None](
    "CUDA_VISIBLE_DEVICES", None, str, "Which GPUs the driver shows to this process.", plain=True
)
ALLOW_LONG_MAX_MODEL_LEN = Variable(
    "ALLOW_LONG_MAX_MODEL_LEN", False, _flag, "1: max_model_len may exceed the model's own limit."
)
BATCH_INVARIANT = Variable("BATCH_INVARIANT", False, _flag, "1: a request's tokens do not depend on its neighbours.")
EARLY_LAUNCH = Variable(
    "EARLY_LAUNCH", True, _flag, "0: a kernel of a short decode step starts only when the one before it is done."
)
PLUGINS = Variable[tuple[str, ...] | None](
    "PLUGINS",
    None,
    lambda t: tuple(p.strip() for p in t.split(",") if p.strip()),
    "Names of plug-ins to load; unset loads all.",
)
PASS_ENV = Variable[tuple[str, ...]](
    "PASS_ENV", (), lambda t: tuple(p.strip() for p in t.split(",") if p.strip()),
    "Names of variables, with commas between, that engine processes get although they look like secrets.",
)  # fmt: skip
DP_SIZE = Variable(
    "DP_SIZE", 1, _above_zero, "Programs that run the same model with an engine each, unless data_parallel_size is set."
)
DP_RANK = Variable("DP_RANK", 0, _whole, "Which of these this one is.")
DP_RANK_LOCAL = Variable(
    "DP_RANK_LOCAL", None, _optional_int, "Which of those on this machine: decides its devices; unset is DP_RANK."
)
RANK = Variable("RANK", None, _optional_int, "Which of the launched programs this is (torchrun).", plain=True)
WORLD_SIZE = Variable("WORLD_SIZE", None, _optional_int, "How many programs were launched (torchrun).", plain=True)
LOCAL_RANK = Variable("LOCAL_RANK", None, _optional_int, "Which of those of this machine it is.", plain=True)
LOCAL_WORLD_SIZE = Variable("LOCAL_WORLD_SIZE", None, _optional_int, "How many of them this machine has.", plain=True)
PORT = Variable("PORT", None, _port, "First port to try for internal sockets.")
HOST_IP = Variable[str | None]("HOST_IP", None, str, "This host's address for others; unset asks the system.")
API_KEY = Variable[str | None]("API_KEY", None, str, "Key of the server, where --api-key names none.")
ALLOW_RUNTIME_LORA_UPDATING = Variable(
    "ALLOW_RUNTIME_LORA_UPDATING", False, _flag,
    "1: adapters may be loaded and unloaded over HTTP, and found by resolvers. Not for servers that strangers reach.",
)  # fmt: skip
LORA_RESOLVER_CACHE_DIR = Variable[str | None](
    "LORA_RESOLVER_CACHE_DIR", None, str, "Folder whose folders are adapters that requests may name."
)
LORA_RESOLVER_HF_REPO_LIST = Variable[tuple[str, ...]](
    "LORA_RESOLVER_HF_REPO_LIST", (), lambda t: tuple(p.strip() for p in t.split(",") if p.strip()),
    "Repositories of the model hub, with commas between, whose adapters requests may name.",
)  # fmt: skip
SERVER_DEV_MODE = Variable("SERVER_DEV_MODE", False, _flag, "1: development routes and error stacks.")
ENABLE_RESPONSES_API_STORE = Variable(
    "ENABLE_RESPONSES_API_STORE", False, _flag,
    "1: /v1/responses keeps its answers, so that they can be retrieved, continued and made in the background.",
)  # fmt: skip
RESPONSES_STORE_COUNT = Variable("RESPONSES_STORE_COUNT", 1024, _above_zero, "Most answers that are kept.")
RESPONSES_STORE_BYTES = Variable(
    "RESPONSES_STORE_BYTES", 256 << 20, _above_zero, "Most bytes of the answers that are kept, as JSON."
)
HTTP_TIMEOUT_KEEP_ALIVE = Variable(
    "HTTP_TIMEOUT_KEEP_ALIVE", 75, _above_zero,
    "Seconds after which the server closes an idle connection; longer than clients and proxies keep theirs.",
)  # fmt: skip
IMAGE_FETCH_TIMEOUT = Variable("IMAGE_FETCH_TIMEOUT", 5.0, _seconds, "Seconds that fetching an image may take.")
VIDEO_FETCH_TIMEOUT = Variable("VIDEO_FETCH_TIMEOUT", 30.0, _seconds, "Seconds that fetching a video may take.")
AUDIO_FETCH_TIMEOUT = Variable("AUDIO_FETCH_TIMEOUT", 10.0, _seconds, "Seconds that fetching audio may take.")
MEDIA_URL_ALLOW_REDIRECTS = Variable(
    "MEDIA_URL_ALLOW_REDIRECTS", False, _flag, "1: follow redirects of media URLs, each checked like the first."
)
MEDIA_LOADING_THREAD_COUNT = Variable(
    "MEDIA_LOADING_THREAD_COUNT", 8, _above_zero, "Threads per process that fetch, decode and process media."
)
MEDIA_QUEUE = Variable("MEDIA_QUEUE", 256, _above_zero, "Media items that may wait for these threads; others get 503.")
MAX_MEDIA_BYTES = Variable(
    "MAX_MEDIA_BYTES", 64 << 20, _above_zero, "Most bytes of one media item, fetched or sent, before decoding."
)
MAX_IMAGE_PIXELS = Variable(
    "MAX_IMAGE_PIXELS",
    1 << 26,
    _above_zero,
    "Most pixels of an image, before and after resizing; and of all frames of a video, or crops of an image, together.",
)
MAX_AUDIO_SECONDS = Variable("MAX_AUDIO_SECONDS", 3600, _above_zero, "Most seconds of one audio clip.")
MAX_AUDIO_CLIP_FILESIZE_MB = Variable(
    "MAX_AUDIO_CLIP_FILESIZE_MB", 25, _above_zero, "Most MiB of an audio file that is sent to be transcribed."
)
MAX_REALTIME_SESSIONS = Variable(
    "MAX_REALTIME_SESSIONS", 32, _above_zero, "Most sessions of /v1/realtime that one API process has open."
)
MAX_REALTIME_SECONDS = Variable(
    "MAX_REALTIME_SECONDS", 300, _above_zero, "Most seconds of audio that wait in one session of /v1/realtime."
)
REALTIME_IDLE_SECONDS = Variable(
    "REALTIME_IDLE_SECONDS", 300, _above_zero, "Seconds without an event after which a session of /v1/realtime ends."
)
MAX_VIDEO_FRAMES = Variable(
    "MAX_VIDEO_FRAMES", 36000, _above_zero, "Most frames that a video may have; fewer of them are used."
)
AUDIT = Variable("AUDIT", False, _flag, "1: check the block accounting at every step, not only when idle.")
ENGINE_START_TIMEOUT_S = Variable(
    "ENGINE_START_TIMEOUT_S", 600, _above_zero, "Seconds an engine process may take to get ready."
)
WORKER_TIMEOUT_S = Variable(
    "WORKER_TIMEOUT_S", 10.0, _seconds_or_never,
    "Seconds without a sign of life after which a worker process is taken to hang, and its engine ends. A worker, "
    "engine or API process that stands still (stopped by a signal or a debugger) is killed after a second. 0: neither.",
)  # fmt: skip
EXECUTE_MODEL_TIMEOUT_SECONDS = Variable(
    "EXECUTE_MODEL_TIMEOUT_SECONDS", 300.0, _seconds_or_never,
    "Seconds after which a step of worker processes that has not ended ends their engine; 0: never.",
)  # fmt: skip
JOIN_ALONE = Variable(
    "JOIN_ALONE", False, _flag,
    "1: a single worker joins a process group of its own and sums over it as ranks do, to test and measure that.",
)  # fmt: skip
PEER_SUMS = Variable(
    "PEER_SUMS", False, _flag,
    "1: ranks of one machine sum small tensors in one kernel, over memory that their GPUs read from each other.",
)  # fmt: skip
SHARED_SUMS = Variable(
    "SHARED_SUMS", True, _flag,
    "0: ranks on CPUs that are processes of one machine sum over gloo, not through memory that they share.",
)  # fmt: skip
SHARE_GPUS = Variable(
    "SHARE_GPUS", False, _flag,
    "1: where there are more workers than GPUs, several share one, through gloo and without graphs: slow, for tests.",
)  # fmt: skip
NODE_TIMEOUT_S = Variable(
    "NODE_TIMEOUT_S", 1.5, _seconds,
    "Seconds of silence after which another machine of a server is taken to be lost. Unset: 10 for machines that have "
    "whole engines (data_parallel_size_local), 1.5 for those that share one (nnodes).",
)  # fmt: skip
NODE_KEY = Variable[str | None](
    "NODE_KEY", None, str,
    "The same secret on all machines of a server (nnodes, headless), at least 16 characters; only who knows it may "
    "join.",
)  # fmt: skip
PYTHONHASHSEED = Variable(
    "PYTHONHASHSEED",
    "",
    str,
    "Fixes the names of prefix-cache blocks, so that engines agree; unset: random.",
    plain=True,
)
HF_HUB_OFFLINE = Variable("HF_HUB_OFFLINE", False, _flag, "1: never ask a model hub.", plain=True)
HF_TOKEN = Variable[str | None]("HF_TOKEN", None, str, "Token for the model hub.", plain=True)
OPENAI_API_KEY = Variable[str | None](
    "OPENAI_API_KEY", None, str, "Key that `quire bench serve`, `chat` and `complete` send to a server.", plain=True
)
NO_COLOR = Variable("NO_COLOR", False, bool, "Anything: no colours in a terminal.", plain=True)
TERM = Variable("TERM", "", str, "What the terminal is; `dumb` gets no colours.", plain=True)
LOG_STATS_INTERVAL = Variable("LOG_STATS_INTERVAL", 10.0, _seconds, "Seconds between two lines of throughput.")
PROMETHEUS_DISABLE_CREATED_SERIES = Variable(
    "PROMETHEUS_DISABLE_CREATED_SERIES", False, _flag, "1: no `_created` lines in /metrics.", plain=True
)
OTEL_EXPORTER_OTLP_TRACES_PROTOCOL = Variable(
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "",
    str,
    "How traces are sent; unset takes OTEL_EXPORTER_OTLP_PROTOCOL.",
    choices=("", "grpc", "http/protobuf"),
    plain=True,
)
OTEL_EXPORTER_OTLP_PROTOCOL = Variable(
    "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", str, "How OpenTelemetry data is sent.", choices=("grpc", "http/protobuf"),
    plain=True,
)  # fmt: skip
