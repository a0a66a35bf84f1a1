"""How work is ordered and spread: SchedulerConfig, ParallelConfig, DeviceConfig.

Declarations only (option.py says what they mean); values are decided in resolve.py.
"""

from typing import Any, ClassVar, Literal

from quire.config.local import name_of
from quire.config.option import INERT, LATER, Group, group, option
from quire.config.reasons import ONE_DEVICE


@group
class SchedulerConfig(Group):
    """How many requests and tokens a step may hold, and who goes first."""

    DEFAULT_MAX_NUM_BATCHED_TOKENS: ClassVar[int] = 2048
    DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP: ClassVar[int] = 256
    DEFAULT_MAX_NUM_SEQS: ClassVar[int] = 128

    max_num_batched_tokens: int = option(
        2048,
        "Most tokens in one step; unset is 4096 for LLM and 2048 for a server, on a large GPU 16384 and 8192.",
        asked=None,
        low=1,
        human=True,
    )
    max_num_seqs: int = option(
        128, "Most requests in one step; unset is 256 for LLM and 128 for a server, on a large GPU 1024.", asked=None,
        low=1,
    )  # fmt: skip
    inter_token_latency_goal_ms: float = option(
        0.0,
        "Milliseconds that a decoding request should wait for a token at most while prompts are computed beside it: "
        "bounds the prompt tokens of a step, on a GPU not below 512 and not while many prompts wait, on a CPU not "
        "below 64. 0 is no goal; unset is 12 for a server on a GPU, 500 for one on a CPU, else 0.",
        asked=None,
        low=0,
    )
    max_num_scheduled_tokens: int | None = option(None, "Tokens the scheduler itself may grant.", LATER, low=0)
    max_num_active_seqs: int | None = option(None, "Requests that may hold KV.", LATER, low=1)
    max_num_queued_reqs: int | None = option(
        None, "Requests that may wait; more are refused. 0 is no bound; unset is 10000 for a server, else no bound.",
        low=0,
    )  # fmt: skip
    max_num_queued_tokens: int | None = option(
        None, "Prompt tokens that may wait; more are refused. 0 is no bound; unset is 4M for a server (at least 8 "
        "prompts of max_model_len), else no bound.", low=0, human=True,
    )  # fmt: skip
    max_num_partial_prefills: int = option(1, "Prompts that may be half-computed at once.", low=1)
    max_long_partial_prefills: int = option(1, "How many of those may be long.", low=1)
    long_prefill_token_threshold: int = option(
        0, "From how many tokens a prompt is long; 0 is none, or 4% of max_model_len with several partial prefills.",
        low=0,
    )  # fmt: skip
    long_prefill_token_threshold_adaptive: bool = option(
        False, "Move that threshold with the load.", INERT, why="the threshold stays as it is set"
    )
    enable_chunked_prefill: bool = option(
        True, "Spread a prompt over several steps; unset is on where the model allows it.", asked=None
    )
    policy: Literal["fcfs", "priority"] = option(
        "fcfs", "First come first served, or by priority (lower first).", name="scheduling_policy"
    )
    disable_chunked_mm_input: bool = option(
        False, "Never split a media item.", INERT, why="this version takes text only, so no media item is split"
    )
    scheduler_cls: str | None = option(
        None, "A class made from quire.sched.scheduler:Scheduler to use instead, or its import path.",
        accepts=str | None, take=lambda given: given if given is None else name_of(given),
    )  # fmt: skip
    disable_hybrid_kv_cache_manager: bool = option(
        False,
        "Give every layer the KV of full attention.",
        INERT,
        asked=None,
        ready=(False,),
        why="layers with a window keep no more than it",
    )
    scheduler_reserve_full_isl: bool = option(True, "Admit a request only when its whole prompt fits.")
    watermark: float = option(0.0, "Share of blocks kept free when requests are admitted.", low=0, below=1)
    prefill_schedule_interval: int = option(
        1,
        "Admit prompts only every so many steps.",
        INERT,
        low=1,
        why="prompts are admitted at every step that has room",
    )
    async_scheduling: bool = option(
        False, "Plan a step while the one before still runs; unset is on for a GPU, off on CPU.", asked=None
    )
    stream_interval: int = option(1, "Tokens gathered before a streamed piece is sent.", low=1)
    # results
    runner_type: str = "generate"
    is_multimodal_model: bool = False

    @property
    def max_num_encoder_input_tokens(self) -> int:
        return self.max_num_batched_tokens

    @property
    def encoder_cache_size(self) -> int:
        return self.max_num_batched_tokens


