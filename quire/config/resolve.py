"""From what was asked to what will be run: ordered pure steps EngineConfig -> EngineConfig.

Each step is one function, named for what it decides; it logs a decision with its reason (INFO if it could surprise,
DEBUG if not) and raises ConfigError on what cannot be. `asked` is the user's own words (None: not said), so a step
can tell a default from a wish. In: EngineArgs. Out: a finished EngineConfig. Nothing measured ever enters here.
"""

import copy
import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from quire.base import env, native
from quire.base.gguf import GGUFError, shared
from quire.base.log import logger
from quire.base.plugins import call_plugins
from quire.base.registry import load
from quire.config import mistral_config, table
from quire.config.device import find_gpu
from quire.config.engine import EngineConfig, replace
from quire.config.environment import check_environment
from quire.config.facts import read_facts
from quire.config.graphs import choose_graphs
from quire.config.mistral_config import CONFIG_FILE
from quire.config.observing import check_traces
from quire.config.outside import registered
from quire.config.sampling import choose_sampling
from quire.config.source import locate, read_json, stored_dtype
from quire.schema.errors import CheckpointError, ConfigError, ModelNotFoundError, NotBuiltError

log = logger(__name__)

Asked = Mapping[str, Any]
Step = Callable[[Asked, EngineConfig], EngineConfig]
USAGES = ("LLM_CLASS", "OPENAI_API_SERVER")
_QUEUED_REQUESTS, _QUEUED_TOKENS = 10_000, 4 << 20  # that may wait in a server
GPU_BLOCK_SIZE = 64  # tokens: a tile of keys of the attention kernels is then one page
ONLINE = {"int8_wo": "int8", "int4_wo": "int4"}  # quantization at load -> weight_form
_PLAIN_GGUF = (0, 1, 28, 30)  # tensor types F32, F16, F64, BF16
_UNKNOWN_LENGTH = 2048  # tokens, for a model that does not say


def resolve(args: Any, usage_context: Any = None) -> EngineConfig:
    """Run every step in order."""
    call_plugins()
    asked = dict(vars(args))
    usage = str(usage_context) if usage_context is not None else ""
    config = replace(table.assemble(asked), usage_context=usage.rpartition(".")[2])
    for step in STEPS:
        config = step(asked, config)
    return config


def refuse(asked: Asked, config: EngineConfig) -> EngineConfig:
    """First of all: an option whose feature is missing is refused by name, and hints to another engine are dropped."""
    table.refuse_unbuilt(config)
    plain: EngineConfig = table.without_hints(config)
    return plain


def choose_device(asked: Asked, config: EngineConfig) -> EngineConfig:
    """What was asked for; else a GPU where there is one."""
    device: str = config.device_config.device
    if device == "auto":
        device, why = env.TARGET_DEVICE.get(), "QUIRE_TARGET_DEVICE"
        if not device:
            gpu = find_gpu()
            device = "cpu" if gpu is None else "cuda"
            why = "no usable GPU was found" if gpu is None else gpu.name or "an NVIDIA driver is there"
        log.info("device: %s (%s)", device, why)
    return replace(config, **{"device_config.device": device})


def find_model(asked: Asked, config: EngineConfig) -> EngineConfig:
    """Where the files are, and under which names the model is served."""
    model, files = config.model_config, config.load_config
    if asked.get("model") == "":  # an unset variable of a script, most likely: not a wish for the embedded one
        raise ModelNotFoundError("model is '': name a folder, a .gguf file or a hub id, or leave it out", param="model")
    found = locate(model.model or None, model.revision, files.download_dir, model.hf_token, files.ignore_patterns)
    if not model.model:
        log.info("No model was named: using the embedded %s", found.name)
    given = asked.get("served_model_name")
    names = tuple(given) if isinstance(given, list | tuple) else (model.served_model_name or found.name,)
    changes = {"path": found.path, "served_model_name": names[0], "served_model_names": names}
    if not model.model:
        changes["model"] = found.name
    return replace(config, model_config=replace(model, **changes))


