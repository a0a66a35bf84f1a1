"""From the user's options to the final configuration: ordered pure steps EngineConfig -> EngineConfig.

Each step is one function, named after what it decides; it logs a decision with its reason (INFO if it could surprise,
DEBUG if not) and raises ConfigError if the options are impossible. `requested` has the user's values (None: unset), to
tell a default from a choice. In: EngineArgs. Out: a resolved EngineConfig; nothing in it is measured.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from quire.base import env, native
from quire.base.log import logger
from quire.base.machine import cpu_flags, cpu_multiplies_bfloat16, find_gpu
from quire.base.plugins import call_plugins
from quire.checkpoint.facts import read_facts
from quire.checkpoint.media import OUTSIDE, PROMPT, names_parts
from quire.checkpoint.quantization import Quantization, add_quantization, agrees, has_fp8_cache, read_quantization
from quire.checkpoint.raw import apply_overrides, is_mistral, read_elsewhere, read_raw
from quire.checkpoint.source import holds_blocks, locate, stored_dtype
from quire.config import table
from quire.config.checks import (
    check_encoder_decoder,
    check_environment,
    check_media,
    check_memory_nodes,
    check_traces,
)
from quire.config.drafting import MODEL_METHODS, choose_drafts
from quire.config.engine import EngineConfig, replace
from quire.config.engines import check_engines
from quire.config.extras import LoRAConfig
from quire.config.graphs import choose_graphs
from quire.config.model import ModelConfig, served_names
from quire.config.outside import registered
from quire.config.pooling import choose_pooling_steps, choose_runner, limit_length
from quire.config.ranks import check_ranks, check_shares, divide_contexts, spread_experts
from quire.config.rounding import ONLINE, ONLINE_ONLY, head_form, online_form
from quire.config.sampling import choose_sampling
from quire.schema.errors import CheckpointError, ConfigError, InputError, ModelNotFoundError, NotBuiltError

log = logger(__name__)

Requested = Mapping[str, Any]
Step = Callable[[Requested, EngineConfig], EngineConfig]
USAGES = ("LLM_CLASS", "OPENAI_API_SERVER")
_QUEUED_REQUESTS, _QUEUED_TOKENS = 10_000, 4 << 20  # limits of a server's queue
GPU_BLOCK_SIZE = 64  # tokens: a key tile of the attention kernels is then one block
_UNKNOWN_LENGTH = 2048  # tokens, for a model whose configuration has no limit


def resolve(args: Any, usage_context: Any = None, headless: bool = False) -> EngineConfig:
    """Run every step in order."""
    call_plugins()
    return _resolved(dict(vars(args)), str(usage_context) if usage_context is not None else "", headless)


def _resolved(requested: Requested, usage: str = "", headless: bool = False) -> EngineConfig:
    changes = {"usage_context": usage.rpartition(".")[2], "parallel_config.is_headless": headless}
    config = replace(table.assemble(requested), **changes)
    for step in RENDER_STEPS if config.renders_only else STEPS:
        config = step(requested, config)
    return config


def refuse(requested: Requested, config: EngineConfig) -> EngineConfig:
    """The first step: options of missing features are refused by name, and hints for another engine are dropped."""
    table.refuse_unbuilt(config)
    plain: EngineConfig = table.without_hints(config)
    return plain


def choose_device(requested: Requested, config: EngineConfig) -> EngineConfig:
    """The requested device; else a GPU if there is one."""
    device: str = config.device_config.device
    if device == "auto":
        device, why = env.TARGET_DEVICE.get(), "QUIRE_TARGET_DEVICE"
        if not device:
            gpu = find_gpu()
            device = "cpu" if gpu is None else "cuda"
            why = "no usable GPU was found" if gpu is None else gpu.name or "an NVIDIA driver is present"
        log.info("device: %s (%s)", device, why)
    return replace(config, **{"device_config.device": device})


def find_model(requested: Requested, config: EngineConfig) -> EngineConfig:
    """Locate the files, and determine the served names."""
    model, files = config.model_config, config.load_config
    if requested.get("model") == "":  # most likely an unset shell variable, not a request for the embedded model
        raise ModelNotFoundError("model is '': name a folder, a .gguf file or a hub id, or omit it", param="model")
    names = served_names(requested.get("served_model_name"))
    parallel = config.parallel_config  # Ray may start an engine on this machine, which then finds this folder
    has_engines = parallel.data_parallel_size_local > 0 or parallel.data_parallel_backend == "ray"
    located = locate(
        model.model or None, model.revision, files.download_dir, model.hf_token, files.ignore_patterns,
        weights=not config.renders_only and has_engines,
    )  # fmt: skip
    if not model.model:
        log.info("No model was named: using the embedded %s", located.name)
    names = names or (model.served_model_name or located.name,)
    changes = {"path": located.path, "served_model_name": names[0], "served_model_names": names}
    if not model.model:
        changes["model"] = located.name
    return replace(config, model_config=replace(model, **changes))


def find_tokenizer(requested: Requested, config: EngineConfig) -> EngineConfig:
    """The model's files unless another tokenizer was named; a hub id is downloaded here."""
    model = config.model_config
    revision = model.tokenizer_revision or model.revision
    source = model.tokenizer or model.path
    if model.tokenizer and not os.path.exists(os.path.expanduser(model.tokenizer)):
        files = config.load_config
        where = partial(locate, weights=False, option="tokenizer")
        source = where(model.tokenizer, revision, files.download_dir, model.hf_token).path
    skip = model.skip_tokenizer_init or config.tokens_only
    source = os.path.expanduser(source)
    model = replace(model, tokenizer=source, tokenizer_revision=revision, skip_tokenizer_init=skip)
    return replace(config, model_config=model)


