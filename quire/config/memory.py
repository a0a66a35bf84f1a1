"""Where bytes lie: weights on disk (LoadConfig), KV in memory (CacheConfig), and what may live elsewhere.

Declarations only (option.py says what they mean); values are decided in resolve.py.
"""

from typing import Any, ClassVar, Literal

from quire.config.model import dtype_name, lower
from quire.config.option import INERT, LATER, Group, group, option
from quire.config.reasons import OWN_REUSE

MambaDtype = Literal["auto", "bfloat16", "float16", "float32"]


@group
class CacheConfig(Group):
    """The KV cache: its size, its precision and the reuse of prefixes."""

    DEFAULT_BLOCK_SIZE: ClassVar[int] = 16

    block_size: int = option(16, "Tokens per KV block; unset is 16, on a GPU 64.", asked=None, low=1)
    hash_block_size: int | None = option(
        None, "Prefix keys finer than a block.", INERT, flat=False, low=1, why=OWN_REUSE
    )
    gpu_memory_utilization: float = option(
        0.92,
        "Share of a GPU's memory this engine may use; on CPU set kv_cache_memory_bytes or QUIRE_CPU_KVCACHE_SPACE.",
        flags=("--device-memory-utilization",),
        above=0,
        high=1,
    )
    cache_dtype: str = option(
        "auto",
        "Precision of cached keys and values; auto is the model's, or 16 bits where blocks of a GGUF file are "
        "multiplied as stored. On CPU also another 16-bit type, or bytes with a scale for each token and head.",
        LATER,
        ready=("auto", "bfloat16", "float16", "int8_per_token_head"),
        why="auto, bfloat16, float16 and int8_per_token_head (the last on CPU) are built",
        name="kv_cache_dtype",
        choices=(
            "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
            "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "nvfp4", "nvfp4_4over6",
            "nvfp4_ds_mla", "turboquant_3bit_nc", "turboquant_4bit_nc", "turboquant_k3v4_nc",
        ),
        take=dtype_name,
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes for the KV cache; replaces gpu_memory_utilization.", low=1, human=True
    )
    num_gpu_blocks_override: int | None = option(None, "Exact number of KV blocks.", low=1)
    enable_prefix_caching: bool = option(
        True, "Reuse the KV of shared prefixes; unset is on where the model allows it.", asked=None
    )
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "blake2b", "xxhash", "xxhash_cbor"] = option(
        "sha256", "Hash of prefix blocks; the xxhash forms are fast and not for mutually distrusting users."
    )
    prefix_cache_retention_interval: int = option(
        0, "Steps an unused prefix is kept at least.", INERT, low=0, why=OWN_REUSE
    )
    prefix_match_unit: int | None = option(None, "Tokens per step of a prefix match.", INERT, low=1, why=OWN_REUSE)
    calculate_kv_scales: bool = option(False, "Measure fp8 scales while running.", LATER)
    kv_cache_dtype_skip_layers: tuple[str, ...] = option((), "Layers whose KV stays unquantized.", LATER)
    kv_sharing_fast_prefill: bool = option(
        False, "Skip the prompt in layers that share KV.", INERT, why="prompts are computed in every layer"
    )
    swa_bounded_replay: bool = option(True, "Recompute no more than a window after a hit.", INERT, why=OWN_REUSE)
    mamba_block_size: int | None = option(
        None, "Tokens between saved states; needs prefix caching, and is rounded up to whole attention blocks.", low=1
    )
    mamba_cache_dtype: MambaDtype = option(
        "auto", "Precision of recurrent states; auto is the model's for windows of inputs, float32 for the rest."
    )
    mamba_ssm_cache_dtype: MambaDtype = option(
        "auto", "Precision of the state-space part alone; auto is mamba_cache_dtype, then float32."
    )
    mamba_cache_mode: Literal["none", "all", "align"] = option(
        "none",
        "Which states a prefix hit may use: none, or those at block ends (all and align; on with prefix caching).",
    )
    enable_mamba_shared_prefix_checkpoint: bool = option(False, "Save states at shared prefixes.", INERT, why=OWN_REUSE)
    use_replayssm: bool = option(False, "Rebuild states by replaying inputs.", INERT, why=OWN_REUSE)
    replayssm_buffer_len: int = option(16, "Inputs kept for replaying.", INERT, low=1, why=OWN_REUSE)
    kv_offloading_size: float | None = option(None, "GiB of host memory for evicted KV.", LATER, above=0)
    kv_offloading_backend: Literal["native", "lmcache"] = option("native", "Who keeps evicted KV.", LATER)
    swap_space: float = option(
        4.0, "GiB of host memory for preempted requests.", INERT, low=0,
        why="a preempted request is recomputed, never swapped out, so no space is taken",
    )  # fmt: skip
    # results
    is_attention_free: bool = False
    sliding_window: int | None = None  # set when every layer has the same window
    user_specified_block_size: bool = False


