"""How the device computes: attention, kernels, compilation and CUDA graphs.

Declarations only (option.py says what they mean). No model is compiled: kernels are written by hand, graphs do the
rest.
"""

import enum
from typing import Any, Literal

from quire.config.option import INERT, LATER, Group, group, option
from quire.config.reasons import NO_COMPILER, OWN_GRAPHS, OWN_KERNELS, TEXT_ONLY
from quire.schema.errors import ConfigError


class CompilationMode(enum.IntEnum):
    """Who compiles the model."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    """Which batches replay a graph. A pair is (decode batches, other batches)."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def decode_mode(self) -> "CUDAGraphMode":
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> "CUDAGraphMode":
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def __bool__(self) -> bool:
        return self is not CUDAGraphMode.NONE


def mode_number(given: Any) -> Any:
    """A compile mode by number, name or member."""
    if isinstance(given, str) and not given.lstrip("-").isdigit():
        if given.upper() not in CompilationMode.__members__:
            names = ", ".join(CompilationMode.__members__)
            raise ConfigError(f"compilation mode {given!r} is none of {names}", param="mode", value=given)
        return int(CompilationMode[given.upper()])
    return int(given) if isinstance(given, str | enum.IntEnum) else given


def graph_mode_name(given: Any) -> Any:
    """A CUDA graph mode by name (any case) or member, as its name: plain data that may cross processes."""
    if isinstance(given, CUDAGraphMode):
        return given.name
    if isinstance(given, str):
        if given.upper() not in CUDAGraphMode.__members__:
            names = ", ".join(CUDAGraphMode.__members__)
            raise ConfigError(f"cudagraph_mode {given!r} is none of {names}", param="cudagraph_mode", value=given)
        return given.upper()
    return given


def upper(given: Any) -> Any:
    """Kernel names are written in capitals; 'auto' is the same as none."""
    if isinstance(given, str):
        return None if given.lower() == "auto" else given.upper()
    return given.name if isinstance(given, enum.Enum) else given


def snake(given: Any) -> Any:
    return given.lower().replace("-", "_") if isinstance(given, str) else given


# Kernels of vLLM that compute the same attention; asking for one is a hint.
_ATTENTION = (
    "FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TREE_ATTN", "XFORMERS", "FLASH_ATTN_VLLM_V1", "FLASHINFER_VLLM_V1",
    "TRITON_ATTN_VLLM_V1", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA",
)  # fmt: skip


@group
class AttentionConfig(Group):
    """Which attention kernel runs."""

    backend: str | None = option(
        None, "Attention kernel; unset is TRITON_ATTN on a GPU and CPU_ATTN on CPU.", LATER, name="attention_backend",
        ready=("TRITON_ATTN", "CPU_ATTN", "TORCH_SDPA"), hints=_ATTENTION, take=upper, why=OWN_KERNELS,
    )  # fmt: skip
    flash_attn_version: Literal[2, 3, 4] | None = option(
        None, "FlashAttention generation.", INERT, flat=False, why=OWN_KERNELS
    )
    use_prefill_decode_attention: bool = option(
        False, "Separate kernels for prompts.", INERT, flat=False, why=OWN_KERNELS
    )
    flash_attn_max_num_splits_for_cuda_graph: int = option(
        32, "Splits inside a graph.", INERT, flat=False, low=1, why=OWN_KERNELS
    )
    tq_max_kv_splits_for_cuda_graph: int = option(
        32, "Splits of TurboQuant decode.", INERT, flat=False, low=1, why=OWN_KERNELS
    )
    use_trtllm_attention: bool | None = option(None, "TensorRT-LLM kernels.", INERT, flat=False, why=OWN_KERNELS)
    disable_flashinfer_q_quantization: bool = option(
        False, "Queries stay unquantized.", INERT, flat=False, why=OWN_KERNELS
    )
    mla_prefill_backend: str | None = option(
        None, "Kernel for latent prompts.", INERT, flat=False, take=upper, why=OWN_KERNELS
    )
    use_prefill_query_quantization: bool = option(False, "Quantize prompt queries.", LATER, flat=False)
    use_fp4_indexer_cache: bool = option(False, "fp4 indexer keys.", LATER, flat=False)
    indexer_kv_dtype: Literal["bf16", "fp8", "mxfp4", "nvfp4"] = option("bf16", "Indexer precision.", LATER, flat=False)
    use_non_causal: bool = option(False, "Attend in both directions.", LATER, flat=False)
    flex_attn_block_m: int | None = option(None, "Query tile of FlexAttention.", INERT, flat=False, why=OWN_KERNELS)
    flex_attn_block_n: int | None = option(None, "Key tile of FlexAttention.", INERT, flat=False, why=OWN_KERNELS)
    flex_attn_q_block_size: int | None = option(None, "Query block of its mask.", INERT, flat=False, why=OWN_KERNELS)
    flex_attn_kv_block_size: int | None = option(None, "Key block of its mask.", INERT, flat=False, why=OWN_KERNELS)


