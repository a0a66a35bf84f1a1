"""What does not go together with an encoder-decoder model: refused by name, before anything is loaded.

Which of these models are declared is known where they are built (models/zoo). Must not know: how they are computed.
"""

from collections.abc import Mapping
from typing import Any

from quire.config.engine import EngineConfig
from quire.schema.errors import NotBuiltError


def check_encoder_decoder(requested: Mapping[str, Any], config: EngineConfig) -> EngineConfig:
    """NotBuiltError for options of which these models can make no use yet."""
    model, parallel, media = config.model_config, config.parallel_config, config.model_config.multimodal_config
    if not model.is_encoder_decoder:
        return config
    refused: dict[str, Any] = {
        "runner": model.runner if model.is_pooling else None,
        "device": config.device_config.device if config.device_config.device != "cpu" else None,
        "tensor_parallel_size": parallel.tensor_parallel_size if parallel.tensor_parallel_size > 1 else None,
        "pipeline_parallel_size": parallel.pipeline_parallel_size if parallel.pipeline_parallel_size > 1 else None,
        "enable_lora": config.enable_lora or None,
        "speculative_config": None if config.speculative_config is None else "given",
        "enable_prompt_embeds": model.enable_prompt_embeds or None,
        "language_model_only": None if media is None else media.language_model_only or None,
        "model_impl": model.model_impl if model.model_impl == "transformers" or model.model_class_overrides else None,
    }
    for name, value in refused.items():
        if value is not None:
            raise NotBuiltError(
                f"{model.architecture} is an encoder-decoder model, for which {name}={value!r} is not built: these run "
                "on one CPU worker with Quire's own code",
                param=name,
            )
    return config