def find_tokenizer(asked: Asked, config: EngineConfig) -> EngineConfig:
    """The model's own files unless another tokenizer was named; a hub id is fetched here."""
    model = config.model_config
    revision = model.tokenizer_revision or model.revision
    source = model.tokenizer or model.path
    if model.tokenizer and not os.path.exists(os.path.expanduser(model.tokenizer)):
        files = config.load_config
        source = locate(model.tokenizer, revision, files.download_dir, model.hf_token, weights=False).path
    skip = model.skip_tokenizer_init or config.tokens_only
    return replace(
        config,
        model_config=replace(
            model, tokenizer=os.path.expanduser(source), tokenizer_revision=revision, skip_tokenizer_init=skip
        ),
    )


def read_model(asked: Asked, config: EngineConfig) -> EngineConfig:
    """The raw configuration with the user's patches, and the facts in it."""
    raw = apply_overrides(_raw_config(config), asked.get("hf_overrides"))
    facts = read_facts(raw)
    if not facts.architectures:
        raise CheckpointError(f"the configuration of {config.model_config.model!r} names no architecture")
    if facts.is_encoder_decoder:
        raise NotBuiltError(
            f"{facts.architectures[0]} is an encoder-decoder model, which this version of Quire cannot run yet",
            param="model",
        )
    classes = registered(config.model_config.model_class_overrides)
    ours = {name: classes[name] for name in facts.architectures if name in classes}
    return replace(
        config, model_config=replace(config.model_config, hf_config=raw, facts=facts, model_class_overrides=ours)
    )


def _raw_config(config: EngineConfig) -> dict[str, Any]:
    model = config.model_config
    if model.hf_config_path is not None:
        place = os.path.expanduser(model.hf_config_path)
        if place.endswith(".json") and os.path.isfile(place):
            return read_json(*os.path.split(place))
        files = config.load_config
        return read_json(
            locate(place, model.revision, files.download_dir, model.hf_token, weights=False).path, "config.json"
        )
    if not model.path.endswith(".gguf"):
        if is_mistral(config):
            return mistral_config.config_of(read_json(model.path, CONFIG_FILE), model.path)
        return read_json(model.path, "config.json")
    try:
        found: dict[str, Any] = load("quire.config.gguf_config:config_of")(shared(model.path))
    except GGUFError as wrong:
        raise CheckpointError(str(wrong)) from None
    return found


def is_mistral(config: EngineConfig) -> bool:
    """Whether a folder is read in Mistral's own form: as asked, else if it holds no other."""
    model = config.model_config
    if model.config_format != "auto":
        return bool(model.config_format == "mistral")
    there = [os.path.exists(os.path.join(model.path, name)) for name in ("config.json", CONFIG_FILE)]
    return there == [False, True]


def apply_overrides(raw: dict[str, Any], patch: Any) -> dict[str, Any]:
    """A mapping is laid over the configuration, key by key and level by level; a callable returns the new one."""
    if not patch:
        return raw
    if callable(patch):
        changed = patch(RawConfig(copy.deepcopy(raw)))
        if not isinstance(changed, Mapping):
            raise ConfigError(
                f"the hf_overrides callable returned {type(changed).__name__}; it must return the configuration",
                param="hf_overrides",
            )
        log.info("hf_overrides: the configuration went through %s", patch)
        return {str(key): _plain(value) for key, value in changed.items()}
    log.info("hf_overrides: %s", ", ".join(f"{key}={value!r}" for key, value in patch.items()))
    return _laid_over(raw, patch)