def read_model(requested: Requested, config: EngineConfig) -> EngineConfig:
    """The raw configuration with the user's overrides, and the facts read from it."""
    model, files = config.model_config, config.load_config
    if model.hf_config_path is None:
        raw = add_quantization(read_raw(model.path, model.config_format), model.path)
    else:
        raw = read_elsewhere(model.hf_config_path, model.revision, files.download_dir, model.hf_token)
    raw = apply_overrides(raw, requested.get("hf_overrides"))
    parts: dict[str, str] = {}
    if names_parts(raw):
        from quire.checkpoint.parts import find_parts  # lazy

        raw, parts = find_parts(raw, model.path, partial(_find_part, config))
    if "speculators_config" in raw and "transformer_layer_config" in raw:
        return _read_verifier(requested, config, raw)
    facts = read_facts(raw)
    if not facts.architectures:
        raise CheckpointError(f"the configuration of {model.model!r} names no architecture")
    classes = registered(model.model_class_overrides)
    ours = {name: classes[name] for name in facts.architectures if name in classes}
    if not ours and not model.trust_remote_code and not OUTSIDE.isdisjoint(facts.architectures):
        raise NotBuiltError(
            f"{facts.architectures[0]} is not in this version of Quire: it takes media through code of its own "
            "repository, and transformers has no class for it",
            param="model",
        )
    changes = {"hf_config": raw, "facts": facts, "part_paths": parts, "model_class_overrides": ours}
    return replace(config, model_config=replace(model, **changes))


def _find_part(config: EngineConfig, source: str) -> str:
    """Where the files of another checkpoint are, which holds a part of the model."""
    model, files = config.model_config, config.load_config
    weights = not config.renders_only and files.load_format != "dummy"
    return locate(source, None, files.download_dir, model.hf_token, files.ignore_patterns, weights=weights).path


def _read_verifier(requested: Requested, config: EngineConfig, raw: dict[str, Any]) -> EngineConfig:
    """A drafter that names the model it drafts for: that model is read, and the drafter drafts."""
    from quire.config.drafter import follow_speculators  # lazy

    model = follow_speculators(raw, config)
    named = {**requested, "model": model.model_config.model}
    if requested.get("tokenizer") is None:
        model = replace(model, **{"model_config.tokenizer": ""})
    return read_model(named, find_tokenizer(named, find_model(named, model)))