@group
class MambaConfig(Group):
    """Kernels of state-space layers."""

    backend: str = option(
        "TRITON", "Kernel of the state update.", INERT, name="mamba_backend", take=upper, why=OWN_KERNELS
    )
    enable_stochastic_rounding: bool = option(
        False, "Round states at random.", LATER, name="enable_mamba_cache_stochastic_rounding"
    )
    stochastic_rounding_philox_rounds: int = option(
        0, "Rounds of the generator.", LATER, name="mamba_cache_philox_rounds", low=0
    )
    ssu_algorithm: Literal["auto", "horizontal", "simple", "vertical"] | None = option(
        None, "Form of the state update.", INERT, name="mamba_ssu_algorithm", why=OWN_KERNELS
    )


@group
class KernelConfig(Group):
    """Which implementation of an operation runs."""

    ir_op_priority: dict[str, tuple[str, ...]] = option(
        {}, "Implementations by preference, per operation.", INERT, why=OWN_KERNELS
    )
    enable_flashinfer_autotune: bool | None = option(
        None, "Tune FlashInfer at start.", INERT, ready=(False,), why=OWN_KERNELS
    )
    moe_backend: str = option("auto", "Kernel of expert layers.", INERT, take=snake, why=OWN_KERNELS)
    linear_backend: str = option("auto", "Kernel of quantized linear layers.", INERT, take=snake, why=OWN_KERNELS)
    sparse_indexer_topk_backend: str = option(
        "auto", "Kernel that selects sparse keys.", INERT, take=snake, why=OWN_KERNELS
    )


@group
class PassConfig(Group):
    """Fusions of the compiler."""

    fuse_norm_quant: bool | None = option(None, "Norm and quantize.", INERT, flat=False, why=NO_COMPILER)
    fuse_act_quant: bool | None = option(None, "Activation and quantize.", INERT, flat=False, why=NO_COMPILER)
    fuse_attn_quant: bool | None = option(None, "Attention and quantize.", INERT, flat=False, why=NO_COMPILER)
    eliminate_noops: bool = option(True, "Drop operations that do nothing.", INERT, flat=False, why=NO_COMPILER)
    enable_sp: bool | None = option(None, "Sequence parallel.", INERT, flat=False, why=NO_COMPILER)
    fuse_gemm_comms: bool | None = option(None, "Overlap products and collectives.", INERT, flat=False, why=NO_COMPILER)
    fuse_allreduce_rms: bool | None = option(None, "All-reduce and norm.", INERT, flat=False, why=NO_COMPILER)
    enable_qk_norm_rope_fusion: bool | None = option(
        None, "Query/key norm and rotation.", INERT, flat=False, why=NO_COMPILER
    )
    fuse_rope_kvcache_cat_mla: bool | None = option(
        None, "Latent cache write and rotation.", INERT, flat=False, why=NO_COMPILER
    )
    fuse_act_padding: bool | None = option(None, "Norm and padding.", INERT, flat=False, why=NO_COMPILER)
    fuse_mla_dual_rms_norm: bool | None = option(None, "Paired latent norms.", INERT, flat=False, why=NO_COMPILER)
    fuse_rope_kvcache: bool | None = option(None, "Rotation and cache write.", INERT, flat=False, why=NO_COMPILER)
    rope_kvcache_fusion_max_token_num: int = option(
        256, "Largest batch of that fusion.", INERT, flat=False, low=1, why=NO_COMPILER
    )
    fi_allreduce_fusion_max_size_mb: float | None = option(
        None, "Largest fused message, MiB.", INERT, flat=False, why=NO_COMPILER
    )
    sp_min_token_num: int | None = option(
        None, "Smallest sequence-parallel batch.", INERT, flat=False, low=1, why=NO_COMPILER
    )