class RawConfig(dict[str, Any]):
    """A configuration whose keys can also be read and set as attributes, as patches written for vLLM do."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the configuration has no {name!r}")
        value = self[name]
        if isinstance(value, dict) and not isinstance(value, RawConfig):
            value = self[name] = RawConfig(value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        out[key] = _laid_over(old, value) if both else value  # type: ignore[arg-type]
    return out


def choose_storage(asked: Asked, config: EngineConfig) -> EngineConfig:
    """How weights are stored: what the checkpoint says, and the options must not contradict it."""
    model, files = config.model_config, config.load_config
    is_gguf = model.path.endswith(".gguf")
    stored = "gguf" if is_gguf else model.facts.quantization
    if model.quantization in ONLINE:
        return _choose_online(config, stored)
    if model.quantization is not None and model.quantization != stored:
        what = f"is stored as {stored}" if stored else "is not quantized"
        raise ConfigError(f"quantization={model.quantization!r}, but the checkpoint {what}", param="quantization")
    if stored and not is_gguf:
        raise NotBuiltError(
            f"this checkpoint is quantized ({stored}), which is not available in this version of Quire: use the "
            "unquantized checkpoint or a GGUF file",
            param="quantization",
            value=stored,
        )
    form = files.load_format
    if form == "auto" and (is_gguf or is_mistral(config)):
        form = "gguf" if is_gguf else "mistral"
    check_loader(files.load_format, files.model_loader_extra_config)
    if is_gguf != (form == "gguf") and form != "dummy":
        raise ConfigError(
            f"load_format={form!r} does not fit {model.path}: it is {'a' if is_gguf else 'no'} GGUF file",
            param="load_format",
        )
    return replace(config, **{"model_config.quantization": stored or None, "load_config.load_format": form})


def check_loader(load_format: str, extra: Mapping[str, Any]) -> None:
    """model_loader_extra_config is refused where nobody would read it."""
    known = ("pattern",) if load_format == "sharded_state" else ()
    if unknown := [str(key) for key in extra if key not in known]:
        raise NotBuiltError(
            f"model_loader_extra_config: {', '.join(unknown)} means nothing to load_format={load_format!r}"
            + (f", which takes {', '.join(known)}" if known else ""),
            param="model_loader_extra_config",
        )


def _choose_online(config: EngineConfig, stored: str) -> EngineConfig:
    """Numbers rounded to blocks of 8 or 4 bits while they are loaded."""
    model = config.model_config
    if stored:
        raise ConfigError(
            f"quantization={model.quantization!r} rounds unquantized checkpoints, but this one is stored as {stored}",
            param="quantization",
        )
    if config.device_config.device != "cpu":
        raise NotBuiltError(
            f"quantization={model.quantization!r} is built for device=cpu only in this version", param="quantization"
        )
    if native.library() is None:
        raise ConfigError(
            f"quantization={model.quantization!r} needs the compiled CPU kernels: {native.why_not()}",
            param="quantization",
        )
    return replace(config, **{"model_config.weight_form": ONLINE[str(model.quantization)]})


def choose_dtype(asked: Asked, config: EngineConfig) -> EngineConfig:
    """auto: what the checkpoint was saved in, where the device computes it well."""
    model = config.model_config
    on_gpu = config.device_config.device == "cuda"
    if model.dtype != "auto":
        if model.dtype == "float16" and not on_gpu:
            log.info("dtype: float16 as asked; CPUs compute it slowly, bfloat16 and float32 are faster")
        if asked.get("quantization") == "gguf" and not on_gpu:
            return replace(config, **{"model_config.weight_form": "stored"})
        return config
    if on_gpu:
        return replace(config, **{"model_config.dtype": _gpu_dtype(config)})
    if model.path.endswith(".gguf"):
        return _gguf_on_cpu(config)
    saved = model.facts.dtype or stored_dtype(model.path) or "float32"
    dtype = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}.get(saved, "float32")
    if saved == "float16":
        log.info("dtype: bfloat16 (the checkpoint is float16, which CPUs compute slowly; dtype=float16 insists)")
    elif saved != dtype:
        log.warning("dtype: %s (the checkpoint says %s, which cannot be computed in)", dtype, saved)
    else:
        log.debug("dtype: %s, as saved", dtype)
    return replace(config, **{"model_config.dtype": dtype})


def _gguf_on_cpu(config: EngineConfig) -> EngineConfig:
    """Blocks are multiplied as they are stored, between float32 activations; plain numbers as the CPU does it best."""
    if native.library() is not None and holds_blocks(config.model_config.path):
        log.info("dtype: float32, weights as the GGUF file stores them (dtype=float32 decodes them)")
        return replace(config, **{"model_config.dtype": "float32", "model_config.weight_form": "stored"})
    has_units = cpu_multiplies_bfloat16()
    dtype = "bfloat16" if has_units else "float32"
    log.info("dtype: %s (GGUF; this CPU %s bfloat16)", dtype, "multiplies" if has_units else "does not multiply")
    return replace(config, **{"model_config.dtype": dtype})


def holds_blocks(path: str) -> bool:
    """Whether some tensor of a GGUF file is quantized."""
    return any(tensor.type_id not in _PLAIN_GGUF for tensor in shared(path).tensors.values())


def _gpu_dtype(config: EngineConfig) -> str:
    """float16 for float32 and float16 checkpoints, bfloat16 for bfloat16 ones (and for GGUF, which says neither)."""
    model = config.model_config
    is_gguf = model.path.endswith(".gguf")
    saved = "bfloat16" if is_gguf else model.facts.dtype or stored_dtype(model.path) or "float32"
    dtype = "bfloat16" if saved == "bfloat16" else "float16"
    if saved not in ("float16", "bfloat16"):
        log.info("dtype: float16 (the checkpoint is %s; dtype=float32 insists)", saved)
    return dtype


def cpu_multiplies_bfloat16() -> bool:
    """True if this CPU has instructions for bfloat16 products."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpu_flags())