def choose_storage(requested: Requested, config: EngineConfig) -> EngineConfig:
    """How weights are stored: as the checkpoint declares, which the options must not contradict."""
    is_gguf = config.model_config.path.endswith(".gguf")
    coded = None if is_gguf else read_quantization(config.model_config.hf_config)
    config = _choose_strategy(config, coded)
    model, files = config.model_config, config.load_config
    stored = "gguf" if is_gguf else "" if coded is None else coded.name
    name = model.quantization
    if name in ONLINE and (name in ONLINE_ONLY or not stored):
        return _choose_online(config, stored)
    if model.quantization_config:
        raise ConfigError(
            f"quantization_config is about rounding at load, which quantization={name!r} is not; "
            f"{', '.join(ONLINE)} of an unquantized checkpoint are",
            param="quantization_config",
        )
    if name is not None and name != stored and not (coded is not None and agrees(name, coded)):
        what = f"is stored as {stored}" if stored else "is not quantized"
        raise ConfigError(f"quantization={name!r}, but the checkpoint {what}", param="quantization")
    form = files.load_format
    if form == "auto" and (is_gguf or is_mistral(model.path, model.config_format)):
        form = "gguf" if is_gguf else "mistral"
    check_loader(files.load_format, files.model_loader_extra_config)
    if is_gguf != (form == "gguf") and form != "dummy":
        raise ConfigError(
            f"load_format={form!r} does not match {model.path}: it is {'a' if is_gguf else 'not a'} GGUF file",
            param="load_format",
        )
    weights = "plain"
    if coded is not None or (is_gguf and config.device_config.device != "cpu" and holds_blocks(model.path)):
        weights = _coded_form(requested, config, stored)
    changes = {"model_config.quantization": stored or None, "model_config.weight_form": weights}
    return replace(config, **changes, **{"load_config.load_format": form})


def _choose_strategy(config: EngineConfig, coded: Quantization | None) -> EngineConfig:
    """torchao's tensors are read as all others are."""
    if config.load_config.safetensors_load_strategy != "torchao":
        return config
    if coded is None or coded.family != "torchao":
        what = "is not quantized" if coded is None else f"is stored as {coded.name}"
        raise ConfigError(
            f"safetensors_load_strategy='torchao' needs a checkpoint of torchao, but this one {what}",
            param="safetensors_load_strategy",
        )
    return replace(config, **{"load_config.safetensors_load_strategy": None})


def _coded_form(requested: Requested, config: EngineConfig, stored: str) -> str:
    """Codes where kernels multiply them; decoded weights for exact float32."""
    model, form = config.model_config, config.load_config.load_format
    if config.device_config.device != "cpu":
        if form == "sharded_state":
            return "plain"
    elif native.library() is None or form in ("dummy", "sharded_state"):
        return "plain"
    if model.dtype == "float32" and requested.get("quantization") is None:
        log.info("dtype: float32, %s weights are decoded while loading (quantization=%s keeps them)", *[stored] * 2)
        return "plain"
    return "stored"


def check_loader(load_format: str, extra: Mapping[str, Any]) -> None:
    """Refuse keys of model_loader_extra_config that the loader does not know."""
    known = ("pattern",) if load_format == "sharded_state" else ()
    if unknown := [str(key) for key in extra if key not in known]:
        raise NotBuiltError(
            f"model_loader_extra_config: {', '.join(unknown)} is unknown to load_format={load_format!r}"
            + (f", which takes {', '.join(known)}" if known else ""),
            param="model_loader_extra_config",
        )


def _choose_online(config: EngineConfig, stored: str) -> EngineConfig:
    """Weights quantized to blocks of 8 or 4 bits while they are loaded."""
    model, on_cpu = config.model_config, config.device_config.device == "cpu"
    lacks = f"an unquantized checkpoint, but this one is stored as {stored}" if stored else ""
    if not stored and on_cpu and native.library() is None:
        lacks = f"the compiled CPU kernels: {native.why_not()}"
    elif not stored and not on_cpu and model.dtype == "float32":
        lacks = "16 bits on a GPU, got dtype='float32'"
    if lacks:
        raise ConfigError(f"quantization={model.quantization!r} needs {lacks}", param="quantization")
    form = online_form(str(model.quantization), model.hf_config)
    form = "int8" if on_cpu and form == "fp8" else form
    if on_cpu and model.quantization not in ("int8_wo", "int4_wo"):
        log.info("quantization=%s: on this CPU, weights are rounded to blocks of %s", model.quantization, form)
    head = head_form(str(model.quantization), model.quantization_config)
    if on_cpu and model.quantization_config and not head:
        raise ConfigError(
            "quantization_config={'lm_head': None}: on a CPU the output matrix is rounded too",
            param="quantization_config",
        )
    return replace(config, **{"model_config.weight_form": form, "model_config.head_form": head})


