"""How the device computes: attention, kernels, compilation and CUDA graphs.

Declarations only (option.py says what they mean). No model is compiled: kernels are written by hand, graphs do the
rest.
"""

import enum
from typing import Any, Literal

from quire.config.option import LATER, Group, group, option
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


@group
class AttentionConfig(Group):
    """Which attention kernel runs."""

    backend: str | None = option(
        None, "Attention kernel; unset is TRITON_ATTN on a GPU and CPU_ATTN on CPU.", LATER, name="attention_backend",
        ready=("TRITON_ATTN", "CPU_ATTN", "TORCH_SDPA"), take=upper,
    )  # fmt: skip
    flash_attn_version: Literal[2, 3, 4] | None = option(None, "FlashAttention generation.", LATER, flat=False)
    use_prefill_decode_attention: bool = option(False, "Separate kernels for prompts.", LATER, flat=False)
    flash_attn_max_num_splits_for_cuda_graph: int = option(32, "Splits inside a graph.", LATER, flat=False, low=1)
    tq_max_kv_splits_for_cuda_graph: int = option(32, "Splits of TurboQuant decode.", LATER, flat=False, low=1)
    use_trtllm_attention: bool | None = option(None, "TensorRT-LLM kernels.", LATER, flat=False)
    disable_flashinfer_q_quantization: bool = option(False, "Queries stay unquantized.", LATER, flat=False)
    mla_prefill_backend: str | None = option(None, "Kernel for latent prompts.", LATER, flat=False, take=upper)
    use_prefill_query_quantization: bool = option(False, "Quantize prompt queries.", LATER, flat=False)
    use_fp4_indexer_cache: bool = option(False, "fp4 indexer keys.", LATER, flat=False)
    indexer_kv_dtype: Literal["bf16", "fp8", "mxfp4", "nvfp4"] = option("bf16", "Indexer precision.", LATER, flat=False)
    use_non_causal: bool = option(False, "Attend in both directions.", LATER, flat=False)
    flex_attn_block_m: int | None = option(None, "Query tile of FlexAttention.", LATER, flat=False)
    flex_attn_block_n: int | None = option(None, "Key tile of FlexAttention.", LATER, flat=False)
    flex_attn_q_block_size: int | None = option(None, "Query block of its mask.", LATER, flat=False)
    flex_attn_kv_block_size: int | None = option(None, "Key block of its mask.", LATER, flat=False)


@group
class MambaConfig(Group):
    """Kernels of state-space layers."""

    backend: str = option("TRITON", "Kernel of the state update.", LATER, name="mamba_backend", take=upper)
    enable_stochastic_rounding: bool = option(
        False, "Round states at random.", LATER, name="enable_mamba_cache_stochastic_rounding"
    )
    stochastic_rounding_philox_rounds: int = option(
        0, "Rounds of the generator.", LATER, name="mamba_cache_philox_rounds", low=0
    )
    ssu_algorithm: Literal["auto", "horizontal", "simple", "vertical"] | None = option(
        None, "Form of the state update.", LATER, name="mamba_ssu_algorithm"
    )


@group
class KernelConfig(Group):
    """Which implementation of an operation runs."""

    ir_op_priority: dict[str, tuple[str, ...]] = option({}, "Implementations by preference, per operation.", LATER)
    enable_flashinfer_autotune: bool | None = option(None, "Tune FlashInfer at start.", LATER, ready=(False,))
    moe_backend: str = option("auto", "Kernel of expert layers.", LATER, take=snake)
    linear_backend: str = option("auto", "Kernel of quantized linear layers.", LATER, take=snake)
    sparse_indexer_topk_backend: str = option("auto", "Kernel that selects sparse keys.", LATER, take=snake)


