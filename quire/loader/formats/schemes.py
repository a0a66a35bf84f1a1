"""How inputs of a coded matrix are rounded, as the configuration of its checkpoint says.

compressed-tensors lists schemes (`config_groups`), and so does Quark, by patterns of module names; which one a matrix
belongs to is told by its own tensors: the scheme whose weights are of that type and have that many bits, and of several
the one that names the module. Must not know: shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from quire.checkpoint.quantization import Quantization, matches_pattern
from quire.loader.formats.parts import Parts
from quire.quant.coded import PLAIN_INPUT, InputCoding


def input_coding(parts: Parts, about: Quantization, weight_form: str) -> InputCoding:
    """Without the scale itself, which is not read yet. CheckpointError: it should be in the file and is not."""
    if about.family == "compressed-tensors":
        schemes = weight_schemes(about, weight_form)
        return _of_scheme(parts, [scheme for scheme in schemes if names_module(scheme, parts.module)] or schemes)
    if about.family == "quark":
        return _of_scheme(parts, [scheme for scheme in weight_schemes(about, weight_form) if covers(scheme, parts)][:1])
    if about.input_form == "none":
        return PLAIN_INPUT
    if about.static_inputs:
        parts.need("activation_scale" if "activation_scale" in parts else "input_scale")
        return InputCoding(about.input_form, "static")
    if "input_scale" in parts:
        return InputCoding(about.input_form, "static")
    return InputCoding(about.input_form, "token" if about.block is None else "group")


def weight_schemes(about: Quantization, form: str, bits: int | None = None) -> list[Mapping[str, Any]]:
    """Schemes whose weights are of this form: fp8, fp4, int8, or int with so many bits."""
    expected = {"fp8": ("float", 8), "fp4": ("float", 4), "int8": ("int", None)}.get(form, ("int", bits))
    matches = []
    for scheme in about.schemes:
        weights = scheme.get("weights") or {}
        if weights.get("type", "int") == expected[0] and expected[1] in (None, weights.get("num_bits")):
            matches.append(scheme)
    return matches


def names_module(scheme: Mapping[str, Any], module: str) -> bool:
    """Of compressed-tensors, whose targets are names or patterns of names; one may be a class, which names nothing."""
    return any(
        matches_pattern(target[3:], module) if target.startswith("re:") else target == module
        for target in scheme.get("targets") or ()
    )


def covers(scheme: Mapping[str, Any], parts: Parts) -> bool:
    """Whether a scheme names this module: of Quark, whose targets are patterns of file names."""
    return any(fnmatchcase(parts.module, pattern) for pattern in scheme["targets"])


def _of_scheme(parts: Parts, schemes: list[Mapping[str, Any]]) -> InputCoding:
    inputs = next((scheme.get("input_activations") for scheme in schemes if scheme.get("input_activations")), None)
    if not isinstance(inputs, Mapping):
        return PLAIN_INPUT
    is_float, bits = inputs.get("type", "int") == "float", inputs.get("num_bits", 8)
    form = ("fp4" if bits == 4 else "fp8") if is_float else "int8"
    if inputs.get("dynamic") is False:
        if "input_scale" not in parts and not all(scheme.get("input_activations") for scheme in schemes):
            return PLAIN_INPUT  # the matrix is of a scheme that does not round inputs
        parts.need("input_scale")
        return InputCoding(form, "static")
    by = {"tensor": "tensor", "group": "group", "tensor_group": "group"}.get(str(inputs.get("strategy")), "token")
    return InputCoding(form, by)