def choose_dtype(requested: Requested, config: EngineConfig) -> EngineConfig:
    """auto: the checkpoint's dtype, if the device is fast at it."""
    model = config.model_config
    on_gpu = config.device_config.device == "cuda"
    if model.dtype != "auto":
        if model.dtype == "float16" and not on_gpu:
            log.info("dtype: float16 as requested; it is slow on CPUs, bfloat16 and float32 are faster")
        if requested.get("quantization") == "gguf" and not on_gpu:
            return replace(config, **{"model_config.weight_form": "stored"})
        return config
    if on_gpu:
        return replace(config, **{"model_config.dtype": _gpu_dtype(config)})
    if model.path.endswith(".gguf"):
        return _gguf_on_cpu(config)
    saved = _saved_dtype(config)
    dtype = "bfloat16" if saved in ("bfloat16", "float16") else "float32"
    if saved == "float16":
        log.info("dtype: bfloat16 (the checkpoint is float16, which is slow on CPUs; dtype=float16 forces it)")
    elif saved != dtype:
        log.warning("dtype: %s (the checkpoint says %s, which is not a supported compute dtype)", dtype, saved)
    else:
        log.debug("dtype: %s, as saved", dtype)
    return replace(config, **{"model_config.dtype": dtype})


def _gguf_on_cpu(config: EngineConfig) -> EngineConfig:
    """Blocks are multiplied as stored, with float32 activations; plain weights in the dtype this CPU is fastest at."""
    if native.library() is not None and holds_blocks(config.model_config.path):
        log.info("dtype: float32, weights as the GGUF file stores them (dtype=float32 decodes them)")
        return replace(config, **{"model_config.dtype": "float32", "model_config.weight_form": "stored"})
    has_units = cpu_multiplies_bfloat16()
    dtype = "bfloat16" if has_units else "float32"
    log.info("dtype: %s (GGUF; this CPU has %sinstructions for bfloat16)", dtype, "" if has_units else "no ")
    return replace(config, **{"model_config.dtype": dtype})


def _saved_dtype(config: EngineConfig) -> str:
    model = config.model_config
    return model.facts.dtype or stored_dtype(model.path) or ("float16" if model.facts.quantization else "float32")


def _gpu_dtype(config: EngineConfig) -> str:
    """float16 for float32 and float16 checkpoints, bfloat16 for bfloat16 ones (and for GGUF, which has neither)."""
    saved = "bfloat16" if config.model_config.path.endswith(".gguf") else _saved_dtype(config)
    dtype = "bfloat16" if saved == "bfloat16" else "float16"
    if saved not in ("float16", "bfloat16"):
        log.info("dtype: float16 (the checkpoint is %s; dtype=float32 forces float32)", saved)
    return dtype


def configure_drafter(requested: Requested, config: EngineConfig) -> EngineConfig:
    """A draft model's own configuration, resolved as if it were run by itself."""
    speculative = config.speculative_config
    if speculative is None or speculative.method not in MODEL_METHODS:
        return config
    from quire.config.drafter import draft_options, with_drafter  # lazy

    try:
        drafter = _resolved(draft_options(requested, config))
    except InputError as wrong:
        place = "speculative_config"
        raise type(wrong)(f"{place}: draft model {speculative.model!r}: {wrong}", param=place) from None
    return with_drafter(config, drafter)


def choose_length(requested: Requested, config: EngineConfig) -> EngineConfig:
    """max_model_len: the model's limit, or less."""
    model = config.model_config
    requested_len = None if requested.get("max_model_len") is None else model.max_model_len
    limit = model.facts.max_positions
    if not limit:
        log.warning("the configuration has no context length; assuming %d tokens", _UNKNOWN_LENGTH)
        limit = max(_UNKNOWN_LENGTH, requested_len or 0)
    window = model.facts.sliding_window
    if model.disable_sliding_window and 0 < window < limit:
        log.info("max_model_len: at most %d, the model's window (disable_sliding_window)", window)
        limit = window
    if requested_len is None or requested_len == -1:
        length = limit
        why = "the model's limit" if requested_len is None else "or less, depending on memory"
        log.info("max_model_len: %d (%s)", length, why)
    else:
        length = _checked_length(requested_len, limit)
    return replace(config, model_config=replace(model, max_model_len=length, original_max_model_len=requested_len))