@group
class PassConfig(Group):
    """Fusions of the compiler."""

    fuse_norm_quant: bool | None = option(None, "Norm and quantize.", LATER, flat=False)
    fuse_act_quant: bool | None = option(None, "Activation and quantize.", LATER, flat=False)
    fuse_attn_quant: bool | None = option(None, "Attention and quantize.", LATER, flat=False)
    eliminate_noops: bool = option(True, "Drop operations that do nothing.", LATER, flat=False)
    enable_sp: bool | None = option(None, "Sequence parallel.", LATER, flat=False)
    fuse_gemm_comms: bool | None = option(None, "Overlap products and collectives.", LATER, flat=False)
    fuse_allreduce_rms: bool | None = option(None, "All-reduce and norm.", LATER, flat=False)
    enable_qk_norm_rope_fusion: bool | None = option(None, "Query/key norm and rotation.", LATER, flat=False)
    fuse_rope_kvcache_cat_mla: bool | None = option(None, "Latent cache write and rotation.", LATER, flat=False)
    fuse_act_padding: bool | None = option(None, "Norm and padding.", LATER, flat=False)
    fuse_mla_dual_rms_norm: bool | None = option(None, "Paired latent norms.", LATER, flat=False)
    fuse_rope_kvcache: bool | None = option(None, "Rotation and cache write.", LATER, flat=False)
    rope_kvcache_fusion_max_token_num: int = option(256, "Largest batch of that fusion.", LATER, flat=False, low=1)
    fi_allreduce_fusion_max_size_mb: float | None = option(None, "Largest fused message, MiB.", LATER, flat=False)
    sp_min_token_num: int | None = option(None, "Smallest sequence-parallel batch.", LATER, flat=False, low=1)


@group
class CompilationConfig(Group):
    """Compilation and CUDA graphs. On CPU nothing is compiled or captured."""

    mode: int = option(0, "Compile mode 0 to 3, or its name.", LATER, asked=None, flat=False, low=0, high=3,
                       accepts=int | str | None, take=mode_number)  # fmt: skip
    debug_dump_path: str | None = option(None, "Folder for dumps of the compiler.", LATER, flat=False)
    cache_dir: str = option("", "Folder of compiled code.", LATER, flat=False)
    compile_cache_save_format: Literal["binary", "unpacked"] = option("binary", "Form of it.", LATER, flat=False)
    backend: str = option("", "Compiler.", LATER, flat=False)
    custom_ops: tuple[str, ...] = option((), "all, none, +op, -op.", LATER, flat=False)
    ir_enable_torch_wrap: bool | None = option(None, "Wrap operations for torch.", LATER, flat=False)
    splitting_ops: tuple[str, ...] | None = option(None, "Operations outside graphs.", LATER, flat=False)
    compile_mm_encoder: bool = option(False, "Compile the media encoder.", LATER, flat=False)
    cudagraph_mm_encoder: bool = option(False, "Graphs for the media encoder.", LATER, flat=False)
    encoder_cudagraph_token_budgets: tuple[int, ...] = option((), "Its captured sizes.", LATER, flat=False)
    encoder_cudagraph_max_vision_items_per_batch: int = option(0, "Items per graph.", LATER, flat=False, low=0)
    encoder_cudagraph_max_frames_per_batch: int | None = option(None, "Frames per graph.", LATER, flat=False, low=0)
    compile_sizes: tuple[int | str, ...] | None = option(None, "Sizes compiled exactly.", LATER, flat=False)
    compile_ranges_endpoints: tuple[int, ...] | None = option(None, "Ends of size ranges.", LATER, flat=False)
    inductor_compile_config: dict[str, Any] = option({}, "Options of the compiler.", LATER, flat=False)
    inductor_passes: dict[str, str] = option({}, "Further passes.", LATER, flat=False)
    cudagraph_mode: str | None = option(
        None, "Which steps replay a graph; unset is FULL on a GPU: decodes, and steps with prompts up to 2048 tokens.",
        flat=False, choices=tuple(CUDAGraphMode.__members__), take=graph_mode_name,
    )  # fmt: skip
    cudagraph_num_of_warmups: int = option(0, "Runs before a capture.", LATER, flat=False, low=0)
    cudagraph_capture_sizes: tuple[int, ...] | None = option(
        None, "Batch sizes captured; unset is 1, 2, 4, every 8 below 256, every 16 below 512, every 32 from there."
    )
    max_cudagraph_capture_size: int | None = option(
        None, "Largest captured batch; unset is twice max_num_seqs, at most 1024.", low=1
    )
    cudagraph_copy_inputs: bool = option(False, "Copy inputs before a replay.", LATER, flat=False)
    cudagraph_specialize_lora: bool = option(True, "Graphs with and without adapters.", LATER, flat=False)
    use_inductor_graph_partition: bool | None = option(None, "Split in the compiler.", LATER, flat=False)
    pass_config: PassConfig = option(PassConfig, "Fusions.", flat=False)
    dynamic_shapes_config: dict[str, Any] = option({}, "Handling of varying sizes.", LATER, flat=False)
    fast_moe_cold_start: bool | None = option(None, "Start expert models faster.", LATER, flat=False)