@cache
def cpu_flags() -> frozenset[str]:
    """What this CPU can do, in Linux's words; nothing elsewhere."""
    if platform.system() != "Linux":
        return frozenset()
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return frozenset(next((line for line in file if line.startswith(("flags", "Features"))), "").split())


def choose_length(asked: Asked, config: EngineConfig) -> EngineConfig:
    """max_model_len: the model's own limit, or less."""
    model = config.model_config
    wanted = None if asked.get("max_model_len") is None else model.max_model_len
    limit = model.facts.max_positions
    if not limit:
        log.warning("the configuration names no context length; assuming %d tokens", _UNKNOWN_LENGTH)
        limit = max(_UNKNOWN_LENGTH, wanted or 0)
    window = model.facts.sliding_window
    if model.disable_sliding_window and 0 < window < limit:
        log.info("max_model_len: at most %d, the model's window (disable_sliding_window)", window)
        limit = window
    if wanted is None or wanted == -1:
        length = limit
        log.info("max_model_len: %d (%s)", length, "the model's own limit" if wanted is None else "or less, by memory")
    else:
        length = _checked_length(wanted, limit)
    return replace(config, model_config=replace(model, max_model_len=length, original_max_model_len=wanted))


def _checked_length(wanted: int, limit: int) -> int:
    if wanted < 1:
        raise ConfigError(f"max_model_len must be at least 1, or -1 for auto; got {wanted}", param="max_model_len")
    if wanted <= limit:
        return wanted
    if env.ALLOW_LONG_MAX_MODEL_LEN.get():
        log.warning("max_model_len: %d although the model's own limit is %d; answers may be nonsense", wanted, limit)
        return wanted
    raise ConfigError(
        f"max_model_len={wanted} is more than the model's own limit of {limit} tokens; lower it, or set "
        "QUIRE_ALLOW_LONG_MAX_MODEL_LEN=1 if you know that the model can do more",
        param="max_model_len",
        value=wanted,
    )


