"""The declared architectures: name in config.json -> the function that reads its config. Loaded on use."""

from __future__ import annotations

from quire.base.registry import Registry
from quire.checkpoint.media import MODALITIES

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
        "qwen2": ("Qwen2ForCausalLM", "MiMoForCausalLM"),
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
        "minimax": ("MiniMaxForCausalLM",),
        "zamba2": ("Zamba2ForCausalLM",),
        "kimi_linear": ("KimiLinearForCausalLM",),
    },
    "gemma": {
        "gemma": ("GemmaForCausalLM",),
        "gemma2": ("Gemma2ForCausalLM",),
        "gemma3": ("Gemma3ForCausalLM",),
        "gemma3n": ("Gemma3nForCausalLM",),
    },
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
        "longcat_flash": ("LongcatFlashForCausalLM",),
    },
    "dense": {
        "ministral": ("MinistralForCausalLM",),
        "cwm": ("CwmForCausalLM",),
        "ernie4_5": ("Ernie4_5ForCausalLM",),
        "apertus": ("ApertusForCausalLM",),
        "bitnet": ("BitNetForCausalLM",),
        "jais2": ("Jais2ForCausalLM",),
        "nanochat": ("NanoChatForCausalLM",),
        "hunyuan": ("HunYuanDenseV1ForCausalLM",),
        "hyperclovax": ("HyperCLOVAXForCausalLM",),
        "granite_swa": ("GraniteSWAForCausalLM",),
        "vaultgemma": ("VaultGemmaForCausalLM",),
        "youtu": ("YoutuForCausalLM",),
        "minicpm3": ("MiniCPM3ForCausalLM",),
    },
    "mixtures": {
        "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM",),
        "hunyuan_moe": ("HunYuanMoEV1ForCausalLM",),
        "hy_v3": ("HYV3ForCausalLM",),
        "exaone_moe": ("ExaoneMoeForCausalLM",),
        "flex_olmo": ("FlexOlmoForCausalLM",),
        "kolibri1": ("Kolibri1ForCausalLM",),
        "mellum": ("MellumForCausalLM",),
        "minimax_m2": ("MiniMaxM2ForCausalLM",),
        "solar_open": ("SolarOpenForCausalLM",),
        "glm4_moe_lite": ("Glm4MoeLiteForCausalLM",),
        "axk1": ("AXK1ForCausalLM",),
        "indexed": ("DeepseekV32ForCausalLM",),
        "indexed_glm": ("GlmMoeDsaForCausalLM",),
        "afmoe": ("AfmoeForCausalLM",),
        "flint": ("FlintForCausalLM",),
        "phimoe": ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        "granite_moe_shared": ("GraniteMoeSharedForCausalLM",),
        "granite_moe_swa": ("GraniteMoeSWAForCausalLM",),
        "cohere2_moe": ("Cohere2MoeForCausalLM",),
        "llama4": ("Llama4ForCausalLM",),
        "aria_text": ("AriaTextForCausalLM",),
    },
    "classic": {
        "gpt_bigcode": ("GPTBigCodeForCausalLM",),
        "gpt_neo": ("GPTNeoForCausalLM",),
        "codegen": ("CodeGenForCausalLM",),
        "mpt": ("MptForCausalLM", "MPTForCausalLM"),
        "openai_gpt": ("OpenAIGPTLMHeadModel",),
        "persimmon": ("PersimmonForCausalLM",),
        "xglm": ("XGLMForCausalLM",),
        "biogpt": ("BioGptForCausalLM",),
        "bart": ("BartForCausalLM",),
        "plbart": ("PLBartForCausalLM",),
        "mvp": ("MvpForCausalLM",),
        "mbart": ("MBartForCausalLM",),
        "pegasus": ("PegasusForCausalLM",),
        "blenderbot": ("BlenderbotForCausalLM",),
        "marian": ("MarianForCausalLM",),
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
    }
    | dict.fromkeys(MODALITIES, "quire.models.zoo.media:composite"),  # language models within others
)

# Encoders. A checkpoint's head does not change the layers.
_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
_ENCODERS = {
    "bert": ("Bert", "Electra", "Ernie"),
    "roberta": ("Roberta", "XLMRoberta", "Camembert"),
    "mpnet": ("MPNet",),
    "distilbert": ("DistilBert",),
    "nomic_bert": ("NomicBert",),
    "jina_v2": ("JinaBert",),
    "jina_v3": ("JinaEmbeddingsV3",),
    "gte": ("Gte", "New"),
    "modernbert": ("ModernBert",),
    "eurobert": ("EuroBert",),
}
ENCODERS = Registry(
    "encoder",
    {
        stem + head: f"quire.models.zoo.encoders:{function}"
        for function, stems in _ENCODERS.items()
        for stem in stems
        for head in _HEADS
    }
    | dict.fromkeys(("HF_ColBERT", "BertSpladeSparseEmbeddingModel"), "quire.models.zoo.encoders:bert"),
)

# Encoder-decoder models.
SEQ2SEQ = Registry(
    "encoder-decoder",
    {
        "T5ForConditionalGeneration": "quire.models.zoo.seq2seq:t5",
        "MT5ForConditionalGeneration": "quire.models.zoo.seq2seq:mt5",
        "UMT5ForConditionalGeneration": "quire.models.zoo.seq2seq:umt5",
        "BartForConditionalGeneration": "quire.models.zoo.seq2seq:bart",
        "MBartForConditionalGeneration": "quire.models.zoo.seq2seq:mbart",
        "PegasusForConditionalGeneration": "quire.models.zoo.seq2seq:pegasus",
        "WhisperForConditionalGeneration": "quire.models.zoo.seq2seq:whisper",
        "Florence2ForConditionalGeneration": "quire.models.zoo.seq2seq:florence2",
    },
)
