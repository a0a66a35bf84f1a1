"""The declared architectures: name in config.json -> the function that reads its config. Loaded on use."""

from __future__ import annotations

from quire.base.registry import Registry

_FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": {
        "llama": ("LlamaForCausalLM", "LLaMAForCausalLM"),
        "mistral": ("MistralForCausalLM",),
        "ministral3": ("Ministral3ForCausalLM",),
        "seed_oss": ("SeedOssForCausalLM",),
        "arcee": ("ArceeForCausalLM",),
        "smollm3": ("SmolLM3ForCausalLM",),
        "helium": ("HeliumForCausalLM",),
        "mixtral": ("MixtralForCausalLM",),
    },
    "qwen": {
        "qwen2": ("Qwen2ForCausalLM",),
        "qwen3": ("Qwen3ForCausalLM",),
        "qwen2_moe": ("Qwen2MoeForCausalLM",),
        "qwen3_moe": ("Qwen3MoeForCausalLM",),
    },
    "hybrid": {
        "qwen3_next": ("Qwen3NextForCausalLM",),
        "qwen3_5": ("Qwen3_5ForCausalLM",),
        "qwen3_5_moe": ("Qwen3_5MoeForCausalLM",),
        "olmo_hybrid": ("OlmoHybridForCausalLM",),
        "mamba2": ("Mamba2ForCausalLM",),
        "bamba": ("BambaForCausalLM",),
        "falcon_h1": ("FalconH1ForCausalLM",),
        "granite_hybrid": ("GraniteMoeHybridForCausalLM",),
        "nemotron_h": ("NemotronHForCausalLM",),
        "mamba": ("MambaForCausalLM",),
        "falcon_mamba": ("FalconMambaForCausalLM",),
        "jamba": ("JambaForCausalLM",),
        "lfm2": ("Lfm2ForCausalLM",),
        "lfm2_moe": ("Lfm2MoeForCausalLM",),
    },
    "gemma": {"gemma": ("GemmaForCausalLM",), "gemma2": ("Gemma2ForCausalLM",), "gemma3": ("Gemma3ForCausalLM",)},
    "phi": {"phi": ("PhiForCausalLM",), "phi3": ("Phi3ForCausalLM",)},
    "olmo": {
        "olmo": ("OlmoForCausalLM",),
        "olmo2": ("Olmo2ForCausalLM",),
        "olmo3": ("Olmo3ForCausalLM",),
        "olmoe": ("OlmoeForCausalLM",),
    },
    "cohere": {"cohere": ("CohereForCausalLM",), "cohere2": ("Cohere2ForCausalLM",)},
    "granite": {"granite": ("GraniteForCausalLM",), "granite_moe": ("GraniteMoeForCausalLM",)},
    "gpt": {
        "gpt2": ("GPT2LMHeadModel",),
        "gptj": ("GPTJForCausalLM",),
        "gpt_neox": ("GPTNeoXForCausalLM",),
        "gpt_oss": ("GptOssForCausalLM",),
        "opt": ("OPTForCausalLM",),
        "bloom": ("BloomForCausalLM",),
    },
    "glm": {"glm": ("GlmForCausalLM",), "glm4": ("Glm4ForCausalLM",), "glm4_moe": ("Glm4MoeForCausalLM",)},
    "deepseek": {
        "deepseek_v2": ("DeepseekV2ForCausalLM",),
        "deepseek_v3": ("DeepseekV3ForCausalLM",),
        "dots1": ("Dots1ForCausalLM",),
    },
    "more": {
        "falcon": ("FalconForCausalLM", "RWForCausalLM"),
        "starcoder2": ("Starcoder2ForCausalLM",),
        "stablelm": ("StableLmForCausalLM", "StableLMEpochForCausalLM"),
        "nemotron": ("NemotronForCausalLM",),
        "exaone4": ("Exaone4ForCausalLM",),
    },
}
ALIASES = {names[0]: names[1:] for table in _FILES.values() for names in table.values() if names[1:]}

ZOO = Registry(
    "architecture",
    {
        name: f"quire.models.zoo.{file}:{function}"
        for file, table in _FILES.items()
        for function, names in table.items()
        for name in names
    },
)
