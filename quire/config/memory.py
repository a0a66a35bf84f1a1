"""Memory: weights on disk (LoadConfig), the KV cache (CacheConfig), and offloading and transfer of both.

Declarations only (see option.py); values are resolved in resolve.py.
"""

import dataclasses
from typing import Any, ClassVar, Literal

from quire.config.model import dtype_name, lower
from quire.config.option import LATER, Group, group, option
from quire.config.unavailable import reason

MambaDtype = Literal["auto", "bfloat16", "float16", "float32"]


@group
class CacheConfig(Group):
    """The KV cache: its size, its precision and the reuse of prefixes."""

    DEFAULT_BLOCK_SIZE: ClassVar[int] = 16

    block_size: int = option(16, "Tokens per KV block; unset is 16, on a GPU 64.", unset=None, low=1)
    gpu_memory_utilization: float = option(
        0.92,
        "Share of a GPU's memory this engine may use; on CPU set kv_cache_memory_bytes or QUIRE_CPU_KVCACHE_SPACE.",
        flags=("--device-memory-utilization",), above=0, high=1,
    )  # fmt: skip
    cache_dtype: str = option(
        "auto",
        "Precision of cached keys and values; auto is the model's, 16 bits if GGUF blocks are used as stored, or fp8 "
        "on a GPU if the checkpoint was calibrated for it. fp8 (fp8_e4m3) and fp8_e5m2 have scales per layer, "
        "int8_per_token_head one for each token and head. On CPU also another 16-bit type.",
        LATER,
        ready=("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head"),
        why="auto, bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2 and int8_per_token_head are built",
        name="kv_cache_dtype",
        choices=(
            "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
            "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "nvfp4", "nvfp4_4over6",
            "nvfp4_ds_mla", "turboquant_3bit_nc", "turboquant_4bit_nc", "turboquant_k3v4_nc",
        ),
        take=dtype_name,
    )  # fmt: skip
    calculate_kv_scales: bool = option(
        False, "With an fp8 cache: measure the scales in the first step instead of taking the checkpoint's or 1.0."
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes for the KV cache; replaces gpu_memory_utilization.", low=1, human=True
    )
    num_gpu_blocks_override: int | None = option(None, "Exact number of KV blocks.", low=1)
    enable_prefix_caching: bool = option(
        True, "Reuse the KV of shared prefixes; unset is on if the model allows it.", unset=None
    )
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "blake2b", "xxhash", "xxhash_cbor"] = option(
        "sha256",
        "Hash of prefix blocks; the xxhash variants are faster, but not safe between mutually untrusted users.",
    )
    mamba_block_size: int | None = option(
        None,
        "Tokens between saved states; needs prefix caching, and is rounded up to a multiple of the block size.",
        low=1,
    )
    mamba_cache_dtype: MambaDtype = option(
        "auto", "Precision of recurrent states; auto is the model's for convolution inputs, float32 for the rest."
    )
    mamba_ssm_cache_dtype: MambaDtype = option(
        "auto", "Precision of the state-space part alone; auto is mamba_cache_dtype, then float32."
    )
    mamba_cache_mode: Literal["none", "all", "align"] = option(
        "none",
        "Which states a prefix hit may use: none, or those at block ends (all and align; on with prefix caching).",
    )
    # results
    is_attention_free: bool = False
    sliding_window: int | None = None  # set when every layer has the same window
    user_specified_block_size: bool = False
    num_gpu_blocks: int | None = None  # from here on: of an engine that runs; see `measured`
    num_cpu_blocks: int | None = None  # nothing is swapped out
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None  # requests of max_model_len tokens that fit at once

    def measured(self, num_blocks: int, max_concurrency: float, max_model_len: int) -> "CacheConfig":
        """The same with what an engine found when it started."""
        return dataclasses.replace(
            self,
            num_gpu_blocks=num_blocks,
            kv_cache_size_tokens=int(max_concurrency * max_model_len),
            kv_cache_max_concurrency=max_concurrency,
        )


@group
class LoadConfig(Group):
    """How weights are read."""

    load_format: str = option(
        "auto",
        "Format of the weight files; auto takes safetensors, then .bin and .pt, and gguf for a .gguf file. mistral is "
        "consolidated*.safetensors, sharded_state the output of save_sharded_state.",
        LATER,
        choices=(
            "auto", "pt", "safetensors", "gguf", "dummy", "npcache", "mistral", "bitsandbytes", "sharded_state",
            "tensorizer", "runai_streamer", "runai_streamer_sharded", "instanttensor", "modelexpress",
        ),
        ready=("safetensors", "pt", "gguf", "dummy", "mistral", "sharded_state"),
        take=lower,
    )  # fmt: skip
    download_dir: str | None = option(None, "Folder for downloads; unset is the hub's own cache.")
    safetensors_load_strategy: Literal["lazy", "eager", "prefetch", "torchao"] | None = option(
        None, "lazy maps files into memory, eager reads them completely; torchao is lazy, for checkpoints of torchao.",
        hints=("prefetch",), why=reason("mapped"),
    )  # fmt: skip
    model_loader_extra_config: dict[str, Any] = option(
        {}, "Options of a particular loader: with sharded_state, pattern is the template of the file names."
    )
    ignore_patterns: tuple[str, ...] = option(
        ("original/**/*",), "Files left out of a download.", accepts=tuple[str, ...],
        take=lambda value: (value,) if isinstance(value, str) else value,
    )  # fmt: skip
    use_tqdm_on_load: bool = option(True, "A progress bar while loading.")
    pt_load_map_location: str | dict[str, str] = option("cpu", "Device that .bin and .pt tensors are loaded to.")


@group
class UVAOffloadConfig(Group):
    """Weights in host memory that the device reads directly."""


@group
class PrefetchOffloadConfig(Group):
    """Layers in host memory that are fetched ahead of use."""


@group
class OffloadConfig(Group):
    """Part of the weights in host memory."""

    uva: UVAOffloadConfig = option(UVAOffloadConfig, "Direct access.", flat=False)
    prefetch: PrefetchOffloadConfig = option(PrefetchOffloadConfig, "Fetching ahead.", flat=False)


@group
class KVTransferConfig(Group):
    """Transfer of KV from or to another engine."""


@group
class KVEventsConfig(Group):
    """Events about which blocks are cached."""

    enable_kv_cache_events: bool = option(False, "Publish stored and removed blocks.", flat=False)
    publisher: Literal["null", "zmq"] | None = option(
        None, "Publisher; unset follows enable_kv_cache_events.", flat=False
    )
    endpoint: str = option("tcp://*:5557", "Where events are published.", flat=False)
    replay_endpoint: str | None = option(None, "Where missed events can be requested.", flat=False)
    buffer_steps: int = option(10000, "Steps kept for replay.", flat=False, low=1)
    hwm: int = option(100000, "Messages a socket holds before it drops.", flat=False, low=1)
    max_queue_size: int = option(100000, "Events waiting to be published.", flat=False, low=1)
    topic: str = option("", "Topic of the messages.", flat=False)

    @property
    def publishes(self) -> bool:
        """An unset publisher follows enable_kv_cache_events."""
        return self.enable_kv_cache_events and self.publisher != "null"


@group
class ECTransferConfig(Group):
    """Transfer of encoder outputs from or to another engine."""


@group
class WeightTransferConfig(Group):
    """New weights from a trainer while the engine runs."""
