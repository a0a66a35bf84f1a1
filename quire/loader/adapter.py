"""A LoRA adapter's folder, as PEFT writes it, checked against a model and read into host memory.

In: the folder, the model's places (layers/places.py), the limits. Out: `HostAdapter`: what each layer gets. Every
number is checked against the model before a tensor is read: rank, shapes, bytes. Whatever is wrong is one
CheckpointError that names the file and the value. Must not know: slots, engines, requests.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.layers.adapters import ExpertPieces
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.places import AdapterPlace, AdapterPlaces
from quire.loader.files import torch_state
from quire.loader.safetensors_file import SafetensorsFile
from quire.ops.lora import LowRankPiece
from quire.schema.errors import CheckpointError, some

CONFIG, WEIGHTS, TORCH_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_MAX_CONFIG = 1 << 20  # bytes
_SLACK = 1 << 20  # bytes of a .bin file that are not numbers
_MAX_PATTERNS = 4096  # entries of rank_pattern or alpha_pattern: every module is compared with each
_WRAPPER = "base_model.model."
_A, _B = "lora_A", "lora_B"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Keys of a PEFT configuration that change what is computed, and which of their values change nothing.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((None, False), "DoRA adapters (use_dora)"),
    "modules_to_save": ((None, []), "adapters that replace whole modules (modules_to_save)"),
    "bias": ((None, "none"), "adapters with biases (bias)"),
    "lora_bias": ((None, False), "adapters with biases of B (lora_bias)"),
    "target_parameters": ((None, []), "adapters of stacked experts (target_parameters)"),
    "layer_replication": ((None, []), "adapters that repeat layers (layer_replication)"),
    "trainable_token_indices": ((None, [], {}), "adapters with tokens of their own (trainable_token_indices)"),
    "alora_invocation_tokens": ((None, []), "activated adapters (alora_invocation_tokens)"),
    "use_qalora": ((None, False), "QA-LoRA adapters (use_qalora)"),
}
_CHANGES_BASE = ("pissa", "olora", "corda")  # initializations that leave another base model behind


@dataclass
class HostAdapter:
    """What an adapter adds, layer by layer, in host memory."""

    linears: dict[Linear, list[LowRankPiece]] = field(default_factory=dict)
    experts: dict[Experts, dict[int, ExpertPieces]] = field(default_factory=dict)
    num_bytes: int = 0
    digest: str = ""  # of everything above

    def add(self, place: AdapterPlace, piece: LowRankPiece) -> None:
        self.num_bytes += piece.a.nbytes + piece.b.nbytes
        if isinstance(place.layer, Linear):
            self.linears.setdefault(place.layer, []).append(piece)
            return
        own = self.experts.setdefault(place.layer, {})
        before = own.get(place.expert, ExpertPieces())
        own[place.expert] = (
            before._replace(down=(*before.down, piece)) if place.is_down else before._replace(up=(*before.up, piece))
        )


class AdapterLimits(NamedTuple):
    max_rank: int
    dtype: torch.dtype
    targets: tuple[str, ...] | None = None  # last parts of the names that adapters may change; None: any


class AdapterScales(NamedTuple):
    """rank and alpha of a PEFT configuration; patterns are for modules whose name ends so."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_rslora: bool

    def rank_of(self, module: str) -> int:
        return int(_by_ending(self.ranks, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        alpha = float(_by_ending(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.is_rslora else rank)


def read_adapter(path: str, places: AdapterPlaces, limits: AdapterLimits) -> HostAdapter:
    if not os.path.isdir(path):
        raise CheckpointError(f"lora_path {path!r} is not a folder", param="lora_path", value=path)
    scales = _read_config(os.path.join(path, CONFIG), limits)
    file = _open_weights(path, places, limits)
    pairs = _pair_up(file, places, limits, scales)
    adapter, digest = HostAdapter(), blake2b(digest_size=16)
    for module, (place, name_a, name_b) in pairs.items():
        a, b = file.read(name_a), file.read(name_b)
        for name, tensor in ((name_a, a), (name_b, b)):
            if not tensor.isfinite().all():
                raise file.wrong(f"tensor {name!r} holds values that are not finite")
        scale = scales.scale_of(module, len(a))
        a, b = a.to(limits.dtype).contiguous(), places.arrange(place, b).to(limits.dtype)
        adapter.add(place, LowRankPiece(place.start, place.stop, a, b, scale))
        digest.update(repr((module, tuple(a.shape), tuple(b.shape), scale)).encode())
        for tensor in (a, b):
            digest.update(tensor.contiguous().view(torch.uint8).flatten().numpy().data)
    adapter.digest = digest.hexdigest()
    _check_overlaps(file, adapter)
    return adapter


# ---- adapter_config.json


def _read_config(path: str, limits: AdapterLimits) -> AdapterScales:
    raw = _read_json(path)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type is {kind!r}; only LORA is supported", param="peft_type")
    for key, (harmless, what) in _REFUSED.items():
        if raw.get(key) not in harmless:
            raise CheckpointError(
                f"{path}: {what} are not supported; {key} is {raw[key]!r:.100}", param=key, value=str(raw[key])[:100]
            )
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{path}: init_lora_weights is {start!r}: such an adapter belongs to a changed base model; convert it to a "
            "plain LoRA first",
            param="init_lora_weights",
        )
    _check_targets(path, raw.get("target_modules"))
    rank = _check_rank(path, "r", raw.get("r"), limits)
    alpha = _check_alpha(path, "lora_alpha", raw.get("lora_alpha"))
    ranks, alphas = _pattern(path, raw, "rank_pattern"), _pattern(path, raw, "alpha_pattern")
    for key, value in ranks.items():
        _check_rank(path, f"rank_pattern[{key!r}]", value, limits)
    for key, value in alphas.items():
        _check_alpha(path, f"alpha_pattern[{key!r}]", value)
    return AdapterScales(rank, alpha, ranks, alphas, bool(raw.get("use_rslora", False)))


def _read_json(path: str) -> dict[str, Any]:
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait for whoever writes to it
            raise CheckpointError(f"{path} is not a regular file", param="lora_path")
        size = os.path.getsize(path)
        if size > _MAX_CONFIG:
            raise CheckpointError(f"{path} has {size} bytes; an adapter's configuration may have {_MAX_CONFIG}")
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
    except FileNotFoundError:
        raise CheckpointError(f"{os.path.dirname(path)} holds no {CONFIG}", param="lora_path") from None
    except OSError as wrong:
        raise CheckpointError(f"{path} cannot be read: {wrong.strerror}", param="lora_path") from None
    except (ValueError, RecursionError) as wrong:
        raise CheckpointError(f"{path} is not JSON: {wrong}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}, not a mapping")
    return raw


def _check_targets(path: str, targets: object) -> None:
    """A list of names or a pattern of them; the tensors themselves say what is changed."""
    if targets is None or isinstance(targets, str):
        return
    if not isinstance(targets, list) or not targets or not all(isinstance(one, str) for one in targets):
        raise CheckpointError(
            f"{path}: target_modules must be a list of names, or one text such as 'all-linear', got {targets!r:.100}",
            param="target_modules",
        )


def _check_rank(path: str, key: str, rank: object, limits: AdapterLimits) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise CheckpointError(f"{path}: {key} must be an integer above 0, got {rank!r:.100}", param=key)
    if rank > limits.max_rank:
        raise CheckpointError(
            f"{path}: {key} is {rank}, which is more than max_lora_rank ({limits.max_rank})", param=key, value=rank
        )
    return rank


def _check_alpha(path: str, key: str, alpha: object) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{path}: {key} must be a number, got {alpha!r:.100}", param=key)
    return float(alpha)


def _pattern(path: str, raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Only names and ends of names: a regular expression of a file's author may take for ever."""
    entries = raw.get(key) or {}
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: {key} must be a mapping, got {entries!r:.100}", param=key)
    if len(entries) > _MAX_PATTERNS:
        raise CheckpointError(
            f"{path}: {key} has {len(entries)} entries; {_MAX_PATTERNS} are allowed", param=key, value=len(entries)
        )
    plain = {name.replace("\\.", ".").lstrip("^").rstrip("$"): value for name, value in entries.items()}
    for name in plain:
        if not all(char.isalnum() or char in "._-" for char in name):
            raise CheckpointError(f"{path}: {key} has the pattern {name!r:.100}; only names are supported", param=key)
    return plain


def _by_ending(entries: Mapping[str, Any], module: str, default: Any) -> Any:
    for ending, value in entries.items():
        if module == ending or module.endswith(f".{ending}"):
            return value
    return default


# ---- the tensors


class AdapterFile:
    """The tensors of an adapter: their shapes at once, their numbers one by one."""

    def __init__(self, path: str, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.path, self.shapes = path, shapes

    def read(self, name: str) -> Tensor:
        raise NotImplementedError

    def wrong(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {reason}", param="lora_path")


class SafetensorsAdapter(AdapterFile):
    def __init__(self, path: str) -> None:
        self._file = SafetensorsFile(path)
        self._entries = {entry.name: entry for entry in self._file.entries}
        super().__init__(path, {name: (entry.shape, entry.dtype) for name, entry in self._entries.items()})

    def read(self, name: str) -> Tensor:
        for _, tensor in self._file.read(self._entries[name]):
            return tensor.clone()
        raise self.wrong(f"tensor {name!r} is gone")


class TorchAdapter(AdapterFile):
    def __init__(self, path: str) -> None:
        self._state = torch_state(path, "cpu")
        super().__init__(path, {name: (tuple(t.shape), t.dtype) for name, t in self._state.items()})

    def read(self, name: str) -> Tensor:
        return self._state[name].detach().clone()


def _open_weights(folder: str, places: AdapterPlaces, limits: AdapterLimits) -> AdapterFile:
    path = os.path.join(folder, WEIGHTS)
    try:
        if os.path.isfile(path):
            return SafetensorsAdapter(path)
        path = os.path.join(folder, TORCH_WEIGHTS)
        if not os.path.isfile(path):
            raise CheckpointError(f"{folder} holds no {WEIGHTS}, nor {TORCH_WEIGHTS}", param="lora_path")
        most = sum(8 * limits.max_rank * (place.width + place.rows) for place in places.by_name.values()) + _SLACK
        if (size := os.path.getsize(path)) > most:  # such a file is read before its shapes are known
            raise CheckpointError(f"{path} has {size} bytes; an adapter of this model has {most} at most")
        return TorchAdapter(path)
    except OSError as wrong:
        raise CheckpointError(f"{path} cannot be read: {wrong.strerror}", param="lora_path") from None


def _pair_up(
    file: AdapterFile, places: AdapterPlaces, limits: AdapterLimits, scales: AdapterScales
) -> dict[str, tuple[AdapterPlace, str, str]]:
    """Every module with its place and the names of its two tensors, shapes checked."""
    halves: dict[str, dict[str, str]] = {}
    for name in file.shapes:
        module, half = _split(file, name)
        if halves.setdefault(module, {}).setdefault(half, name) != name:
            raise file.wrong(f"{module!r} has {half} twice: {name!r} and {halves[module][half]!r}")
    if not halves:
        raise file.wrong("there are no tensors")
    unknown = [module for module in halves if places.find(module) is None]
    if unknown:
        raise file.wrong(_unknown(unknown, places))
    pairs: dict[str, tuple[AdapterPlace, str, str]] = {}
    seen: dict[str, str] = {}  # place -> module
    for module, own in halves.items():
        if missing := {_A, _B} - own.keys():
            raise file.wrong(f"{module!r} has no {missing.pop()}")
        place = places.find(module)
        assert place is not None
        if (other := seen.setdefault(place.name, module)) != module:
            raise file.wrong(f"{module!r} and {other!r} are the same layer")
        if limits.targets is not None and not any(_ends(module, target) for target in limits.targets):
            raise file.wrong(f"{module!r} is not among lora_target_modules ({', '.join(limits.targets)})")
        _check_shapes(file, module, place, own, limits, scales)
        pairs[module] = place, own[_A], own[_B]
    return pairs


def _split(file: AdapterFile, name: str) -> tuple[str, str]:
    """'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight' -> the module, 'lora_A'."""
    parts = name.removeprefix(_WRAPPER).split(".")
    if parts[-2:-1] == ["default"]:
        del parts[-2]
    if len(parts) > 2 and parts[-1] == "weight" and parts[-2] in (_A, _B):
        return ".".join(parts[:-2]), parts[-2]
    if "lora_magnitude_vector" in name:
        raise file.wrong(f"tensor {name!r:.200}: DoRA adapters are not supported")
    if "lora_embedding" in name:
        raise file.wrong(f"tensor {name!r:.200}: adapters of the embedding are not in this version")
    raise file.wrong(f"tensor {name!r:.200} is neither a {_A}.weight nor a {_B}.weight of a module")


def _unknown(modules: list[str], places: AdapterPlaces) -> str:
    for module in modules:
        if (why := places.refused.get(places.canonical(module))) is not None:
            return f"{module!r}: {why}"
    for module in modules:
        if ".experts" in module:
            return f"{module!r}: adapters of stacked experts are not in this version, only those of each expert"
    return f"the model has no layers {some([repr(module) for module in modules])}"


def _check_shapes(
    file: AdapterFile, module: str, place: AdapterPlace, own: Mapping[str, str], limits: AdapterLimits,
    scales: AdapterScales,
) -> None:  # fmt: skip
    (shape_a, type_a), (shape_b, type_b) = file.shapes[own[_A]], file.shapes[own[_B]]
    rank = shape_a[0] if len(shape_a) == 2 else 0
    if rank > limits.max_rank:
        raise file.wrong(f"{module!r} has rank {rank}, which is more than max_lora_rank ({limits.max_rank})")
    if rank and rank != (expected := scales.rank_of(module)):
        raise file.wrong(f"{module!r} has rank {rank}, but {CONFIG} says {expected}")
    if rank < 1 or shape_a != (rank, place.width) or shape_b != (place.rows, rank):
        raise file.wrong(
            f"{module!r} has A {list(shape_a)} and B {list(shape_b)}; in this model the layer takes "
            f"[rank, {place.width}] and [{place.rows}, rank]: was the adapter trained on another model?"
        )
    for half, dtype in ((_A, type_a), (_B, type_b)):
        if dtype not in _FLOATS:
            raise file.wrong(f"{half} of {module!r} has dtype {str(dtype).removeprefix('torch.')}, not a float")


def _check_overlaps(file: AdapterFile, adapter: HostAdapter) -> None:
    """Rows of a fused matrix, adapted as one and in parts at once."""
    for layer, pieces in adapter.linears.items():
        ordered = sorted(pieces, key=lambda piece: piece.start)
        for before, after in pairwise(ordered):
            if after.start < before.stop:
                raise file.wrong(f"layer {layer.prefix}{layer.fused} is adapted as one and in parts")


def _ends(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")
