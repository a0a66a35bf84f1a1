"""From a checkpoint's configuration to a class of transformers, of a registered plug-in, or of the checkpoint itself.

In: the raw config.json, the folder, and whether its Python code may run. Out: a Fallback that can create and load the
module. No code of a checkpoint is executed without trust_remote_code. Must not know: attention, steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from quire.hf_models.fallback import Fallback
from quire.schema.errors import CheckpointError, ConfigError, QuireError, some

_AUTO = "AutoModelForCausalLM"


def build_fallback(
    raw: Mapping[str, Any],
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    trust: bool = False,
    registered: type | None = None,
) -> Fallback:
    """`registered` is a registered class; None: find one by the configuration."""
    if path.endswith(".gguf"):
        raise ConfigError(
            f"{path} is a GGUF file of an architecture without a declaration; transformers' code needs a folder in its "
            "own form",
            param="model",
        )
    config = config_of(raw, path, trust, registered)
    kind = registered or class_of(raw, config, path, trust)

    def make() -> nn.Module:
        with quiet(), torch.device(device), default_dtype(dtype):
            return kind(config)

    def read(folder: str, safetensors: bool) -> nn.Module:
        return read_module(kind, config, folder, dtype, safetensors).to(device)

    return Fallback(kind.__name__, make, read, max_model_len=max_model_len)


def config_of(raw: Mapping[str, Any], path: str, trust: bool, registered: type | None = None) -> PreTrainedConfig:
    """The configuration object of the class."""
    code_ref = (raw.get("auto_map") or {}).get("AutoConfig")
    model_type = str(raw.get("model_type") or "")
    if registered is not None and isinstance(vars(registered).get("config_class"), type):
        kind = vars(registered)["config_class"]
    elif code_ref and trust:
        kind = get_class_from_dynamic_module(code_ref, path)
    elif model_type in CONFIG_MAPPING:
        kind = CONFIG_MAPPING[model_type]
    elif code_ref:
        raise needs_trust(raw, path)
    elif registered is not None:
        kind = PreTrainedConfig
    else:
        raise ConfigError(
            f"transformers {transformers.__version__} knows no model_type {model_type!r}, and no declaration or "
            f"registered class serves {', '.join(raw.get('architectures') or ['it'])}",
            param="model",
        )
    try:
        with quiet():
            return kind.from_dict(kind._decode_special_floats(dict(raw)))
    except QuireError:
        raise
    except Exception as wrong:  # noqa: BLE001  # a checkpoint's own class may raise anything
        raise ConfigError(f"{kind.__name__} refuses this configuration: {wrong}", param="hf_overrides") from None


def class_of(raw: Mapping[str, Any], config: PreTrainedConfig, path: str, trust: bool) -> type[PreTrainedModel]:
    names = list(raw.get("architectures") or ())
    code_ref = (raw.get("auto_map") or {}).get(_AUTO)
    if code_ref and trust:
        remote: type[PreTrainedModel] = get_class_from_dynamic_module(code_ref, path)
        return remote
    for name in names:
        kind = transformers.__dict__.get(name) or (hasattr(transformers, name) and getattr(transformers, name))
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
            return kind
    if code_ref:
        raise needs_trust(raw, path)
    if type(config) in AutoModelForCausalLM._model_mapping:
        mapped: Any = AutoModelForCausalLM._model_mapping[type(config)]
        known: type[PreTrainedModel] = mapped
        return known
    raise ConfigError(
        f"neither Quire nor transformers {transformers.__version__} has a causal language model "
        f"{' or '.join(map(repr, names)) or 'of this type'}",
        param="model",
    )


def needs_trust(raw: Mapping[str, Any], path: str) -> ConfigError:
    return ConfigError(
        f"{path} contains Python code for {', '.join(raw.get('architectures') or ['its model'])}. It is only "
        "run on request: trust_remote_code=True (--trust-remote-code), if you trust its origin",
        param="trust_remote_code",
    )


def read_module(
    kind: type[PreTrainedModel], config: PreTrainedConfig, folder: str, dtype: torch.dtype, safetensors: bool = True
) -> nn.Module:
    """With transformers' loader, which knows the names in every class's checkpoints; no tensor may be left over."""
    if not hasattr(kind, "from_pretrained"):
        raise ConfigError(
            f"{kind.__name__} does not have the interface of a transformers model: it has no from_pretrained"
        )
    try:
        with quiet():
            read: Any = kind.from_pretrained
            model, report = read(
                folder, config=config, dtype=dtype, output_loading_info=True, local_files_only=True,
                attn_implementation="eager", use_safetensors=safetensors, weights_only=True,
            )  # fmt: skip
    except Exception as wrong:  # noqa: BLE001  # damaged files end in errors of many kinds
        reason = f"{type(wrong).__name__}: {(str(wrong).strip() or 'no message').splitlines()[0]}"
        raise CheckpointError(f"{folder} cannot be read as {kind.__name__}: {reason}") from None
    problems = []
    for what, text in (("missing_keys", "are missing"), ("unexpected_keys", "are unexpected")):
        if names := sorted(report.get(what) or ()):
            problems.append(f"{len(names)} tensors {text} ({some(names)})")
    if wrong_shapes := report.get("mismatched_keys"):
        problems.append(f"{len(wrong_shapes)} have wrong shapes ({some([str(one) for one in wrong_shapes])})")
    if problems:
        raise CheckpointError(f"{folder} does not fit {kind.__name__}: {'; '.join(problems)}")
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and advice."""
    level = transformers.logging.get_verbosity()
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if shown:
            transformers.logging.enable_progress_bar()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
