"""Tiny random checkpoints of every declared architecture, written by transformers itself, with a working tokenizer.

make_tiny(arch_name, folder, **overrides) fills `folder` with config.json, model.safetensors, generation_config.json,
tokenizer.json and tokenizer_config.json, and returns the transformers model (eval, float32, eager attention) that
wrote it. All weights are drawn anew: matrices with std 0.25, norms 0.4 around their centre, biases 0.2, so that no norm
is the identity and no bias is absent: a mistake anywhere moves the logits. Overrides are config keys. Those who want
the files and not the model call write_tiny, which copies what the process has written before.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

VOCAB = 320  # 4 special tokens, 256 bytes, 60 merges: every id decodes
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
TEXT = (
    "the river ran under an old stone bridge while seven children counted boats and argued about names. "
    "there is nothing in the house that another could not have built; one hundred and twenty three words later, "
    "the children were still there, and the boats were gone. She said: I can not tell you what this is."
)
CHAT = (
    "{% for message in messages %}{{ '<s>' + message['role'] + '\n' + message['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)

SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_GPT2 = dict(n_embd=64, n_layer=3, n_head=4, n_positions=512)
_MLA = dict(
    num_key_value_heads=4, kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    head_dim=None,
)  # fmt: skip
_GROUPED = dict(
    n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, n_group=2, topk_group=1, n_shared_experts=1,
    first_k_dense_replace=1, routed_scaling_factor=1.5, norm_topk_prob=True,
)  # fmt: skip
_DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=8)
_MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2)
_BART = dict(
    d_model=64, decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=96, encoder_layers=3,
    encoder_attention_heads=4, encoder_ffn_dim=96, max_position_embeddings=512,
)  # fmt: skip
_GRANITE = dict(attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0)

ARCHS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": dict(sliding_window=5),
    "Ministral3ForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "SeedOssForCausalLM": {},
    "ArceeForCausalLM": {},
    "SmolLM3ForCausalLM": {},
    "HeliumForCausalLM": {},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": dict(sliding_window=5, query_pre_attn_scalar=24),
    "Gemma3ForCausalLM": dict(sliding_window=5, query_pre_attn_scalar=24, num_hidden_layers=7),
    "Gemma3nForCausalLM": dict(
        sliding_window=5, num_hidden_layers=6, num_kv_shared_layers=3, intermediate_size=[96, 64, 96, 64, 96, 96],
        activation_sparsity_pattern=[0.6, 0.0, 0.3, 0.0, 0.9, 0.0], hidden_size_per_layer_input=8, laurel_rank=4,
        vocab_size_per_layer_input=300, altup_num_inputs=3, altup_active_idx=1,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    "Phi3ForCausalLM": dict(sliding_window=5),
    "PhiForCausalLM": {},
    "OlmoForCausalLM": dict(clip_qkv=1.0),
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": dict(sliding_window=5),
    "CohereForCausalLM": dict(use_qk_norm=True),
    "Cohere2ForCausalLM": dict(sliding_window=5),
    "Starcoder2ForCausalLM": dict(sliding_window=5),
    "StableLmForCausalLM": {},
    "GraniteForCausalLM": _GRANITE,
    "NemotronForCausalLM": {},
    "GPTNeoXForCausalLM": {},
    "FalconForCausalLM": dict(new_decoder_architecture=True, num_kv_heads=2),
    "GPT2LMHeadModel": _GPT2,
    "OPTForCausalLM": dict(ffn_dim=96, word_embed_proj_dim=64),
    "BloomForCausalLM": dict(n_layer=3, n_head=4),
    "GPTJForCausalLM": dict(_GPT2, rotary_dim=8),
    "GlmForCausalLM": {},
    "Glm4ForCausalLM": {},
    "Exaone4ForCausalLM": dict(sliding_window=5, sliding_window_pattern=2),
    "MixtralForCausalLM": dict(num_local_experts=4, sliding_window=5),
    "Qwen2MoeForCausalLM": dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48,
        decoder_sparse_step=1,
    ),
    "Qwen3MoeForCausalLM": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "OlmoeForCausalLM": dict(num_experts=4, num_experts_per_tok=2),
    "GptOssForCausalLM": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=5, attention_bias=True),
    "DeepseekV2ForCausalLM": dict(_MLA, **_GROUPED, topk_method="group_limited_greedy"),
    "DeepseekV3ForCausalLM": dict(_MLA, **_GROUPED),
    "Glm4MoeForCausalLM": dict(_GROUPED, use_qk_norm=True, attention_bias=True),
    "Dots1ForCausalLM": _GROUPED,
    "LongcatFlashForCausalLM": dict(
        _MLA | dict(head_dim=8), num_layers=2, ffn_hidden_size=96, moe_topk=3, n_routed_experts=4, zero_expert_num=2,
        expert_ffn_hidden_size=32, routed_scaling_factor=1.5,
    ),
    "GraniteMoeForCausalLM": dict(_GRANITE, num_local_experts=4, num_experts_per_tok=2),
    "Qwen3NextForCausalLM": dict(
        _DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48
    ),
    "Mamba2ForCausalLM": dict(num_heads=8, head_dim=16, state_size=8, n_groups=2, chunk_size=16),
    "BambaForCausalLM": dict(_MAMBA2, attn_layer_indices=[1, 3], mamba_chunk_size=16),
    "Qwen3_5ForCausalLM": _DELTA,
    "Qwen3_5MoeForCausalLM": dict(
        _DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48
    ),
    "OlmoHybridForCausalLM": dict(_DELTA, rope_parameters=dict(rope_type="default", rope_theta=1000.0)),
    "FalconH1ForCausalLM": dict(
        _MAMBA2, mamba_d_ssm=128, mamba_chunk_size=16, mamba_rms_norm=True, mamba_norm_before_gate=False,
        ssm_multipliers=[0.7, 1.3, 0.8, 1.2, 0.6], mlp_multipliers=[0.9, 1.4], key_multiplier=0.8,
        ssm_in_multiplier=1.2, attention_out_multiplier=0.7, attention_in_multiplier=1.1, ssm_out_multiplier=0.6,
        lm_head_multiplier=0.5, embedding_multiplier=2.0,
    ),
    "GraniteMoeHybridForCausalLM": dict(
        _GRANITE, **_MAMBA2, mamba_chunk_size=16, num_local_experts=4, num_experts_per_tok=2, intermediate_size=32,
        shared_intermediate_size=48, layer_types=["mamba", "attention", "mamba", "mamba"],
    ),
    "NemotronHForCausalLM": dict(
        mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8, n_groups=2, chunk_size=16, n_routed_experts=4,
        moe_intermediate_size=32, moe_shared_expert_intermediate_size=48,
        layers_block_type=["mamba", "moe", "attention", "mlp", "mamba"],
    ),
    "MambaForCausalLM": dict(state_size=8),
    "FalconMambaForCausalLM": dict(state_size=8),
    "JambaForCausalLM": dict(
        num_experts=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=0,
        mamba_d_state=8,
    ),
    "Zamba2ForCausalLM": dict(
        num_hidden_layers=3, num_key_value_heads=4, head_dim=None, mamba_d_state=8, n_mamba_heads=8, mamba_ngroups=2,
        use_shared_attention_adapter=True, adapter_rank=2, use_mem_rope=True, chunk_size=16,
        layers_block_type=["hybrid", "linear_attention", "hybrid"],
    ),
    "KimiLinearForCausalLM": dict(
        num_key_value_heads=4, head_dim=None, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, linear_head_dim=16, linear_num_heads=4,
        n_group=2, topk_group=1, layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_hidden_layers=3,
    ),
    "MiniMaxForCausalLM": dict(
        num_local_experts=4, full_attn_alpha_factor=1.5, full_attn_beta_factor=0.8, linear_attn_alpha_factor=1.2,
        linear_attn_beta_factor=0.7, mlp_alpha_factor=0.9, mlp_beta_factor=1.3, block_size=16,
    ),
    "Lfm2ForCausalLM": dict(
        layer_types=["conv", "full_attention", "conv", "full_attention"], block_multiple_of=16, head_dim=None
    ),
    "Lfm2MoeForCausalLM": dict(
        layer_types=["conv", "full_attention", "conv", "full_attention"], num_dense_layers=1, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, head_dim=None,
    ),
    "MinistralForCausalLM": dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2),
    "CwmForCausalLM": dict(sliding_window=5),
    "Ernie4_5ForCausalLM": dict(use_bias=True),
    "ApertusForCausalLM": {},
    "BitNetForCausalLM": dict(head_dim=None),
    "Jais2ForCausalLM": {},
    "NanoChatForCausalLM": dict(head_dim=None),
    "HunYuanDenseV1ForCausalLM": {},
    "HyperCLOVAXForCausalLM": dict(_GRANITE, head_dim=None),
    "GraniteSWAForCausalLM": dict(_GRANITE, sliding_window=5, layer_rope_theta=[100.0, 0, 100.0, 1000.0]),
    "VaultGemmaForCausalLM": dict(sliding_window=5, query_pre_attn_scalar=24),
    "YoutuForCausalLM": _MLA,
    "MiniCPM3ForCausalLM": dict(_MLA, dim_model_base=32),
    "Ernie4_5_MoeForCausalLM": dict(
        moe_num_experts=8, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=1, moe_num_shared_experts=2
    ),
    "HunYuanMoEV1ForCausalLM": dict(num_experts=4, moe_topk=2),
    "HYV3ForCausalLM": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32),
    "ExaoneMoeForCausalLM": dict(
        sliding_window=5, sliding_window_pattern=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        n_group=2, topk_group=1,
    ),
    "FlexOlmoForCausalLM": dict(num_experts=4, num_experts_per_tok=2),
    "Kolibri1ForCausalLM": dict(
        sliding_window=5, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_hidden_layers=5,
        shared_expert_intermediate_size=48,
    ),
    "MellumForCausalLM": dict(
        sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "MiniMaxM2ForCausalLM": dict(num_local_experts=4, num_experts_per_tok=2, rotary_dim=8),
    "SolarOpenForCausalLM": dict(_GROUPED, first_k_dense_replace=None),
    "Glm4MoeLiteForCausalLM": dict(_MLA, **(_GROUPED | dict(first_k_dense_replace=None))),
    "AXK1ForCausalLM": dict(_MLA, **_GROUPED),
    "DeepseekV32ForCausalLM": dict(_MLA, **_GROUPED, index_head_dim=16, index_n_heads=2),
    "GlmMoeDsaForCausalLM": dict(_MLA, **_GROUPED, index_head_dim=16, index_n_heads=2),
    "AfmoeForCausalLM": dict(
        sliding_window=5, global_attn_every_n_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        mup_enabled=True,
    ),
    "FlintForCausalLM": dict(
        sliding_window=5, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[0],
        shared_expert_intermediate_size=48,
    ),
    "PhimoeForCausalLM": dict(num_local_experts=4, head_dim=None),
    "GraniteMoeSharedForCausalLM": dict(
        _GRANITE, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48
    ),
    "GraniteMoeSWAForCausalLM": dict(
        _GRANITE, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48, sliding_window=5
    ),
    "Cohere2MoeForCausalLM": dict(sliding_window=5, num_experts=4, num_experts_per_tok=2),
    "Llama4ForCausalLM": dict(
        num_local_experts=4, intermediate_size_mlp=96, intermediate_size=48, interleave_moe_layer_step=2,
        attention_chunk_size=8, floor_scale=4,
    ),
    "AriaTextForCausalLM": dict(moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    "GPTBigCodeForCausalLM": dict(_GPT2, n_inner=96),
    "GPTNeoForCausalLM": dict(
        hidden_size=64, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=5,
        max_position_embeddings=512, intermediate_size=96,
    ),
    "CodeGenForCausalLM": dict(_GPT2, n_ctx=512, rotary_dim=8),
    "MptForCausalLM": dict(d_model=64, n_layers=3, n_heads=4, max_seq_len=512),
    "OpenAIGPTLMHeadModel": _GPT2,
    "PersimmonForCausalLM": {},
    "XGLMForCausalLM": dict(d_model=64, ffn_dim=96, num_layers=3, attention_heads=4, max_position_embeddings=512),
    "BioGptForCausalLM": {},
    "BartForCausalLM": _BART,
    "PLBartForCausalLM": _BART,
    "MvpForCausalLM": _BART,
    "MBartForCausalLM": _BART,
    "PegasusForCausalLM": _BART,
    "BlenderbotForCausalLM": _BART,
    "MarianForCausalLM": _BART,
}  # fmt: skip

_ONLY = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
_NO_HEADS = ("head_dim", "num_key_value_heads", "intermediate_size")
_NO_ATTENTION = tuple(k for k in SMALL if k not in (*_ONLY, "hidden_size", "num_hidden_layers"))
_LEAVE_OUT: dict[str, tuple[str, ...]] = {  # keys of SMALL that a family spells in another way or derives
    "GPT2LMHeadModel": tuple(k for k in SMALL if k not in _ONLY),
    "GPTJForCausalLM": tuple(k for k in SMALL if k not in _ONLY),
    "BloomForCausalLM": _NO_HEADS,
    "FalconForCausalLM": _NO_HEADS,
    "OPTForCausalLM": _NO_HEADS,
    "GPTNeoXForCausalLM": ("head_dim", "num_key_value_heads"),
    "Mamba2ForCausalLM": _NO_ATTENTION,
    "MambaForCausalLM": _NO_ATTENTION,
    "FalconMambaForCausalLM": _NO_ATTENTION,
    "NemotronHForCausalLM": ("num_hidden_layers",),
    "JambaForCausalLM": ("head_dim",),
    "LongcatFlashForCausalLM": ("num_hidden_layers", "intermediate_size"),
    "PersimmonForCausalLM": ("head_dim", "num_key_value_heads"),
    "BioGptForCausalLM": ("head_dim", "num_key_value_heads"),
    **dict.fromkeys(
        ("GPTBigCodeForCausalLM", "GPTNeoForCausalLM", "CodeGenForCausalLM", "MptForCausalLM", "OpenAIGPTLMHeadModel",
         "XGLMForCausalLM", *(name for name, keys in ARCHS.items() if keys is _BART)),
        tuple(k for k in SMALL if k not in _ONLY),
    ),
}  # fmt: skip


def tiny_config(arch_name: str, **overrides: Any) -> Any:
    """The transformers config of the tiny model."""
    keys = {k: v for k, v in SMALL.items() if k not in _LEAVE_OUT.get(arch_name, ())} | ARCHS[arch_name]
    keys = {k: v for k, v in keys.items() if v is not None} | overrides
    config = getattr(transformers, arch_name).config_class(**keys)
    config._attn_implementation = "eager"
    return config


def tiny_model(arch_name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """The transformers model alone, in memory."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = getattr(transformers, arch_name)(tiny_config(arch_name, **overrides)).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
            else:  # norms keep their centre (one, or zero where the distance from one is stored)
                parameter.add_(torch.randn_like(parameter), alpha=0.2 if name.endswith("bias") else 0.4)
        table = model.get_input_embeddings()
        if hasattr(table, "scalar_embed_scale"):  # or the last token would drown all others, and greedy repeat it
            table.weight.div_(table.scalar_embed_scale)
        for name, buffer in model.named_buffers():
            if "correction" in name or "expert_bias" in name:  # expert selection bias
                buffer.normal_(std=0.5)
    return model


