"""Quire: an LLM inference and serving engine. The public names, loaded on first use from one table.

Importing this package imports nothing else, so that a command or a worker pays only for what it uses.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "LLM": "quire.llm.offline:LLM",
    "LLMEngine": "quire.llm.engine:LLMEngine",
    "AsyncLLM": "quire.llm.online:AsyncLLM",
    "AsyncLLMEngine": "quire.llm.online:AsyncLLM",
    "EngineArgs": "quire.config:EngineArgs",
    "AsyncEngineArgs": "quire.config:AsyncEngineArgs",
    "SamplingParams": "quire.schema.params:SamplingParams",
    "RequestOutputKind": "quire.schema.params:RequestOutputKind",
    "PoolingParams": "quire.schema.params:PoolingParams",
    "BeamSearchParams": "quire.schema.params:BeamSearchParams",
    "StructuredOutputsParams": "quire.schema.params:StructuredOutputsParams",
    "RequestOutput": "quire.schema.outputs:RequestOutput",
    "CompletionOutput": "quire.schema.outputs:CompletionOutput",
    "PoolingOutput": "quire.schema.outputs:PoolingOutput",
    "PoolingRequestOutput": "quire.schema.outputs:PoolingRequestOutput",
    "EmbeddingOutput": "quire.schema.outputs:EmbeddingOutput",
    "EmbeddingRequestOutput": "quire.schema.outputs:EmbeddingRequestOutput",
    "ClassificationOutput": "quire.schema.outputs:ClassificationOutput",
    "ClassificationRequestOutput": "quire.schema.outputs:ClassificationRequestOutput",
    "ScoringOutput": "quire.schema.outputs:ScoringOutput",
    "ScoringRequestOutput": "quire.schema.outputs:ScoringRequestOutput",
    "TextPrompt": "quire.schema.prompt:TextPrompt",
    "TokensPrompt": "quire.schema.prompt:TokensPrompt",
    "PromptType": "quire.schema.prompt:PromptType",
    "ExplicitEncoderDecoderPrompt": "quire.schema.prompt:ExplicitEncoderDecoderPrompt",
    "build_explicit_enc_dec_prompt": "quire.schema.prompt:build_explicit_enc_dec_prompt",
    "to_enc_dec_tuple_list": "quire.schema.prompt:to_enc_dec_tuple_list",
    "zip_enc_dec_prompts": "quire.schema.prompt:zip_enc_dec_prompts",
    "LoRARequest": "quire.schema.adapters:LoRARequest",
    "ModelRegistry": "quire.config.outside:ModelRegistry",
}

__all__ = ["__version__", *_NAMES]
__version__ = "0.1.0"  # pyproject.toml reads it here, so that a copy that was never installed knows it too


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"quire.{name} does not exist")
    value = _import(_NAMES[name])
    globals()[name] = value
    return value


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
