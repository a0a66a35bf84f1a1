"""The tool and reasoning parsers by name, and the files that add to them.

A tool parser is a ToolFormat, a reasoning parser a ReasoningFormat; either may also be a class in the form of vLLM's
plug-ins (plugin.py). In: a name, or the path of a Python file that registers further ones. Must not know: requests.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from quire.base.registry import Registry
from quire.schema.errors import ConfigError

_HERE = "quire.text.parse.tools"
TOOL_PARSERS = Registry(
    "tool parser",
    {
        "apertus": f"{_HERE}.apertus:FORMAT",
        "cohere_command3": f"{_HERE}.cohere:FORMAT",
        "cohere_command4": f"{_HERE}.cohere:FORMAT",
        "deepseek_v3": f"{_HERE}.deepseek:FORMAT_V3",
        "deepseek_v31": f"{_HERE}.deepseek:FORMAT_V31",
        "deepseek_v32": f"{_HERE}.deepseek:FORMAT_V32",
        "deepseek_v4": f"{_HERE}.deepseek:FORMAT_V4",
        "deepseek_v41": f"{_HERE}.deepseek:FORMAT_V41",
        "dots": f"{_HERE}.dots:FORMAT",
        "ernie45": f"{_HERE}.ernie45:FORMAT",
        "functiongemma": f"{_HERE}.gemma:FUNCTION_GEMMA",
        "gemma4": f"{_HERE}.gemma:GEMMA_4",
        "gigachat3": f"{_HERE}.gigachat3:FORMAT",
        "glm45": f"{_HERE}.glm:FORMAT",
        "glm47": f"{_HERE}.glm:FORMAT_47",
        "granite": f"{_HERE}.granite:FORMAT",
        "granite-20b-fc": f"{_HERE}.granite:FORMAT_20B",
        "granite4": f"{_HERE}.granite:FORMAT_4",
        "hermes": f"{_HERE}.hermes:FORMAT",
        "hf": f"{_HERE}.hf:FORMAT",
        "hunyuan_a13b": f"{_HERE}.hunyuan:FORMAT",
        "hy_v3": f"{_HERE}.hy_v3:FORMAT",
        "internlm": f"{_HERE}.internlm:FORMAT",
        "jamba": f"{_HERE}.jamba:FORMAT",
        "kimi_k2": f"{_HERE}.kimi_k2:FORMAT",
        "kimi_k3": f"{_HERE}.kimi_k3:FORMAT",
        "lfm2": f"{_HERE}.lfm2:FORMAT",
        "ling3": f"{_HERE}.glm:FORMAT_47",
        "llama3_json": f"{_HERE}.llama:FORMAT",
        "llama4_json": f"{_HERE}.llama:FORMAT",
        "llama4_pythonic": f"{_HERE}.llama:PYTHONIC",
        "longcat": f"{_HERE}.longcat:FORMAT",
        "mimo": f"{_HERE}.mimo:FORMAT",
        "minicpm5": f"{_HERE}.minicpm5:FORMAT",
        "minimax": f"{_HERE}.minimax:FORMAT",
        "minimax_m2": f"{_HERE}.minimax:FORMAT_M2",
        "minimax_m3": f"{_HERE}.minimax_m3:FORMAT",
        "mistral": f"{_HERE}.mistral:FORMAT",
        "olmo3": f"{_HERE}.olmo3:FORMAT",
        "openai": f"{_HERE}.harmony:FORMAT",
        "phi4_mini_json": f"{_HERE}.phi4_mini:FORMAT",
        "poolside_v1": f"{_HERE}.glm:FORMAT_47",
        "pythonic": f"{_HERE}.pythonic:FORMAT",
        "qwen3_coder": f"{_HERE}.qwen3:FORMAT",
        "qwen3_xml": f"{_HERE}.qwen3:FORMAT",
        "seed_oss": f"{_HERE}.seed_oss:FORMAT",
        "solar_open2": f"{_HERE}.solar_open2:FORMAT",
        "step3": f"{_HERE}.step3:FORMAT",
        "step3p5": f"{_HERE}.step3:FORMAT_3P5",
        "xlam": f"{_HERE}.xlam:FORMAT",
    },
    group="quire.tool_parsers",
)
_TABLE = "quire.text.parse.reasoning_table"
REASONING_PARSERS = Registry(
    "reasoning parser",
    {
        name: f"{_TABLE}:{name.upper()}"
        for name in (
            "apertus", "cohere_command3", "cohere_command4", "deepseek_r1", "deepseek_v3", "deepseek_v4",
            "deepseek_v41", "ernie45", "gemma4", "glm45", "glm47", "gptoss", "granite", "holo2", "hunyuan_a13b",
            "hy_v3", "identity", "kimi_k2", "kimi_k3", "ling3", "mimo", "minimax_m2", "minimax_m2_append_think",
            "minimax_m3", "mistral", "nemotron_v3", "olmo3", "openai_gptoss", "poolside_v1", "qwen3", "seed_oss",
            "solar_open2", "step3", "step3p5",
        )
    },
    group="quire.reasoning_parsers",
)  # fmt: skip


def find_tool_parser(name: str) -> Any:
    return _find(TOOL_PARSERS, name, "tool_call_parser")


def find_reasoning_parser(name: str) -> Any:
    return _find(REASONING_PARSERS, name, "reasoning_parser")


def _find(registry: Registry, name: str, option: str) -> Any:
    try:
        return registry.get(name)
    except LookupError as wrong:
        raise ConfigError(str(wrong), param=option, value=name) from None


def load_plugin(path: str, option: str) -> None:
    """Run a Python file, which registers its parsers. It is the operator's own, and is trusted like this program."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{option}: there is no file {path!r}", param=option, value=path)
    name = f"quire_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{option}: {path!r} is not a Python file", param=option, value=path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as wrong:
        del sys.modules[name]
        raise ConfigError(f"{option}: {path!r} failed: {type(wrong).__name__}: {wrong}", param=option) from wrong
