"""MobileNet V5 beside timm: names and shapes of all weights, and outputs, as timm 1.0.31 gave them for the same ones.

timm wants torchvision, so what it gave is written down here. Where both are installed, `python -m
tests.hf_models.test_mobilenet` prints it anew.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.hf_models.mobilenet import MobileNetV5, mobilenet_of
from quire.schema.errors import ConfigError

NAMES = (548, 2875273928)  # how many weights the released size has, and the checksum of their names and shapes
# model_args, size of the pixels -> twelve numbers of the output
CASES: list[tuple[dict[str, Any], tuple[int, int], tuple[float, ...]]] = [
    ({"channel_multiplier": 0.0625, "msfa_output_resolution": 4}, (64, 64), (
        0.3347, 0.28781, -0.42875, 1.27512, -0.90297, -0.58768, 0.37646, -1.31429, 0.78618, -0.77374, 0.1786, 0.41534,
    )),  # as large as the last stage but one
    ({"channel_multiplier": 0.0625, "msfa_output_resolution": 2}, (64, 64), (
        0.17555, -0.11658, -2.15764, 1.69332, -0.04018, -0.06011, -1.13786, -0.55866, 0.86813, 0.10791, 0.28859,
        0.39822,
    )),  # pooled
    ({"channel_multiplier": 0.0625, "msfa_output_resolution": 3}, (70, 90), (
        -0.0556, -0.32057, -1.53721, 1.02399, -0.07763, 0.41045, 0.30666, 0.03293, 0.95547, -0.94774, 0.00232, -0.11554,
    )),  # drawn over; odd sizes
]  # fmt: skip


def fill(module: nn.Module) -> None:
    """Every weight by its name: layer scales large enough that every block counts."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            drawn = torch.rand(weight.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            spread = (6.0 / weight[0].numel()) ** 0.5 if weight.ndim > 1 else 1.0
            weight.copy_((drawn - 0.5) * spread if weight.ndim > 1 else 0.3 + drawn * spread)


def pixels_of(size: tuple[int, int]) -> Tensor:
    return torch.rand((1, 3, *size), generator=torch.Generator().manual_seed(5))


def some(output: Tensor) -> tuple[float, ...]:
    flat = output.flatten()
    return tuple(round(float(flat[place * (len(flat) - 1) // 11]), 5) for place in range(12))


def named(module: nn.Module) -> tuple[int, int]:
    shapes = sorted((name, tuple(weight.shape)) for name, weight in module.state_dict().items())
    return len(shapes), zlib.crc32(repr(shapes).encode())


def test_names_are_those_of_timm() -> None:
    with torch.device("meta"):
        assert named(MobileNetV5()) == NAMES


@pytest.mark.parametrize(("arguments", "size", "expected"), CASES)
def test_outputs_are_those_of_timm(
    arguments: dict[str, Any], size: tuple[int, int], expected: tuple[float, ...]
) -> None:
    module = mobilenet_of(arguments).eval()
    fill(module)
    with torch.inference_mode():
        output = module(pixels_of(size))
    side = arguments["msfa_output_resolution"]
    assert output.shape == (1, 2048, side, side)
    assert some(output) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("arguments", [{"depth": 3}, {"msfa_output_resolution": 0}, {"channel_multiplier": "2"}])
def test_other_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"vision_config\.model_args is"):
        mobilenet_of(arguments)


def record() -> None:
    import timm

    print("NAMES =", named(timm.create_model("mobilenetv5_300m_enc")))
    for arguments, size, _ in CASES:
        module = timm.create_model("mobilenetv5_300m_enc", **arguments).eval()
        fill(module)
        with torch.inference_mode():
            print(arguments, size, some(module(pixels_of(size))))


if __name__ == "__main__":
    record()
