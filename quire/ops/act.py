"""Activations, plain (x -> f(x)) and gated ([gate | up] -> f(gate) * up), by the names configs use."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.alone import keep_apart
from quire.ops.op import Kernels, Op, op


@op
def silu(x: Tensor) -> Tensor:
    return F.silu(x)


@op
def gelu(x: Tensor) -> Tensor:
    return F.gelu(
        x.contiguous()
    )  # on CPU torch has a different kernel, with different rounding, for non-contiguous tensors


@op
def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x.contiguous(), approximate="tanh")


@op
def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


@op
def relu(x: Tensor) -> Tensor:
    return F.relu(x)


@op
def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


tanh: Op[[Tensor], Tensor] = op(torch.tanh)
sigmoid: Op[[Tensor], Tensor] = op(torch.sigmoid)
logarithm: Op[[Tensor], Tensor] = op(torch.log)


@op
def softplus(x: Tensor) -> Tensor:
    return F.softplus(x)


PLAIN: dict[str, Op] = {
    "silu": silu, "swish": silu, "gelu": gelu, "gelu_python": gelu, "gelu_new": gelu_tanh, "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh, "gelu_python_tanh": gelu_tanh, "bloom_gelu": gelu_tanh, "gelu_accurate": gelu_tanh,
    "quick_gelu": quick_gelu, "relu": relu, "relu2": relu2, "tanh": tanh,
}  # fmt: skip


def _gated(plain: Op) -> Op:
    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return plain.reference(gate).mul_(up)

    gated.__name__ = f"{plain.name}_gated"
    gated.__doc__ = f"[gate | up] -> {plain.name}(gate) * up"
    return op(gated)


_GATED_OF = {plain.name: _gated(plain) for plain in PLAIN.values()}
GATED: dict[str, Op] = {name: _GATED_OF[plain.name] for name, plain in PLAIN.items()}


def gated_of(name: str) -> Op[[Tensor], Tensor]:
    """The gated activation of a plain one, by the op's name (a value of PLAIN, not a config's spelling)."""
    return _GATED_OF[name]


@op
def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """[gate | up] -> (up + 1) * gate * sigmoid(alpha * gate), gate clamped above and up on both sides."""
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@op
def xielu(x: Tensor, alphas: Tensor) -> Tensor:
    """Quadratic above zero, exponential below, with learned slopes; alphas [2] as stored: before their softplus."""
    positive, negative = F.softplus(alphas).to(x.dtype).unbind()
    beta = 0.5
    below = (torch.expm1(x.clamp(max=-1e-6)) - x) * (beta + negative) + beta * x
    return torch.where(x > 0, positive * x * x + beta * x, below)


for _act in (
    *_GATED_OF.values(),
    silu,
    gelu,
    gelu_tanh,
    quick_gelu,
    tanh,
    sigmoid,
    softplus,
    logarithm,
    xielu,
    clamped_swiglu,
):
    keep_apart(_act)


def known(name: str) -> bool:
    return name in PLAIN or name == "xielu"


def plain_on(name: str, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    return kernels.of(PLAIN[name])


def gated_on(name: str, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    return kernels.of(GATED[name])
