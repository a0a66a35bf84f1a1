"""How work is scheduled and distributed: SchedulerConfig, ParallelConfig, DeviceConfig.

Declarations only (see option.py); values are resolved in resolve.py.
"""

from typing import ClassVar, Literal

from quire.config.local import name_of
from quire.config.option import Group, group, option, unavailable


@group
class SchedulerConfig(Group):
    """How many requests and tokens a step may have, and which go first."""

    DEFAULT_MAX_NUM_BATCHED_TOKENS: ClassVar[int] = 2048
    DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP: ClassVar[int] = 256
    DEFAULT_MAX_NUM_SEQS: ClassVar[int] = 128

    max_num_batched_tokens: int = option(
        2048, "Most tokens in one step; unset is 4096 for LLM and 2048 for a server, on a large GPU 16384 and 8192.",
        unset=None, low=1, human=True,
    )  # fmt: skip
    max_num_seqs: int = option(
        128, "Most requests in one step; unset is 256 for LLM and 128 for a server, on a large GPU 1024.", unset=None,
        low=1,
    )  # fmt: skip
    inter_token_latency_goal_ms: float = option(
        0.0,
        "Target for the time between tokens of a decoding request while prompts are computed, in milliseconds: "
        "limits the prompt tokens of a step, on a GPU not below 512 and not while many prompts wait, on a CPU not "
        "below 64. 0 means no target; unset is 12 for a server on a GPU, 500 for one on a CPU, else 0.",
        unset=None, low=0,
    )  # fmt: skip
    max_num_queued_reqs: int | None = option(
        None, "Most queued requests; more are refused. 0 means no limit; unset is 10000 for a server, else no limit.",
        low=0,
    )  # fmt: skip
    max_num_queued_tokens: int | None = option(
        None, "Most queued prompt tokens; more are refused. 0 means no limit; unset is 4M for a server (at least 8 "
        "prompts of max_model_len), else no limit.", low=0, human=True,
    )  # fmt: skip
    max_num_partial_prefills: int = option(1, "Prompts that may be partially computed at once.", low=1)
    max_long_partial_prefills: int = option(1, "How many of those may be long.", low=1)
    long_prefill_token_threshold: int = option(
        0, "Tokens from which a prompt is long; 0 is never, or 4% of max_model_len with several partial prefills.",
        low=0,
    )  # fmt: skip
    enable_chunked_prefill: bool = option(
        True, "Split a prompt over several steps; unset is on if the model allows it.", unset=None
    )
    disable_chunked_mm_input: bool = option(False, "Never split a media item over two steps.")
    policy: Literal["fcfs", "priority"] = option(
        "fcfs", "First come first served, or by priority (lower first).", name="scheduling_policy"
    )
    scheduler_cls: str | None = option(
        None, "A subclass of quire.sched.scheduler:Scheduler to use instead, or its import path.",
        accepts=str | None, take=lambda value: value if value is None else name_of(value),
    )  # fmt: skip
    scheduler_reserve_full_isl: bool = option(True, "Admit a request only if its entire prompt fits.")
    watermark: float = option(0.0, "Fraction of blocks left free when requests are admitted.", low=0, below=1)
    async_scheduling: bool = option(
        False, "Plan a step while the previous one still runs; unset is on for a GPU, off on CPU.", unset=None
    )
    stream_interval: int = option(1, "Tokens per streamed chunk.", low=1)
    # results
    runner_type: str = "generate"
    is_multimodal_model: bool = False

    @property
    def chunked_prefill_enabled(self) -> bool:
        return self.enable_chunked_prefill

    @property
    def max_num_encoder_input_tokens(self) -> int:
        return self.max_num_batched_tokens

    @property
    def encoder_cache_size(self) -> int:
        return self.max_num_batched_tokens


@group
class EPLBConfig(Group):
    """Expert load balancing across devices."""

    window_size: int = option(
        1000, "Steps before a move during which the load of experts is counted; at most step_interval.", flat=False,
        low=1,
    )  # fmt: skip
    step_interval: int = option(3000, "Steps between two moves of experts.", flat=False, low=1)
    num_redundant_experts: int = option(
        0, "Copies of experts in each mixture, besides one of each, for those that are chosen most.", flat=False, low=0
    )
    log_balancedness: bool = option(False, "Log how even the load of ranks is.", flat=False)
    log_balancedness_interval: int = option(1, "Steps between two such lines.", flat=False, low=1)