def choose_reuse(asked: Asked, config: EngineConfig) -> EngineConfig:
    """Chunked prefill and prefix caching: on. Where layers keep running states, reuse costs memory for saved ones: only
    if asked for."""
    has_states, cache = config.model_config.facts.has_states, config.cache_config
    changes: dict[str, Any] = {}
    if asked.get("enable_chunked_prefill") is None:
        changes["scheduler_config.enable_chunked_prefill"] = True
    caching = asked.get("enable_prefix_caching")
    if caching is None:
        caching = not has_states or cache.mamba_cache_mode != "none"
        changes["cache_config.enable_prefix_caching"] = caching
        if not caching:
            log.info(
                "enable_prefix_caching: off (some layers keep running states; enable_prefix_caching=True saves them)"
            )
    if has_states and caching and cache.mamba_cache_mode == "none":
        changes["cache_config.mamba_cache_mode"] = "align"
        log.info("mamba_cache_mode: align (prefix caching is on: states are saved at block ends)")
    if cache.mamba_block_size is not None and not caching:
        raise ConfigError(
            f"mamba_block_size={cache.mamba_block_size} says where states are saved for reuse, which needs "
            "enable_prefix_caching=True",
            param="mamba_block_size",
            value=cache.mamba_block_size,
        )
    if cache.mamba_cache_mode != "none" and has_states and not caching:
        raise ConfigError(
            f"mamba_cache_mode={cache.mamba_cache_mode} needs enable_prefix_caching=True",
            param="mamba_cache_mode",
            value=cache.mamba_cache_mode,
        )
    return replace(config, **changes)


def batch_defaults(world_size: int, device: str = "cpu") -> tuple[dict[str, int], dict[str, int]]:
    """(tokens, requests) of a step, by usage context."""
    if device == "cuda":
        gpu = find_gpu()
        is_large = gpu is not None and gpu.total_bytes >= 70 << 30 and "a100" not in gpu.name.lower()
        most = 1024 if is_large else 256
        most_tokens = (16384, 8192) if is_large else (8192, 2048)
        return dict(zip(USAGES, most_tokens, strict=True)), dict.fromkeys(USAGES, most)
    tokens = {"LLM_CLASS": 4096 * world_size, "OPENAI_API_SERVER": 2048 * world_size}
    requests = {"LLM_CLASS": 256 * world_size, "OPENAI_API_SERVER": 128 * world_size}
    return tokens, requests


# Of a server: on a GPU about two steps of decodes with a large model; on a CPU what a reader of a stream bears.
LATENCY_GOALS_MS = {"cuda": 12.0, "cpu": 500.0}


def choose_batch(asked: Asked, config: EngineConfig) -> EngineConfig:
    """How much a step holds: by usage, then so that the two limits and the context length fit each other."""
    scheduler, length = config.scheduler_config, config.model_config.max_model_len
    by_tokens, by_requests = batch_defaults(config.parallel_config.world_size, config.device_config.device)
    tokens, requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    if asked.get("max_num_seqs") is None:
        requests = by_requests.get(config.usage_context, scheduler.DEFAULT_MAX_NUM_SEQS)
    if asked.get("max_num_batched_tokens") is None:
        tokens = by_tokens.get(config.usage_context, scheduler.DEFAULT_MAX_NUM_BATCHED_TOKENS)
        if not scheduler.enable_chunked_prefill:
            tokens = max(tokens, length)
        tokens = max(min(tokens, requests * length), requests if asked.get("max_num_seqs") else 1)
    if asked.get("max_num_seqs") is None:
        requests = min(requests, tokens)
    log.debug("a step holds at most %d tokens of %d requests", tokens, requests)
    goal = scheduler.inter_token_latency_goal_ms
    if asked.get("inter_token_latency_goal_ms") is None:
        is_server = config.usage_context == "OPENAI_API_SERVER"
        goal = LATENCY_GOALS_MS.get(config.device_config.device, 0.0) if is_server else 0.0
    return replace(
        config,
        scheduler_config=replace(
            scheduler, max_num_batched_tokens=tokens, max_num_seqs=requests, inter_token_latency_goal_ms=goal
        ),
    )