@group
class EPLBConfig(Group):
    """Balancing of experts over devices."""

    window_size: int = option(1000, "Steps of load history.", INERT, flat=False, why=ONE_DEVICE, low=1)
    step_interval: int = option(3000, "Steps between rearrangements.", INERT, flat=False, why=ONE_DEVICE, low=1)
    num_redundant_experts: int = option(0, "Extra copies of experts.", INERT, flat=False, why=ONE_DEVICE, low=0)
    log_balancedness: bool = option(False, "Log how even the load is.", INERT, flat=False, why=ONE_DEVICE)
    log_balancedness_interval: int = option(1, "Steps between those lines.", INERT, flat=False, why=ONE_DEVICE, low=1)
    use_async: bool = option(True, "Move experts while running.", INERT, flat=False, why=ONE_DEVICE)
    policy: str = option("default", "How experts are placed.", INERT, flat=False, why=ONE_DEVICE)
    communicator: Literal["torch_nccl", "torch_gloo", "nixl", "pynccl"] | None = option(
        None, "How expert weights travel.", INERT, flat=False, why=ONE_DEVICE
    )


@group
class FaultToleranceConfig(Group):
    """What happens when an engine of several fails."""

    engine_recovery_timeout_sec: int = option(120, "Seconds an engine may take to come back.", flat=False, low=1)