def _checked_length(length: int, limit: int) -> int:
    if length < 2:
        raise ConfigError(
            f"max_model_len must be at least 2 (one token in, one out), or -1 for auto; got {length}",
            param="max_model_len",
            value=length,
        )
    if length <= limit:
        return length
    if env.ALLOW_LONG_MAX_MODEL_LEN.get():
        log.warning("max_model_len: %d although the model's limit is %d; answers may be nonsense", length, limit)
        return length
    raise ConfigError(
        f"max_model_len={length} is more than the model's limit of {limit} tokens; lower it, or set "
        "QUIRE_ALLOW_LONG_MAX_MODEL_LEN=1 if you know that the model supports more",
        param="max_model_len",
        value=length,
    )


def choose_reuse(requested: Requested, config: EngineConfig) -> EngineConfig:
    """Chunked prefill and prefix caching: on. With recurrent states, prefix caching costs memory: only on request."""
    has_states, cache = config.model_config.facts.has_states, config.cache_config
    if config.model_config.facts.both_ways == PROMPT:
        return _without_reuse(requested, config)
    changes: dict[str, Any] = {}
    if requested.get("enable_chunked_prefill") is None:
        changes["scheduler_config.enable_chunked_prefill"] = True
    caching = requested.get("enable_prefix_caching")
    if caching is None:
        caching = not has_states or cache.mamba_cache_mode != "none"
        changes["cache_config.enable_prefix_caching"] = caching
        if not caching:
            log.info("enable_prefix_caching: off (some layers have recurrent states; True would save them)")
    if has_states and caching and cache.mamba_cache_mode == "none":
        changes["cache_config.mamba_cache_mode"] = "align"
        log.info("mamba_cache_mode: align (prefix caching is on: states are saved at block ends)")
    if cache.mamba_block_size is not None and not caching:
        raise ConfigError(
            f"mamba_block_size={cache.mamba_block_size} sets where states are saved for reuse, which needs "
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


def _without_reuse(requested: Requested, config: EngineConfig) -> EngineConfig:
    """Every token of a prompt reads all others: prompts are computed whole, and none begins with another's keys."""
    if not config.model_config.takes_encoder:
        raise NotBuiltError(
            "language_model_only, or a limit_mm_per_prompt of 0 for all media, is not built for a model whose prompts "
            "attend to themselves in both directions",
            param="language_model_only",
        )
    for name in ("enable_chunked_prefill", "enable_prefix_caching"):
        if requested.get(name):
            log.warning("%s: off (every token of a prompt reads all others)", name)
    off = {"scheduler_config.enable_chunked_prefill": False, "cache_config.enable_prefix_caching": False}
    return replace(config, **off)


def gpu_batch_defaults(name: str, total_bytes: int) -> tuple[dict[str, int], int]:
    """Tokens of a step by usage context, and requests that run at once, on a GPU of this name and memory."""
    is_large = total_bytes >= 70 << 30 and "a100" not in name.lower()
    most_tokens = (16384, 8192) if is_large else (8192, 2048)
    return dict(zip(USAGES, most_tokens, strict=True)), 1024 if is_large else 256


def batch_defaults(world_size: int, device: str = "cpu") -> tuple[dict[str, int], dict[str, int]]:
    """(tokens, requests) of a step, by usage context."""
    if device == "cuda":
        gpu = find_gpu()
        by_tokens, most = gpu_batch_defaults("" if gpu is None else gpu.name, 0 if gpu is None else gpu.total_bytes)
        return by_tokens, dict.fromkeys(USAGES, most)
    tokens = {"LLM_CLASS": 4096 * world_size, "OPENAI_API_SERVER": 2048 * world_size}
    requests = {"LLM_CLASS": 256 * world_size, "OPENAI_API_SERVER": 128 * world_size}
    return tokens, requests


# Of a server: on a GPU about two decode steps of a large model; on a CPU what a reader of a stream tolerates.
LATENCY_GOALS_MS = {"cuda": 12.0, "cpu": 500.0}


def choose_batch(requested: Requested, config: EngineConfig) -> EngineConfig:
    """The size of a step: by usage, then adjusted so that both limits are consistent with the context length."""
    scheduler, length = config.scheduler_config, config.model_config.max_model_len
    by_tokens, by_requests = batch_defaults(config.parallel_config.world_size, config.device_config.device)
    tokens, requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    if requested.get("max_num_seqs") is None:
        requests = by_requests.get(config.usage_context, scheduler.DEFAULT_MAX_NUM_SEQS)
    if requested.get("max_num_batched_tokens") is None:
        tokens = by_tokens.get(config.usage_context, scheduler.DEFAULT_MAX_NUM_BATCHED_TOKENS)
        if not scheduler.enable_chunked_prefill:
            tokens = max(tokens, length)
        tokens = max(min(tokens, requests * length), requests if requested.get("max_num_seqs") else 1)
    if requested.get("max_num_seqs") is None:
        requests = min(requests, tokens)
    log.debug("a step has at most %d tokens of %d requests", tokens, requests)
    goal = scheduler.inter_token_latency_goal_ms
    if requested.get("inter_token_latency_goal_ms") is None:
        is_server = config.usage_context == "OPENAI_API_SERVER"
        goal = LATENCY_GOALS_MS.get(config.device_config.device, 0.0) if is_server else 0.0
    return replace(
        config,
        scheduler_config=replace(
            scheduler, max_num_batched_tokens=tokens, max_num_seqs=requests, inter_token_latency_goal_ms=goal
        ),
    )


def choose_queue(requested: Requested, config: EngineConfig) -> EngineConfig:
    """Limits of the queue: a server refuses early rather than let its queue grow without bound."""
    if config.usage_context != "OPENAI_API_SERVER":
        return config
    scheduler, length = config.scheduler_config, config.model_config.max_model_len
    changes: dict[str, Any] = {}
    if scheduler.max_num_queued_reqs is None:
        changes["max_num_queued_reqs"] = _QUEUED_REQUESTS
    if scheduler.max_num_queued_tokens is None:
        changes["max_num_queued_tokens"] = max(_QUEUED_TOKENS, 8 * length)
    return replace(config, scheduler_config=replace(scheduler, **changes))


def check_scheduler(requested: Requested, config: EngineConfig) -> EngineConfig:
    """Limits that contradict each other are errors."""
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


def choose_scheduling(requested: Requested, config: EngineConfig) -> EngineConfig:
    """Planning ahead pays off if the device computes while the host plans; on CPU both share the cores. Stages of a
    pipeline need several plans at once in any case, no request in two of them."""
    if (stages := config.parallel_config.pipeline_parallel_size) > 1:
        if requested.get("async_scheduling"):
            log.info("async_scheduling: %d pipeline stages have as many steps under way, and no more", stages)
        return replace(config, **{"scheduler_config.async_scheduling": False})
    if requested.get("async_scheduling") is not None or config.model_config.is_pooling:
        return config
    is_on = config.device_config.device == "cuda"
    log.debug("async_scheduling: %s", "on (a GPU)" if is_on else "off (on CPU planning and computing share the cores)")
    return replace(config, **{"scheduler_config.async_scheduling": is_on})


def choose_cache(requested: Requested, config: EngineConfig) -> EngineConfig:
    """The precision of the KV cache, and fields copied from the model."""
    facts, chosen = config.model_config.facts, config.cache_config.cache_dtype
    cache_dtype = _cache_dtype(config) if chosen == "auto" else None
    _check_cache_dtype(config, cache_dtype or chosen)
    changes: dict[str, Any] = {
        "sliding_window": facts.sliding_window if facts.all_windowed else None,
        "user_specified_block_size": requested.get("block_size") is not None,
    }
    if requested.get("block_size") is None and config.device_config.device == "cuda":
        changes["block_size"] = GPU_BLOCK_SIZE
        log.debug("block_size: %d (the size of a key tile)", GPU_BLOCK_SIZE)
    if cache_dtype is not None:
        changes["cache_dtype"] = cache_dtype
    return replace(config, cache_config=replace(config.cache_config, **changes))


def _check_cache_dtype(config: EngineConfig, chosen: str) -> None:
    """ConfigError: this device has no such cache. Logs what a user should know of an 8-bit one."""
    on_cpu, model_dtype = config.device_config.device == "cpu", config.model_config.dtype
    if chosen in ("bfloat16", "float16") and not on_cpu and chosen != model_dtype:
        raise NotBuiltError(
            f"kv_cache_dtype={chosen!r} is built for device=cpu only in this version; on a GPU keys and values are "
            f"stored as the model computes them ({model_dtype}), in fp8, or as int8_per_token_head",
            param="kv_cache_dtype",
        )
    if chosen == "int8_per_token_head" and on_cpu and native.library() is None:
        raise ConfigError(
            f"kv_cache_dtype={chosen!r} needs the compiled CPU kernels: {native.why_not()}", param="kv_cache_dtype"
        )
    if chosen.startswith("fp8"):
        if config.cache_config.calculate_kv_scales and config.model_config.is_pooling:
            raise NotBuiltError(
                "calculate_kv_scales is not built for pooling models; scales of the checkpoint or 1.0 are",
                param="calculate_kv_scales",
            )
        if on_cpu:
            log.warning(
                "kv_cache_dtype=%s on a CPU is computed by torch, not by the compiled kernels; int8_per_token_head "
                "takes about the same memory and is faster", chosen,
            )  # fmt: skip
        else:
            log.info("kv_cache_dtype: %s, which holds twice as many tokens as 16 bits, with less precision", chosen)
    elif config.cache_config.calculate_kv_scales:
        log.warning("calculate_kv_scales has no effect with kv_cache_dtype=%s: only fp8 has scales per layer", chosen)


def _cache_dtype(config: EngineConfig) -> str:
    """The model's; but 16 bits with quantized blocks, where float32 keys and values would add no precision; and on a
    GPU fp8 where the checkpoint says so."""
    model = config.model_config
    on_gpu = config.device_config.device == "cuda"
    if has_fp8_cache(model.hf_config):
        if on_gpu:
            log.info("kv_cache_dtype: fp8, as the checkpoint's configuration says; bfloat16 keeps 16 bits")
            return "fp8"
        log.info("the checkpoint is calibrated for an fp8 KV cache; on a CPU auto keeps more bits")
    if on_gpu or model.weight_form != "stored" or model.dtype != "float32" or native.library() is None:
        return model.dtype
    by_tiles = "amx_bf16" in cpu_flags() and env.CPU_KERNELS.get() in ("auto", "amx")
    return "bfloat16" if by_tiles else "float16"  # tiled attention supports bfloat16 only


def finish(requested: Requested, config: EngineConfig) -> EngineConfig:
    """An id for this run, and fields copied from the model."""
    model = config.model_config
    quantized = model.hf_config.get("quantization_config")
    return replace(
        config,
        instance_id=f"{time.time_ns():x}",
        quant_config=quantized if isinstance(quantized, dict) else None,
        **{"parallel_config.is_moe_model": model.facts.num_experts > 0},
    )


def choose_thinking(requested: Requested, config: EngineConfig) -> EngineConfig:
    """The reasoning parser has two options; either is enough, and both must agree."""
    marks, parser = config.reasoning_config, config.structured_outputs_config.reasoning_parser
    if marks is None:
        return config
    if not (marks.reasoning_parser or parser or (marks.reasoning_start_str and marks.reasoning_end_str)):
        raise ConfigError(
            "reasoning_config needs reasoning_parser, or both reasoning_start_str and reasoning_end_str",
            param="reasoning_config",
        )
    if not marks.reasoning_parser or marks.reasoning_parser == parser:
        return config
    if parser:
        raise ConfigError(
            f"reasoning_parser is {parser!r}, and reasoning_config.reasoning_parser is {marks.reasoning_parser!r}",
            param="reasoning_config",
        )
    return replace(config, **{"structured_outputs_config.reasoning_parser": marks.reasoning_parser})


def choose_harmony(requested: Requested, config: EngineConfig) -> EngineConfig:
    """gpt-oss always answers in channels; the parser `identity` leaves its text unparsed."""
    if config.model_config.facts.model_type != "gpt_oss" or config.structured_outputs_config.reasoning_parser:
        return config
    return replace(config, **{"structured_outputs_config.reasoning_parser": "openai_gptoss"})


def choose_adapters(requested: Requested, config: EngineConfig) -> EngineConfig:
    """Without enable_lora there is no LoRAConfig, whatever else was set."""
    if not config.enable_lora:
        return replace(config, lora_config=None)
    lora = config.lora_config or LoRAConfig()
    most: int = lora.max_loras if lora.max_cpu_loras is None or lora.max_cpu_loras < 1 else lora.max_cpu_loras
    if most < lora.max_loras:
        raise ConfigError(
            f"max_cpu_loras={most} is less than max_loras={lora.max_loras}", param="max_cpu_loras", value=most
        )
    if config.model_config.model_impl == "transformers":
        raise NotBuiltError("enable_lora: transformers' own classes take no adapters", param="enable_lora")
    if config.model_config.is_pooling and config.device_config.device == "cuda":
        raise NotBuiltError(
            "enable_lora: on a GPU, pooling models take no adapters in this version", param="enable_lora"
        )
    _check_media_adapters(config.model_config, lora.default_mm_loras or {})
    if lora.fully_sharded_loras and config.parallel_config.tensor_parallel_size == 1:
        log.info("fully_sharded_loras has no effect: with tensor_parallel_size 1 every rank has all of its adapters")
    dtype = lora.lora_dtype
    if dtype == "auto" and requested.get("dtype") in (None, "auto") and _multiplies_codes(config):
        log.info("lora_dtype: bfloat16 (the model's weights have fewer bits; lora_dtype=float32 forces float32)")
        dtype = "bfloat16"
    return replace(config, lora_config=replace(lora, max_cpu_loras=most, lora_dtype=dtype))


def _multiplies_codes(config: EngineConfig) -> bool:
    """With inputs in float32, on CPU: what is read beside the weights is several times their size if it is float32."""
    model = config.model_config
    on_gpu = config.device_config.device == "cuda"
    return not on_gpu and model.weight_form in ("stored", "int8", "int4") and model.dtype == "float32"


def _check_media_adapters(model: ModelConfig, folders: Mapping[str, str]) -> None:
    taken = tuple(model.facts.modalities) if model.takes_encoder and not model.is_pooling else ()
    for kind, folder in folders.items():
        if not taken:
            reason = "this model takes no media"
        elif kind not in taken:
            reason = f"this model takes {', '.join(taken)}"
        elif not folder:
            reason = "the folder is empty"
        else:
            continue
        raise ConfigError(
            f"default_mm_loras names an adapter for {kind!r}: {reason}", param="default_mm_loras", value=kind
        )


STEPS: tuple[Step, ...] = (
    refuse,
    check_environment,
    check_memory_nodes,
    choose_thinking,
    choose_device,
    check_ranks,
    check_engines,
    find_model,
    find_tokenizer,
    read_model,
    check_shares,
    choose_runner,
    choose_harmony,
    choose_storage,
    choose_dtype,
    choose_adapters,
    choose_drafts,
    configure_drafter,
    check_encoder_decoder,
    check_media,
    choose_length,
    limit_length,
    choose_sampling,
    choose_reuse,
    choose_pooling_steps,
    choose_batch,
    choose_queue,
    check_scheduler,
    choose_scheduling,
    choose_graphs,
    choose_cache,
    divide_contexts,
    spread_experts,
    check_traces,
    finish,
)

_OF_THE_ENGINE = (
    check_memory_nodes, check_ranks, check_engines, check_shares, choose_drafts, configure_drafter,
    check_encoder_decoder, choose_pooling_steps, choose_device, choose_storage, choose_dtype, choose_batch,
    choose_queue, check_scheduler, choose_scheduling, choose_graphs, choose_cache, divide_contexts, spread_experts,
)  # fmt: skip
# For a server without an engine: a checkpoint that cannot run here can be rendered for.
RENDER_STEPS = tuple(step for step in STEPS if step not in _OF_THE_ENGINE)