def choose_queue(asked: Asked, config: EngineConfig) -> EngineConfig:
    """How much may wait: a server refuses in time rather than let a queue grow without end."""
    if config.usage_context != "OPENAI_API_SERVER":
        return config
    scheduler, length = config.scheduler_config, config.model_config.max_model_len
    changes: dict[str, Any] = {}
    if scheduler.max_num_queued_reqs is None:
        changes["max_num_queued_reqs"] = _QUEUED_REQUESTS
    if scheduler.max_num_queued_tokens is None:
        changes["max_num_queued_tokens"] = max(_QUEUED_TOKENS, 8 * length)
    return replace(config, scheduler_config=replace(scheduler, **changes))


def check_scheduler(asked: Asked, config: EngineConfig) -> EngineConfig:
    """Limits that could never be met together are errors."""
    s, length = config.scheduler_config, config.model_config.max_model_len
    if s.max_num_batched_tokens < s.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={s.max_num_batched_tokens} is less than max_num_seqs={s.max_num_seqs}: every "
            "running request needs a token in each step",
            param="max_num_batched_tokens",
        )
    if not s.enable_chunked_prefill and s.max_num_batched_tokens < length:
        raise ConfigError(
            f"max_num_batched_tokens={s.max_num_batched_tokens} is less than max_model_len={length}, and without "
            "chunked prefill a prompt must fit one step: raise the first, lower the second, or allow chunked prefill",
            param="max_num_batched_tokens",
        )
    if s.max_num_batched_tokens > s.max_num_seqs * length:
        log.warning(
            "max_num_batched_tokens=%d can never be filled by %d requests of %d tokens",
            s.max_num_batched_tokens, s.max_num_seqs, length,
        )  # fmt: skip
    return replace(config, scheduler_config=replace(s, long_prefill_token_threshold=_long_threshold(config)))


def _long_threshold(config: EngineConfig) -> int:
    s, length = config.scheduler_config, config.model_config.max_model_len
    threshold = s.long_prefill_token_threshold
    if s.max_long_partial_prefills > s.max_num_partial_prefills:
        raise ConfigError(
            f"max_long_partial_prefills={s.max_long_partial_prefills} is more than max_num_partial_prefills="
            f"{s.max_num_partial_prefills}",
            param="max_long_partial_prefills",
        )
    if s.max_num_partial_prefills > 1:
        if not s.enable_chunked_prefill:
            raise ConfigError("max_num_partial_prefills > 1 needs chunked prefill", param="max_num_partial_prefills")
        if not threshold:
            threshold = max(1, int(length * 0.04))
            log.info("long_prefill_token_threshold: %d (4%% of max_model_len)", threshold)
    if threshold > length:
        raise ConfigError(
            f"long_prefill_token_threshold={threshold} is more than max_model_len={length}",
            param="long_prefill_token_threshold",
        )
    return threshold


def choose_scheduling(asked: Asked, config: EngineConfig) -> EngineConfig:
    """Planning ahead pays where the device works beside the host; a CPU worker is the host."""
    if asked.get("async_scheduling") is None:
        if config.device_config.device == "cuda":
            log.debug("async_scheduling: on (the GPU works while the next step is planned)")
            return replace(config, **{"scheduler_config.async_scheduling": True})
        log.debug("async_scheduling: off (on CPU the plan and the step share the cores)")
        return replace(config, **{"scheduler_config.async_scheduling": False})
    return config