@group
class ParallelConfig(Group):
    """How one model is spread over processes and devices."""

    tensor_parallel_size: int = option(1, "Parts each layer is split into.", LATER, flags=("-tp",), low=1)
    pipeline_parallel_size: int = option(1, "Stages the layers are split into.", LATER, flags=("-pp",), low=1)
    prefill_context_parallel_size: int = option(1, "Ranks that share a prompt.", LATER, flags=("-pcp",), low=1)
    decode_context_parallel_size: int = option(1, "Ranks that share a context.", LATER, flags=("-dcp",), low=1)
    dcp_kv_cache_interleave_size: int = option(
        1, "Old name of cp_kv_cache_interleave_size.", INERT, low=1, why=ONE_DEVICE
    )
    dcp_comm_backend: Literal["ag_rs", "a2a"] = option(
        "ag_rs", "How partial attention is joined.", INERT, asked=None, why=ONE_DEVICE
    )
    dcp_q_replicate: bool | None = option(None, "Replicate queries over context ranks.", INERT, why=ONE_DEVICE)
    cp_kv_cache_interleave_size: int = option(
        1, "Tokens in a row per context rank.", INERT, asked=None, low=1, why=ONE_DEVICE
    )
    data_parallel_size: int = option(1, "Engines that share the requests.", LATER, flags=("-dp",), low=1)
    data_parallel_size_local: int = option(1, "Of those, on this machine.", LATER, asked=None, flags=("-dpl",), low=0)
    data_parallel_rank: int = option(0, "Which of the engines this is.", LATER, asked=None, flags=("-dpn",), low=0)
    data_parallel_start_rank: int | None = option(None, "First engine on this machine.", LATER, flags=("-dpr",), low=0)
    data_parallel_rank_local: int | None = option(None, "Place on this machine.", LATER, flat=False, low=0)
    data_parallel_master_ip: str = option(
        "127.0.0.1",
        "Address of the first engine.",
        INERT,
        asked=None,
        name="data_parallel_address",
        flags=("-dpa",),
        why=ONE_DEVICE,
    )
    data_parallel_rpc_port: int = option(
        29550, "Port for messages between engines.", INERT, asked=None, flags=("-dpp",), why=ONE_DEVICE
    )
    data_parallel_master_port: int = option(29500, "Port for process groups.", INERT, flat=False, why=ONE_DEVICE)
    data_parallel_backend: Literal["mp", "ray"] = option(
        "mp", "Who starts the engines.", INERT, flags=("-dpb",), why=ONE_DEVICE
    )
    data_parallel_external_lb: bool = option(False, "Requests are spread from outside.", LATER, flags=("-dpe",))
    data_parallel_hybrid_lb: bool = option(False, "Requests are spread per machine.", LATER, flags=("-dph",))
    data_parallel_multi_port_external_lb: bool = option(False, "One port per engine.", LATER, flags=("-dpm",))
    dp_sync_interval: int = option(16, "Steps between agreements of engines.", INERT, low=1, why=ONE_DEVICE)
    enable_expert_parallel: bool = option(False, "Whole experts per device.", INERT, flags=("-ep",), why=ONE_DEVICE)
    enable_ep_weight_filter: bool = option(False, "Read only the experts of this device.", INERT, why=ONE_DEVICE)
    enable_eplb: bool = option(False, "Balance experts by load.", INERT, why=ONE_DEVICE)
    eplb_config: EPLBConfig = option(EPLBConfig, "How experts are balanced.", asked=None)
    expert_placement_strategy: Literal["linear", "round_robin"] = option(
        "linear", "Order of experts.", INERT, why=ONE_DEVICE
    )
    all2all_backend: str = option(
        "allgather_reducescatter",
        "How tokens reach their experts.",
        INERT,
        choices=(
            "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "deepep_v2",
            "flashinfer_all2allv", "flashinfer_nvlink_one_sided", "flashinfer_nvlink_two_sided", "moonep",
            "mori_high_throughput", "mori_low_latency", "naive", "nixl_ep",
        ), why=ONE_DEVICE
    )  # fmt: skip
    enable_elastic_ep: bool = option(False, "Add and remove expert ranks while running.", LATER)
    elastic_ep_max_dp_size: int | None = option(None, "Most engines an elastic group may have.", LATER, low=1)
    enable_dbo: bool = option(False, "Overlap two half batches.", INERT, why=ONE_DEVICE)
    ubatch_size: int = option(0, "Parts a batch is cut into.", INERT, low=0, why=ONE_DEVICE)
    dbo_decode_token_threshold: int = option(32, "From how many decode tokens.", INERT, low=0, why=ONE_DEVICE)
    dbo_prefill_token_threshold: int = option(512, "From how many prompt tokens.", INERT, low=0, why=ONE_DEVICE)
    enable_batch_sharded_sampling: bool | None = option(None, "Split sampling over ranks.", INERT, why=ONE_DEVICE)
    enable_hc_sp: bool = option(False, "Sequence parallel in hyper-connections.", INERT, why=ONE_DEVICE)
    enable_shm_tensor_arena: bool = option(False, "Pass tensors through shared memory.", LATER)
    enable_fault_tolerance: bool = option(False, "Go on when one engine fails.", LATER)
    fault_tolerance_config: FaultToleranceConfig = option(
        FaultToleranceConfig, "How failures are handled.", LATER, asked=None
    )
    max_parallel_loading_workers: int | None = option(None, "Workers that load at once.", INERT, low=1, why=ONE_DEVICE)
    disable_custom_all_reduce: bool = option(False, "Use the library's all-reduce.", INERT, why=ONE_DEVICE)
    disable_nccl_for_dp_synchronization: bool | None = option(
        None, "Synchronise engines over CPU.", INERT, why=ONE_DEVICE
    )
    distributed_executor_backend: str | None = option(
        None,
        "How workers are run.",
        LATER,
        choices=("uni", "mp", "ray", "external_launcher"),
        ready=("uni",),
        hints=("mp", "ray"),
        why=f"on one device mp and ray have no effect: {ONE_DEVICE}",
        accepts=str | None,
        take=lambda given: given if given is None else name_of(given),
    )
    worker_cls: str = option("auto", "Another worker class.", LATER)
    worker_extension_cls: str = option("", "Import path of a class whose methods the worker gains.")
    sd_worker_cls: str = option("auto", "Worker class of a draft model.", LATER, flat=False)
    ray_workers_use_nsight: bool = option(False, "Profile Ray workers.", INERT, why=ONE_DEVICE)
    ray_runtime_env: dict[str, Any] | None = option(
        None, "Environment of Ray workers.", INERT, flat=False, why=ONE_DEVICE
    )
    placement_group: str | None = option(None, "An existing Ray placement group.", LATER, flat=False)
    master_addr: str = option("127.0.0.1", "Address of the first machine.", INERT, why=ONE_DEVICE)
    master_port: int = option(29501, "Port of the first machine.", INERT, why=ONE_DEVICE)
    nnodes: int = option(1, "Machines.", LATER, flags=("-n",), low=1)
    node_rank: int = option(0, "Which machine this is.", LATER, flags=("-r",), low=0)
    numa_bind: bool = option(
        False, "Bind workers to the nearest CPUs.", INERT, why="QUIRE_CPU_OMP_THREADS_BIND says where threads run"
    )
    numa_bind_nodes: tuple[int, ...] | None = option(
        None, "Memory node of each device.", INERT, why="QUIRE_CPU_OMP_THREADS_BIND says where threads run"
    )
    numa_bind_cpus: tuple[str, ...] | None = option(
        None, "CPUs of each device.", INERT, why="QUIRE_CPU_OMP_THREADS_BIND says where threads run"
    )
    assigned_physical_gpu_ids: str | tuple[int, ...] | None = option(
        None, "Devices to use.", LATER, name="device_ids", accepts=str | None
    )
    distributed_timeout_seconds: int | None = option(
        None, "Longest wait of a process group.", INERT, low=1, why=ONE_DEVICE
    )
    cpu_distributed_timeout_seconds: int | None = option(None, "The same on CPU.", INERT, low=1, why=ONE_DEVICE)
    # results
    rank: int = 0
    is_moe_model: bool = False

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

    @property
    def world_size_across_dp(self) -> int:
        return self.world_size * self.data_parallel_size


@group
class DeviceConfig(Group):
    """What computes."""

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "What computes; auto is a GPU where there is one, else the CPU.",
        accepts=str, take=lambda given: str(given).partition(":")[0],
    )  # fmt: skip

    @property
    def device_type(self) -> str:
        return self.device