@group
class FaultToleranceConfig(Group):
    """What happens when an engine of several fails."""


@group
class ParallelConfig(Group):
    """How one model is distributed over processes and devices."""

    tensor_parallel_size: int = option(1, "Ranks that share each layer, a worker process each.", low=1, flags=("-tp",))
    pipeline_parallel_size: int = option(
        1, "Stages that share the layers, each with tensor_parallel_size worker processes.", low=1, flags=("-pp",)
    )
    prefill_context_parallel_size: int = unavailable()
    decode_context_parallel_size: int = option(
        1, "Ranks with the same heads of keys that divide the KV of every context among themselves; it divides "
        "tensor_parallel_size.", low=1, flags=("-dcp",),
    )  # fmt: skip
    cp_kv_cache_interleave_size: int = option(
        1, "Tokens in a row that one of these ranks keeps; it divides block_size.", unset=None, low=1
    )
    dcp_kv_cache_interleave_size: int = option(1, "Old name of cp_kv_cache_interleave_size.", low=1)
    dcp_comm_backend: Literal["ag_rs", "a2a"] = option(
        "ag_rs", "How their partial results are combined: all-gather and reduce-scatter, or all-to-all.", unset=None
    )
    data_parallel_size: int = option(
        1, "Engines that share the requests, each with the whole model and processes of its own.", low=1,
        flags=("-dp",),
    )  # fmt: skip
    data_parallel_size_local: int = option(
        1, "Engines that this program starts; unset is all of them, or one if data_parallel_rank is set. Fewer, or 0: "
        "the others are on machines that run `quire serve --headless`.", unset=None, low=0, flags=("-dpl",),
    )  # fmt: skip
    data_parallel_rank: int = option(
        0, "Start only this engine of data_parallel_size; requests are balanced outside.", unset=None, low=0,
        flags=("-dpn",),
    )  # fmt: skip
    data_parallel_start_rank: int | None = option(
        None, "First of the engines that this program starts; implies data_parallel_hybrid_lb, unless --headless.",
        low=0, flags=("-dpr",),
    )  # fmt: skip
    data_parallel_master_ip: str = option(
        "127.0.0.1", "Name or IPv4 address of the machine with the server, on which it listens for machines that have "
        "engines only; unset is master_addr.", name="data_parallel_address", unset=None, flags=("-dpa",),
    )  # fmt: skip
    data_parallel_rpc_port: int = option(
        29550, "Port on which it does.", unset=None, low=1, high=65535, flags=("-dpp",)
    )
    data_parallel_rank_local: int | None = option(
        None, "Place of the engine among those of this machine: it decides which devices it gets.", flat=False, low=0
    )
    data_parallel_external_lb: bool = option(
        False, "One engine per server, with a load balancer in front of the servers; needs data_parallel_rank.",
        flags=("-dpe",),
    )  # fmt: skip
    data_parallel_hybrid_lb: bool = option(
        False, "data_parallel_size_local engines per server, with a load balancer in front of the servers.",
        flags=("-dph",),
    )  # fmt: skip
    data_parallel_backend: Literal["mp", "ray"] = option(
        "mp", "Who starts the engines: this program and, with --headless, others like it; or a Ray cluster, as actors "
        "on whichever nodes have room.", flags=("-dpb",),
    )  # fmt: skip
    data_parallel_routing: Literal["least-loaded", "prefix-aware", "round-robin"] = option(
        "least-loaded", "Quire only. Which engine a request goes to: the one with the fewest unfinished requests, the "
        "one that was sent the longest part of its prompt before (unless it is loaded well above the mean), or each "
        "in turn.",
    )  # fmt: skip
    enable_expert_parallel: bool = option(
        False, "Each rank has whole experts of a mixture instead of a part of every one; the ranks of all engines of "
        "data_parallel_size share them, and run every step together.",
        flags=("-ep",),
    )  # fmt: skip
    expert_placement_strategy: Literal["linear", "round_robin"] = option(
        "linear", "Which experts a rank has then: neighbours, or each in turn."
    )
    enable_eplb: bool = option(
        False, "Move experts between ranks now and then, by how often they are chosen; needs enable_expert_parallel."
    )
    eplb_config: EPLBConfig = option(EPLBConfig, "How experts are balanced.", unset=None)
    distributed_executor_backend: str | None = option(
        None, "How workers are started: uni in the engine's process, mp in processes of their own, ray as actors of a "
        "Ray cluster, external_launcher by torchrun, or the import path of an Executor class; unset is uni for one "
        "worker, mp for several.", choices=("uni", "mp", "ray", "external_launcher"), paths=True, accepts=str | None,
        take=lambda value: value if value is None else name_of(value),
    )  # fmt: skip
    nnodes: int = option(
        1, "Machines that share the ranks of the engine, or the engines of data_parallel_size, each an equal number of "
        "them in order.", low=1, flags=("-n",),
    )  # fmt: skip
    node_rank: int = option(
        0, "Which of the machines this is. The first has the engine; the others run `quire serve --headless`.", low=0,
        flags=("-r",),
    )  # fmt: skip
    master_addr: str = option("127.0.0.1", "Name or IPv4 address of the first machine, on which it listens for others.")
    master_port: int = option(29501, "Port on which it does.", low=1, high=65535)
    worker_extension_cls: str = option("", "Import path of a class whose methods are added to the worker.")
    numa_bind: bool = unavailable()
    numa_bind_nodes: tuple[int, ...] | None = unavailable()
    numa_bind_cpus: tuple[str, ...] | None = unavailable()
    assigned_physical_gpu_ids: str | tuple[int, ...] | None = unavailable(accepts=str | None)
    # results
    rank: int = 0
    is_moe_model: bool = False
    is_headless: bool = False  # this program has no HTTP server: what it starts belongs to another machine's
    num_engines_elsewhere: int = 0  # that other machines start, behind this program's port
    num_engines_near: int = 0  # of these, how many Ray has to start on this program's node at least
    num_engines_here: int = 1  # among which the processors and the memory of this machine are divided
    ray_run: str = ""  # names the placement groups of engines that are started together; "": one engine
    experts_span_engines: bool = False  # the ranks of all engines divide experts among themselves
    experts_meeting: str = ""  # a URL at which they find each other

    @property
    def engine_ranks(self) -> range:
        """The engines that requests to this program may go to, by data-parallel rank: its own, then others."""
        first, here = self.data_parallel_rank, self.data_parallel_size_local
        return range(first, first + here + self.num_engines_elsewhere)

    @property
    def ranks_here(self) -> range:
        """Those that this program starts."""
        return self.engine_ranks[: self.data_parallel_size_local]

    @property
    def has_several_engines(self) -> bool:
        """A router is between this program's requests and the engines."""
        return len(self.engine_ranks) > 1 or self.num_engines_elsewhere > 0

    @property
    def nodes_have_engines(self) -> bool:
        """nnodes is about whole engines, not about the ranks of one."""
        launched = self.distributed_executor_backend == "external_launcher"
        return self.nnodes > 1 and self.data_parallel_size > 1 and not launched

    @property
    def place_here(self) -> int:
        """Of the engine, among those of this machine."""
        return self.data_parallel_rank_local or 0

    @property
    def data_parallel_index(self) -> int:
        return self.data_parallel_rank

    @property
    def use_ray(self) -> bool:
        """The workers are actors."""
        return self.distributed_executor_backend == "ray"

    @property
    def world_size(self) -> int:
        """Number of workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

    @property
    def local_world_size(self) -> int:
        """Of these, how many this machine has."""
        return self.world_size // self.nnodes

    @property
    def world_size_across_dp(self) -> int:
        return self.world_size * self.data_parallel_size


@group
class DeviceConfig(Group):
    """The device."""

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "The compute device; auto is a GPU if there is one, else the CPU.",
        accepts=str, take=lambda value: str(value).partition(":")[0],
    )  # fmt: skip

    @property
    def device_type(self) -> str:
        return self.device
