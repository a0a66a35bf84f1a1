"""How the device computes: attention, kernels, compilation and CUDA graphs.

Declarations only (see option.py). No model is compiled: kernels are handwritten, CUDA graphs hide launch overhead.
"""

import enum
from typing import Any

from quire.config.option import LATER, Group, group, option, unavailable
from quire.config.unavailable import reason
from quire.schema.errors import ConfigError


class CompilationMode(enum.IntEnum):
    """How the model is compiled."""

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


def _member_name(kind: type[enum.Enum], value: str, param: str) -> str:
    if value.upper() not in kind.__members__:
        names = ", ".join(kind.__members__)
        raise ConfigError(f"{param} {value!r} is not one of {names}", param=param, value=value)
    return value.upper()


def mode_number(value: Any) -> Any:
    """A compile mode by number, name (any case) or member."""
    if isinstance(value, str) and not value.lstrip("-").isdigit():
        value = CompilationMode[_member_name(CompilationMode, value, "compilation_config.mode")]
    return int(value) if isinstance(value, str | enum.IntEnum) else value


def graph_mode_name(value: Any) -> Any:
    """A CUDA graph mode by name (any case) or member, as its name: plain data that may cross processes."""
    if isinstance(value, CUDAGraphMode):
        return value.name
    return _member_name(CUDAGraphMode, value, "cudagraph_mode") if isinstance(value, str) else value


def upper(value: Any) -> Any:
    """Kernel names are upper case; 'auto' is the same as None."""
    if isinstance(value, str):
        return None if value.lower() == "auto" else value.upper()
    return value.name if isinstance(value, enum.Enum) else value


def snake(value: Any) -> Any:
    return value.lower().replace("-", "_") if isinstance(value, str) else value


# vLLM's kernels for the same attention; naming one is a hint without effect.
_ATTENTION = (
    "FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TREE_ATTN", "XFORMERS", "FLASH_ATTN_VLLM_V1", "FLASHINFER_VLLM_V1",
    "TRITON_ATTN_VLLM_V1", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA",
)  # fmt: skip
ATTENTION_NAMES: dict[str, Any] = dict(
    ready=("TRITON_ATTN", "CPU_ATTN", "TORCH_SDPA"), hints=_ATTENTION, take=upper, why=reason("own-kernels")
)


@group
class AttentionConfig(Group):
    """Which attention kernel runs."""

    backend: str | None = option(
        None, "Attention kernel; unset is TRITON_ATTN on a GPU and CPU_ATTN on CPU.", LATER, name="attention_backend",
        **ATTENTION_NAMES,
    )  # fmt: skip
    mla_prefill_backend: str | None = unavailable(take=upper)


@group
class MambaConfig(Group):
    """Kernels of state-space layers."""

    backend: str = unavailable(take=upper)


@group
class KernelConfig(Group):
    """Which implementation of an operation runs."""

    moe_backend: str = unavailable(take=snake)
    linear_backend: str = unavailable(take=snake)
    sparse_indexer_topk_backend: str = unavailable(take=snake)


@group
class PassConfig(Group):
    """Fusions of the compiler."""


@group
class CompilationConfig(Group):
    """Compilation and CUDA graphs. On CPU nothing is compiled or captured."""

    mode: int = unavailable(accepts=int | str | None, take=mode_number)
    cudagraph_mode: str | None = option(
        None, "Which steps replay a graph; unset is FULL on a GPU: decodes, and steps with prompts up to 2048 tokens.",
        flat=False, choices=tuple(CUDAGraphMode.__members__), take=graph_mode_name,
    )  # fmt: skip
    cudagraph_capture_sizes: tuple[int, ...] | None = option(
        None, "Batch sizes captured; unset is 1, 2, 4, every 8 below 256, every 16 below 512, every 32 from there."
    )
    max_cudagraph_capture_size: int | None = option(
        None, "Largest captured batch; unset is twice max_num_seqs, at most 1024.", low=1
    )
    pass_config: PassConfig = option(PassConfig, "Fusions.", flat=False)
