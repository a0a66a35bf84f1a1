"""adapter_config.json of a LoRA adapter, as PEFT writes it: checked, and what computing needs of it.

In: the file, the limits. Out: `AdapterConfig`. Whatever is wrong or not supported is one CheckpointError that names the
file, the key and the value. Must not know: models, tensors.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from quire.schema.errors import CheckpointError

CONFIG = "adapter_config.json"
_MAX_BYTES = 1 << 20
_MAX_PATTERNS = 4096  # entries of rank_pattern or alpha_pattern: every module is compared with each
_MAX_PARAMETERS = 16  # last names in target_parameters: looked for in every module; experts have two or three
_MAX_ALPHA = 1e30  # kernels scale by a float32
# Keys of a PEFT configuration that change what is computed, and which of their values change nothing.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((None, False), "DoRA adapters (use_dora)"),
    "modules_to_save": ((None, []), "adapters that replace whole modules (modules_to_save)"),
    "bias": ((None, "none"), "adapters with biases (bias)"),
    "lora_bias": ((None, False), "adapters with biases of B (lora_bias)"),
    "layer_replication": ((None, []), "adapters that repeat layers (layer_replication)"),
    "trainable_token_indices": ((None, [], {}), "adapters with tokens of their own (trainable_token_indices)"),
    "alora_invocation_tokens": ((None, []), "activated adapters (alora_invocation_tokens)"),
    "use_qalora": ((None, False), "QA-LoRA adapters (use_qalora)"),
    "use_bdlora": ((None, False), "block-diagonal adapters (use_bdlora)"),
    "arrow_config": ((None,), "adapters that route between others (arrow_config)"),
    "kasa_config": ((None,), "KaSA adapters (kasa_config)"),
    "monteclora_config": ((None,), "MonteCLoRA adapters (monteclora_config)"),
}
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga")  # initializations that leave another base model behind


class AdapterLimits(NamedTuple):
    max_rank: int
    dtype: torch.dtype
    targets: tuple[str, ...] | None = None  # last parts of the names that adapters may change; None: any


class AdapterConfig(NamedTuple):
    """rank and alpha of a PEFT configuration; patterns are for modules whose name ends so."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_rslora: bool
    parameters: tuple[str, ...] = ()  # last names of the parameters of stacked experts that are adapted
    version: tuple[int, ...] = ()  # of the PEFT that wrote it; (): unknown

    def rank_of(self, module: str) -> int:
        return int(_by_ending(self.ranks, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        alpha = float(_by_ending(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.is_rslora else rank)


def read_config(path: str, limits: AdapterLimits) -> AdapterConfig:
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
    parameters = _parameters(path, raw)
    _check_targets(path, raw.get("target_modules"), may_be_empty=bool(parameters))
    rank = _check_rank(path, "r", raw.get("r"), limits)
    alpha = _check_alpha(path, "lora_alpha", raw.get("lora_alpha"))
    ranks, alphas = _pattern(path, raw, "rank_pattern"), _pattern(path, raw, "alpha_pattern")
    for key, value in ranks.items():
        _check_rank(path, f"rank_pattern[{key!r}]", value, limits)
    for key, value in alphas.items():
        _check_alpha(path, f"alpha_pattern[{key!r}]", value)
    return AdapterConfig(rank, alpha, ranks, alphas, bool(raw.get("use_rslora", False)), parameters, _version(raw))


def _read_json(path: str) -> dict[str, Any]:
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait for whoever writes to it
            raise CheckpointError(f"{path} is not a regular file", param="lora_path")
        size = os.path.getsize(path)
        if size > _MAX_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; an adapter's configuration may have {_MAX_BYTES}")
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


def _check_targets(path: str, targets: object, *, may_be_empty: bool) -> None:
    """A list of names or a pattern of them; the tensors themselves say what is changed."""
    if targets is None or isinstance(targets, str):
        return
    is_list = isinstance(targets, list) and all(isinstance(one, str) for one in targets)
    if not is_list or not (targets or may_be_empty):
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
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not -_MAX_ALPHA <= alpha <= _MAX_ALPHA:
        raise CheckpointError(
            f"{path}: {key} must be a number from {-_MAX_ALPHA:g} to {_MAX_ALPHA:g}, got {alpha!r:.100}", param=key
        )
    return float(alpha)


def _pattern(path: str, raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Only names and ends of names, also written as '.*\\.name' (as PEFT does itself for stacked experts): a regular
    expression of a file's author may take for ever."""
    entries = raw.get(key) or {}
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: {key} must be a mapping, got {entries!r:.100}", param=key)
    if len(entries) > _MAX_PATTERNS:
        raise CheckpointError(
            f"{path}: {key} has {len(entries)} entries; {_MAX_PATTERNS} are allowed", param=key, value=len(entries)
        )
    plain = {_plain_name(name): value for name, value in entries.items()}
    for name in plain:
        if not all(char.isalnum() or char in "._-" for char in name):
            raise CheckpointError(f"{path}: {key} has the pattern {name!r:.100}; only names are supported", param=key)
    return plain


def _plain_name(pattern: str) -> str:
    name = pattern.replace("\\.", ".").removeprefix("^").removesuffix("$")
    return name.removeprefix(".*").removeprefix(".") if name.startswith(".*") else name


def _by_ending(entries: Mapping[str, Any], module: str, default: Any) -> Any:
    for ending, value in entries.items():
        if module == ending or module.endswith(f".{ending}"):
            return value
    return default


def _parameters(path: str, raw: Mapping[str, Any]) -> tuple[str, ...]:
    """target_parameters ['mlp.experts.gate_up_proj', ...] -> ('gate_up_proj', ...)."""
    names = raw.get("target_parameters") or []
    if not isinstance(names, list) or not all(isinstance(one, str) and one for one in names):
        raise CheckpointError(
            f"{path}: target_parameters must be a list of names, got {names!r:.100}", param="target_parameters"
        )
    if len(names) > _MAX_PATTERNS:
        raise CheckpointError(
            f"{path}: target_parameters has {len(names)} entries; {_MAX_PATTERNS} are allowed",
            param="target_parameters",
            value=len(names),
        )
    last = tuple(dict.fromkeys(name.rpartition(".")[2] for name in names))
    if len(last) > _MAX_PARAMETERS:
        raise CheckpointError(
            f"{path}: target_parameters ends in {len(last)} different names; {_MAX_PARAMETERS} are allowed",
            param="target_parameters",
            value=len(last),
        )
    return last


def _version(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """'0.19.1', '0.19.1.dev0@abc' -> (0, 19, 1)."""
    start = re.match(r"\d{1,6}(\.\d{1,6}){1,2}", str(raw.get("peft_version", "")))
    return tuple(int(part) for part in start.group().split(".")) if start else ()