@group
class CompilationConfig(Group):
    """Compilation and CUDA graphs. On CPU nothing is compiled or captured."""

    mode: int = option(0, "Compile mode 0 to 3, or its name.", INERT, asked=None, flat=False, low=0, high=3,
                       accepts=int | str | None, take=mode_number, why=NO_COMPILER)  # fmt: skip
    debug_dump_path: str | None = option(None, "Folder for dumps of the compiler.", INERT, flat=False, why=NO_COMPILER)
    cache_dir: str = option("", "Folder of compiled code.", INERT, flat=False, why=NO_COMPILER)
    compile_cache_save_format: Literal["binary", "unpacked"] = option(
        "binary", "Form of it.", INERT, flat=False, why=NO_COMPILER
    )
    backend: str = option("", "Compiler.", INERT, flat=False, why=NO_COMPILER)
    custom_ops: tuple[str, ...] = option((), "all, none, +op, -op.", INERT, flat=False, why=NO_COMPILER)
    ir_enable_torch_wrap: bool | None = option(None, "Wrap operations for torch.", INERT, flat=False, why=NO_COMPILER)
    splitting_ops: tuple[str, ...] | None = option(
        None, "Operations outside graphs.", INERT, flat=False, why=NO_COMPILER
    )
    compile_mm_encoder: bool = option(False, "Compile the media encoder.", INERT, flat=False, why=TEXT_ONLY)
    cudagraph_mm_encoder: bool = option(False, "Graphs for the media encoder.", INERT, flat=False, why=TEXT_ONLY)
    encoder_cudagraph_token_budgets: tuple[int, ...] = option(
        (), "Its captured sizes.", INERT, flat=False, why=TEXT_ONLY
    )
    encoder_cudagraph_max_vision_items_per_batch: int = option(
        0, "Items per graph.", INERT, flat=False, low=0, why=TEXT_ONLY
    )
    encoder_cudagraph_max_frames_per_batch: int | None = option(
        None, "Frames per graph.", INERT, flat=False, low=0, why=TEXT_ONLY
    )
    compile_sizes: tuple[int | str, ...] | None = option(
        None, "Sizes compiled exactly.", INERT, flat=False, why=NO_COMPILER
    )
    compile_ranges_endpoints: tuple[int, ...] | None = option(
        None, "Ends of size ranges.", INERT, flat=False, why=NO_COMPILER
    )
    inductor_compile_config: dict[str, Any] = option({}, "Options of the compiler.", INERT, flat=False, why=NO_COMPILER)
    inductor_passes: dict[str, str] = option({}, "Further passes.", INERT, flat=False, why=NO_COMPILER)
    cudagraph_mode: str | None = option(
        None, "Which steps replay a graph; unset is FULL on a GPU: decodes, and steps with prompts up to 2048 tokens.",
        flat=False, choices=tuple(CUDAGraphMode.__members__), take=graph_mode_name,
    )  # fmt: skip
    cudagraph_num_of_warmups: int = option(0, "Runs before a capture.", INERT, flat=False, low=0, why=OWN_GRAPHS)
    cudagraph_capture_sizes: tuple[int, ...] | None = option(
        None, "Batch sizes captured; unset is 1, 2, 4, every 8 below 256, every 16 below 512, every 32 from there."
    )
    max_cudagraph_capture_size: int | None = option(
        None, "Largest captured batch; unset is twice max_num_seqs, at most 1024.", low=1
    )
    cudagraph_copy_inputs: bool = option(False, "Copy inputs before a replay.", INERT, flat=False, why=OWN_GRAPHS)
    cudagraph_specialize_lora: bool = option(
        True, "Graphs with and without adapters.", INERT, flat=False, why=OWN_GRAPHS
    )
    use_inductor_graph_partition: bool | None = option(
        None, "Split in the compiler.", INERT, flat=False, why=NO_COMPILER
    )
    pass_config: PassConfig = option(PassConfig, "Fusions.", flat=False)
    dynamic_shapes_config: dict[str, Any] = option({}, "Handling of varying sizes.", INERT, flat=False, why=NO_COMPILER)
    fast_moe_cold_start: bool | None = option(None, "Start expert models faster.", INERT, flat=False, why=NO_COMPILER)