@group
class LoadConfig(Group):
    """How weights are read."""

    load_format: str = option(
        "auto",
        "Form of the weight files; auto takes safetensors, then .bin and .pt, and gguf for a .gguf file. mistral is "
        "consolidated*.safetensors, sharded_state what save_sharded_state wrote.",
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
        None,
        "lazy maps files into memory, eager reads them whole.",
        LATER,
        ready=("lazy", "eager"),
        hints=("prefetch",),
        why="files are mapped, or read whole",
    )
    safetensors_prefetch_num_threads: int = option(
        8, "Threads that prefetch.", INERT, low=1, why="files are mapped, or read whole"
    )
    safetensors_prefetch_block_size: int = option(
        16777216, "Bytes per prefetch.", INERT, low=1, why="files are mapped, or read whole"
    )
    model_loader_extra_config: dict[str, Any] = option(
        {}, "Options of a particular loader: with sharded_state, pattern is the form of the files' names."
    )
    device: str | None = option(None, "Where weights are put first.", LATER, flat=False)
    ignore_patterns: tuple[str, ...] = option(
        ("original/**/*",),
        "Files left out of a download.",
        accepts=tuple[str, ...],
        take=lambda given: (given,) if isinstance(given, str) else given,
    )
    use_tqdm_on_load: bool = option(True, "A progress bar while loading.")
    pt_load_map_location: str | dict[str, str] = option("cpu", "Where .bin and .pt tensors are put.")


@group
class UVAOffloadConfig(Group):
    """Weights in host memory that the device reads directly."""

    cpu_offload_gb: float = option(0.0, "GiB of weights kept in host memory.", LATER, low=0)
    cpu_offload_params: tuple[str, ...] = option((), "Parts of names that may be kept there.", LATER)


@group
class PrefetchOffloadConfig(Group):
    """Layers in host memory that are fetched ahead of use."""

    offload_group_size: int = option(0, "Layers per group; 0 is off.", LATER, low=0)
    offload_num_in_group: int = option(1, "Layers of a group that live in host memory.", LATER, low=1)
    offload_prefetch_step: int = option(1, "Layers fetched ahead.", LATER, low=0)
    offload_params: tuple[str, ...] = option((), "Parts of names that may be kept there.", LATER)


@group
class OffloadConfig(Group):
    """Part of the weights in host memory."""

    offload_backend: Literal["auto", "uva", "prefetch"] = option("auto", "How weights are offloaded.", LATER)
    uva: UVAOffloadConfig = option(UVAOffloadConfig, "Direct access.", flat=False)
    prefetch: PrefetchOffloadConfig = option(PrefetchOffloadConfig, "Fetching ahead.", flat=False)


@group
class KVTransferConfig(Group):
    """KV that comes from or goes to another place."""

    kv_connector: str | None = option(None, "Name of the connector.", flat=False)
    engine_id: str | None = option(None, "Name of this engine; unset is a random one.", flat=False)
    kv_buffer_device: str = option("cpu", "Where KV is staged.", flat=False)
    kv_buffer_size: float = option(1e9, "Bytes of the staging buffer.", flat=False, low=0)
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = option(
        None, "Sends, takes, or both.", flat=False
    )
    kv_rank: int | None = option(None, "Place in the transfer group.", flat=False)
    kv_parallel_size: int = option(1, "Engines in the transfer group.", flat=False, low=1)
    kv_ip: str = option("127.0.0.1", "Address of the peer.", flat=False)
    kv_port: int = option(14579, "Port of the peer.", flat=False)
    kv_connector_extra_config: dict[str, Any] = option({}, "Options of the connector.", flat=False)
    kv_connector_module_path: str | None = option(None, "Module of an outside connector.", flat=False)
    enable_permute_local_kv: bool = option(False, "Change the memory order of received KV.", flat=False)
    kv_load_failure_policy: Literal["recompute", "fail"] = option("fail", "When KV cannot be fetched.", flat=False)


@group
class KVEventsConfig(Group):
    """Telling others which blocks are cached."""

    enable_kv_cache_events: bool = option(False, "Publish stored and removed blocks.", flat=False)
    publisher: Literal["null", "zmq"] | None = option(None, "How; unset follows the switch above.", flat=False)
    endpoint: str = option("tcp://*:5557", "Where events are published.", flat=False)
    replay_endpoint: str | None = option(None, "Where missed events may be asked for.", flat=False)
    buffer_steps: int = option(10000, "Steps kept for replay.", flat=False, low=1)
    hwm: int = option(100000, "Messages a socket holds before it drops.", flat=False, low=1)
    max_queue_size: int = option(100000, "Events waiting to be published.", flat=False, low=1)
    topic: str = option("", "Topic of the messages.", flat=False)

    @property
    def publishes(self) -> bool:
        """Unset, the publisher follows the switch."""
        return self.enable_kv_cache_events and self.publisher != "null"


@group
class ECTransferConfig(Group):
    """Encoder outputs that come from or go to another engine."""

    ec_connector: str | None = option(None, "Name of the connector.", flat=False)
    engine_id: str | None = option(None, "Name of this engine; unset is a random one.", flat=False)
    ec_buffer_device: str | None = option("cuda", "Where outputs are staged.", flat=False)
    ec_buffer_size: float = option(1e9, "Bytes of the staging buffer.", flat=False, low=0)
    ec_role: Literal["ec_producer", "ec_consumer", "ec_both"] | None = option(
        None, "Sends, takes, or both.", flat=False
    )
    ec_rank: int | None = option(None, "Place in the transfer group.", flat=False)
    ec_parallel_size: int = option(1, "Engines in the transfer group.", flat=False, low=1)
    ec_ip: str = option("127.0.0.1", "Address of the peer.", flat=False)
    ec_port: int = option(14579, "Port of the peer.", flat=False)
    ec_connector_extra_config: dict[str, Any] = option({}, "Options of the connector.", flat=False)
    ec_connector_module_path: str | None = option(None, "Module of an outside connector.", flat=False)


@group
class WeightTransferConfig(Group):
    """New weights from a trainer while the engine runs."""

    backend: str = option("nccl", "How weights travel: nccl, ipc or a registered name.", flat=False)