def make_tiny(arch_name: str, folder: str | Path, *, seed: int = 0, **overrides: Any) -> Any:
    """Write a whole checkpoint folder and return the transformers model behind it."""
    model = tiny_model(arch_name, seed=seed, **overrides)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


_written: dict[str, tuple[TemporaryDirectory[str], Tensor]] = {}  # and the state of random numbers afterwards


def write_tiny(arch_name: str, folder: str | Path, *, seed: int = 0, **overrides: Any) -> None:
    """The folder of make_tiny alone: what this process has written before is copied, in a thirtieth of the time."""
    key = repr((arch_name, seed, sorted(overrides.items())))
    if key not in _written:
        made = TemporaryDirectory(prefix="quire-tiny-")
        make_tiny(arch_name, made.name, seed=seed, **overrides)
        _written[key] = made, torch.get_rng_state()
    made, state = _written[key]
    shutil.copytree(made.name, folder, dirs_exist_ok=True)
    torch.set_rng_state(state)  # tests that draw further numbers draw the same, whichever came first


def write_tokenizer(folder: str | Path) -> None:
    """A byte-level BPE of exactly VOCAB ids: <pad> 0, <s> 1, </s> 2, <unk> 3, bytes and merges from 4 on."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = dict(
        tokenizer_class="PreTrainedTokenizerFast", model_max_length=512, clean_up_tokenization_spaces=False,
        pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=CHAT,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))
