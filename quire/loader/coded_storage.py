"""Which schemes store a model's weights as codes in a device's memory; imported only where some are.

In: a resolved configuration. Out: a Storage. Must not know: files, tensors, architectures.
"""

from __future__ import annotations

import torch

from quire.base.log import logger
from quire.checkpoint.quantization import read_quantization
from quire.config.engine import EngineConfig
from quire.loader.formats.expected import expected_layout
from quire.loader.online import coder_of, dummy_coder, head_coder
from quire.ops.coded import coded_linear
from quire.ops.op import Kernels
from quire.quant.arena import Arena
from quire.quant.coded_experts import CodedExpertScheme, CodeLayout, has_kernels
from quire.quant.coded_scheme import CodedChoice, CodedScheme
from quire.quant.plain import plain_storage
from quire.quant.scheme import Storage
from quire.quant.shard import ALONE, ShardGroup

_log = logger(__name__)


def coded_storage(config: EngineConfig, kernels: Kernels, group: ShardGroup = ALONE) -> Storage:
    """Codes in the device's memory: those of the checkpoint, or what numbers are rounded to while they are loaded."""
    about, arena = config.model_config, Arena(kernels.device)
    dtype = getattr(torch, about.dtype)
    matrices, experts = _matrix_scheme(config, arena, kernels), _expert_scheme(config, arena, kernels)
    if matrices is None and experts is None:
        return plain_storage(dtype, kernels, group)
    head = None
    if matrices is not None and about.head_form:
        coder = head_coder(about.head_form, rounds=about.weight_form == "fp8")
        head = CodedScheme(dtype, arena, kernels, coder)
    outer = config.load_config.load_format == "gguf"  # a small share of it in 16 bits would be a large one of a file
    choice = CodedChoice(dtype, arena, kernels, matrices, experts, head, outer=outer)
    return Storage(dtype, arena, kernels, choice, group)


def _matrix_scheme(config: EngineConfig, arena: Arena, kernels: Kernels) -> CodedScheme | None:
    """None: matrices outside of experts are plain numbers."""
    about = config.model_config
    dtype, coder = getattr(torch, about.dtype), coder_of(about.weight_form)
    if dtype.itemsize != 2 or (kernels.of(coded_linear) is coded_linear.reference and kernels.device.type != "cpu"):
        _log.warning(
            "quantization=%s: matrices that are not experts are kept in %s: kernels for codes need 16 bits and Triton",
            about.quantization, about.dtype,
        )  # fmt: skip
        return None
    quantization = read_quantization(about.hf_config)
    if coder is None and quantization is not None and config.load_config.load_format == "dummy":
        coder = dummy_coder(quantization)
    return CodedScheme(dtype, arena, kernels, coder)


def _expert_scheme(config: EngineConfig, arena: Arena, kernels: Kernels) -> CodedExpertScheme | None:
    """None: experts are plain numbers."""
    about = config.model_config
    if about.weight_form not in ("stored", "fp8") or not has_kernels(kernels):
        return None
    dtype = getattr(torch, about.dtype)
    return CodedExpertScheme(dtype, arena, kernels, _expected_layout(config), rounds=about.weight_form == "fp8")


def _expected_layout(config: EngineConfig) -> CodeLayout | None:
    """Of experts that no file fills; with files, their tensors say it."""
    about = read_quantization(config.model_config.hf_config)
    return None if about is None or config.load_config.load_format != "dummy" else expected_layout(about)