def choose_cache(asked: Asked, config: EngineConfig) -> EngineConfig:
    """The KV cache's precision, and what it copies from the model."""
    facts, asked_dtype = config.model_config.facts, config.cache_config.cache_dtype
    cache_dtype = _cache_dtype(config) if asked_dtype == "auto" else None
    if config.device_config.device != "cpu" and asked_dtype not in ("auto", config.model_config.dtype):
        raise NotBuiltError(
            f"kv_cache_dtype={asked_dtype!r} is built for device=cpu only in this version; a GPU keeps keys and values "
            f"as the model computes them ({config.model_config.dtype})",
            param="kv_cache_dtype",
        )
    if asked_dtype == "int8_per_token_head" and native.library() is None:
        raise ConfigError(
            f"kv_cache_dtype={asked_dtype!r} needs the compiled CPU kernels: {native.why_not()}", param="kv_cache_dtype"
        )
    changes: dict[str, Any] = {
        "sliding_window": facts.sliding_window if facts.all_windowed else None,
        "user_specified_block_size": asked.get("block_size") is not None,
    }
    if asked.get("block_size") is None and config.device_config.device == "cuda":
        changes["block_size"] = GPU_BLOCK_SIZE
        log.debug("block_size: %d (a GPU reads whole tiles of keys)", GPU_BLOCK_SIZE)
    if cache_dtype is not None:
        changes["cache_dtype"] = cache_dtype
    return replace(config, cache_config=replace(config.cache_config, **changes))


def _cache_dtype(config: EngineConfig) -> str:
    """The model's; but 16 bits beside blocks of a few bits, whose float32 activations have no more to say."""
    model = config.model_config
    if model.weight_form != "stored" or model.dtype != "float32" or native.library() is None:
        return model.dtype
    by_tiles = "amx_bf16" in cpu_flags() and env.CPU_KERNELS.get() in ("auto", "amx")
    return "bfloat16" if by_tiles else "float16"  # attention by tiles knows bfloat16 alone


def finish(asked: Asked, config: EngineConfig) -> EngineConfig:
    """A name for this run, and the checks that every field is final."""
    model = config.model_config
    quantized = model.hf_config.get("quantization_config")
    return replace(
        config,
        instance_id=f"{time.time_ns():x}",
        quant_config=quantized if isinstance(quantized, dict) else None,
        **{"parallel_config.is_moe_model": model.facts.num_experts > 0},
    )


def choose_thinking(asked: Asked, config: EngineConfig) -> EngineConfig:
    """The reasoning parser has two places; one is as good as the other."""
    said, own = config.reasoning_config, config.structured_outputs_config.reasoning_parser
    if said is not None and not (said.reasoning_parser or own or (said.reasoning_start_str and said.reasoning_end_str)):
        raise ConfigError(
            "reasoning_config needs reasoning_parser, or both reasoning_start_str and reasoning_end_str",
            param="reasoning_config",
        )
    if said is None or not said.reasoning_parser or said.reasoning_parser == own:
        return config
    if own:
        raise ConfigError(
            f"reasoning_parser is {own!r}, and reasoning_config.reasoning_parser is {said.reasoning_parser!r}",
            param="reasoning_config",
        )
    return replace(config, **{"structured_outputs_config.reasoning_parser": said.reasoning_parser})


def choose_harmony(asked: Asked, config: EngineConfig) -> EngineConfig:
    """gpt-oss answers in channels, whatever was asked; `identity` leaves its text as it is."""
    if config.model_config.facts.model_type != "gpt_oss" or config.structured_outputs_config.reasoning_parser:
        return config
    return replace(config, **{"structured_outputs_config.reasoning_parser": "openai_gptoss"})


STEPS: tuple[Step, ...] = (
    refuse,
    check_environment,
    choose_thinking,
    choose_device,
    find_model,
    find_tokenizer,
    read_model,
    choose_harmony,
    choose_storage,
    choose_dtype,
    choose_length,
    choose_sampling,
    choose_reuse,
    choose_batch,
    choose_queue,
    check_scheduler,
    choose_scheduling,
    choose_graphs,
    choose_cache,
    check_traces,
    finish,
)
