"""The documented parser classes by their own names, for plug-ins that are made from one: each runs Quire's format."""

from __future__ import annotations

from typing import Any

from vllm.parsers import ReasoningParserManager, ToolParserManager

TOOLS = {
    "DeepSeekV3ToolParser": "deepseek_v3",
    "DeepSeekV31ToolParser": "deepseek_v31",
    "DeepSeekV32ToolParser": "deepseek_v32",
    "Ernie45ToolParser": "ernie45",
    "FunctionGemmaToolParser": "functiongemma",
    "GigaChat3ToolParser": "gigachat3",
    "Glm4MoeModelToolParser": "glm45",
    "Glm47MoeModelToolParser": "glm47",
    "Granite20bFCToolParser": "granite-20b-fc",
    "GraniteToolParser": "granite",
    "Hermes2ProToolParser": "hermes",
    "HunyuanA13BToolParser": "hunyuan_a13b",
    "Internlm2ToolParser": "internlm",
    "JambaToolParser": "jamba",
    "KimiK2ToolParser": "kimi_k2",
    "Llama3JsonToolParser": "llama3_json",
    "Llama4PythonicToolParser": "llama4_pythonic",
    "LongcatFlashToolParser": "longcat",
    "MinimaxM2ToolParser": "minimax_m2",
    "MinimaxToolParser": "minimax",
    "MistralToolParser": "mistral",
    "Olmo3PythonicToolParser": "olmo3",
    "OpenAIToolParser": "openai",
    "Phi4MiniJsonToolParser": "phi4_mini_json",
    "PythonicToolParser": "pythonic",
    "Qwen3CoderToolParser": "qwen3_coder",
    "Qwen3XMLToolParser": "qwen3_xml",
    "SeedOssToolParser": "seed_oss",
    "Step3ToolParser": "step3",
    "xLAMToolParser": "xlam",
}
REASONING = {
    "DeepSeekR1ReasoningParser": "deepseek_r1",
    "DeepSeekV3ReasoningParser": "deepseek_v3",
    "Ernie45ReasoningParser": "ernie45",
    "Glm4MoeModelReasoningParser": "glm45",
    "GptOssReasoningParser": "openai_gptoss",
    "GraniteReasoningParser": "granite",
    "Holo2ReasoningParser": "holo2",
    "HunyuanA13BReasoningParser": "hunyuan_a13b",
    "IdentityReasoningParser": "identity",
    "MiniMaxM2ReasoningParser": "minimax_m2",
    "MistralReasoningParser": "mistral",
    "Olmo3ReasoningParser": "olmo3",
    "Qwen3ReasoningParser": "qwen3",
    "SeedOSSReasoningParser": "seed_oss",
    "Step3ReasoningParser": "step3",
}


def __getattr__(name: str) -> Any:
    if parser := TOOLS.get(name):
        return ToolParserManager.get_tool_parser(parser)
    if parser := REASONING.get(name):
        return ReasoningParserManager.get_reasoning_parser(parser)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
