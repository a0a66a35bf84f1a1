"""Declarations read config.json in every spelling: bare (defaults), old (hubs), new (transformers 5).

Oracle: transformers' own config classes turn an old or bare config into the new spelling; the same architecture must
come out of both. What that architecture computes is checked in test_parity.py and test_variants.py.
"""

import pytest
import torch
import transformers

from quire.models.build import architecture_name, build_model, read_arch
from quire.models.zoo import ALIASES, ZOO
from quire.schema.errors import ConfigError
from quire.schema.kv import KVKind
from tests.hub_configs import MORE
from tests.tiny_models import ARCHS, tiny_config

LLAMA = dict(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_hidden_layers=4, num_key_value_heads=8,
    vocab_size=32000, rms_norm_eps=1e-5, torch_dtype="bfloat16", max_position_embeddings=8192, hidden_act="silu",
)  # fmt: skip
YARN = dict(type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707,
            original_max_position_embeddings=4096)  # fmt: skip
LONG = dict(short_factor=[1.0 + i / 64 for i in range(48)], long_factor=[2.0 + i for i in range(48)])

# Configs as they lie on hubs (fewer layers), keys that are absent there left out.
OLD = {
    "llama-1, no kv heads, no theta": dict(
        architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
        num_hidden_layers=4, vocab_size=32000, rms_norm_eps=1e-6, max_sequence_length=2048),
    "llama-3.1": dict(LLAMA, architectures=["LlamaForCausalLM"], rope_theta=500000.0, attention_bias=False,
        max_position_embeddings=131072, rope_scaling=dict(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
            rope_type="llama3")),
    "llama linear, old type key": dict(LLAMA, architectures=["LlamaForCausalLM"],
        rope_scaling=dict(type="linear", factor=4.0)),
    "llama dynamic": dict(LLAMA, architectures=["LlamaForCausalLM"], rope_scaling=dict(type="dynamic", factor=2.0)),
    "llama-3.2 tied": dict(LLAMA, architectures=["LlamaForCausalLM"], tie_word_embeddings=True, head_dim=64),
    "mistral-v0.1": dict(LLAMA, architectures=["MistralForCausalLM"], sliding_window=4096, rope_theta=10000.0),
    "mistral-v0.3": dict(LLAMA, architectures=["MistralForCausalLM"], sliding_window=None, rope_theta=1e6),
    "mistral-nemo": dict(LLAMA, architectures=["MistralForCausalLM"], sliding_window=None, head_dim=96),
    "qwen2.5": dict(LLAMA, architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=131072,
        max_window_layers=2, rope_theta=1e6, use_mrope=False),
    "qwen2 with windows": dict(LLAMA, architectures=["Qwen2ForCausalLM"], use_sliding_window=True,
        sliding_window=1024, max_window_layers=2),
    "qwen2.5-1m yarn": dict(LLAMA, architectures=["Qwen2ForCausalLM"], rope_scaling=dict(
        type="yarn", factor=4.0, original_max_position_embeddings=32768)),
    "qwen3": dict(LLAMA, architectures=["Qwen3ForCausalLM"], head_dim=128, use_sliding_window=False,
        sliding_window=None, max_window_layers=36, rope_scaling=None, rope_theta=1e6, attention_bias=False),
    "qwen1.5-moe": dict(LLAMA, architectures=["Qwen2MoeForCausalLM"], num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, decoder_sparse_step=1,
        norm_topk_prob=False, use_sliding_window=False, sliding_window=32768, max_window_layers=21),
    "qwen3-moe": dict(LLAMA, architectures=["Qwen3MoeForCausalLM"], head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], use_sliding_window=False, sliding_window=None, rope_theta=1e6),
    "gemma-2b": dict(LLAMA, architectures=["GemmaForCausalLM"], hidden_act="gelu", hidden_activation=None,
        head_dim=256, rope_theta=10000.0, rope_scaling=None),
    "gemma-2": dict(LLAMA, architectures=["Gemma2ForCausalLM"], hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh", head_dim=256, query_pre_attn_scalar=224, sliding_window=4096,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, cache_implementation="hybrid"),
    "gemma-3-1b": dict(LLAMA, architectures=["Gemma3ForCausalLM"], hidden_activation="gelu_pytorch_tanh",
        head_dim=256, query_pre_attn_scalar=256, sliding_window=512, sliding_window_pattern=6,
        rope_local_base_freq=10000, rope_theta=1000000, rope_scaling=None, num_hidden_layers=8),
    "gemma-3 stretched": dict(LLAMA, architectures=["Gemma3ForCausalLM"], sliding_window=1024,
        rope_scaling=dict(factor=8.0, rope_type="linear"), num_hidden_layers=7),
    "gemma-3n-e2b": dict(LLAMA, architectures=["Gemma3nForCausalLM"], hidden_activation="gelu_pytorch_tanh",
        hidden_size=2048, num_attention_heads=8, num_key_value_heads=2, head_dim=256, sliding_window=512,
        num_hidden_layers=12, num_kv_shared_layers=4, intermediate_size=[8192] * 12,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 3, rope_scaling=None, rope_theta=1000000,
        rope_local_base_freq=10000, final_logit_softcapping=30.0, query_pre_attn_scalar=256,
        activation_sparsity_pattern=[0.95] * 6 + [0.0] * 6, altup_lr_multiplier=1.0, altup_coef_clip=120.0),
    "phi-3-mini-4k": dict(LLAMA, architectures=["Phi3ForCausalLM"], sliding_window=2047, rope_scaling=None,
        original_max_position_embeddings=4096, attention_bias=False),
    "phi-3-mini-128k": dict(LLAMA, architectures=["Phi3ForCausalLM"], hidden_size=3072,
        num_key_value_heads=32, original_max_position_embeddings=4096, max_position_embeddings=131072,
        rope_scaling=dict(LONG, type="longrope"), sliding_window=262144),
    "phi-4-mini": dict(LLAMA, architectures=["Phi3ForCausalLM"], hidden_size=4096, partial_rotary_factor=0.75,
        original_max_position_embeddings=4096, max_position_embeddings=131072, rope_scaling=dict(
            LONG, type="longrope"), tie_word_embeddings=True),
    "phi-2": dict(architectures=["PhiForCausalLM"], hidden_size=2560, intermediate_size=10240, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=32, hidden_act="gelu_new", layer_norm_eps=1e-5,
        partial_rotary_factor=0.4, qk_layernorm=False, rope_theta=10000.0, vocab_size=51200),
    "olmo-7b": dict(LLAMA, architectures=["OlmoForCausalLM"], clip_qkv=8.0, num_key_value_heads=32),
    "olmo-2": dict(LLAMA, architectures=["Olmo2ForCausalLM"], rope_theta=500000, rms_norm_eps=1e-6),
    "olmo-3": dict(LLAMA, architectures=["Olmo3ForCausalLM"], rope_theta=500000, sliding_window=4096,
        num_hidden_layers=8, rope_scaling=dict(rope_type="yarn", factor=8.0, attention_factor=1.2079,
            beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=8192)),
    "olmoe": dict(LLAMA, architectures=["OlmoeForCausalLM"], num_experts=64, num_experts_per_tok=8, clip_qkv=None),
    "command-r": dict(LLAMA, architectures=["CohereForCausalLM"], layer_norm_eps=1e-5, logit_scale=0.0625,
        rope_theta=8000000.0, use_qk_norm=True),
    "command-r7b": dict(LLAMA, architectures=["Cohere2ForCausalLM"], layer_norm_eps=1e-5, logit_scale=0.25,
        rope_theta=50000, sliding_window=4096, sliding_window_pattern=4, use_embedding_sharing=True,
        use_gated_activation=True, position_embedding_type="rope_gptj", num_hidden_layers=8),
    "starcoder2": dict(LLAMA, architectures=["Starcoder2ForCausalLM"], norm_epsilon=1e-5, sliding_window=4096,
        use_bias=True, hidden_act="gelu_pytorch_tanh", mlp_type="default", norm_type="layer_norm", rope_theta=999999.4),
    "stablelm-2-12b": dict(LLAMA, architectures=["StableLmForCausalLM"], layer_norm_eps=1e-5, qk_layernorm=True,
        use_parallel_residual=True, partial_rotary_factor=0.25, use_qkv_bias=False),
    "granite": dict(LLAMA, architectures=["GraniteForCausalLM"], attention_multiplier=0.0078125,
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16.0, tie_word_embeddings=True),
    "granite-moe": dict(LLAMA, architectures=["GraniteMoeForCausalLM"], attention_multiplier=0.015625,
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=6.0, num_local_experts=32,
        num_experts_per_tok=8),
    "minitron": dict(LLAMA, architectures=["NemotronForCausalLM"], hidden_act="relu2", norm_eps=1e-5,
        partial_rotary_factor=0.5, head_dim=128),
    "pythia": dict(architectures=["GPTNeoXForCausalLM"], hidden_size=768, intermediate_size=3072, hidden_act="gelu",
        num_attention_heads=12, num_hidden_layers=4, rotary_emb_base=10000, rotary_pct=0.25, layer_norm_eps=1e-5,
        max_position_embeddings=2048, use_parallel_residual=True, vocab_size=50304),
    "gpt-neox sequential": dict(architectures=["GPTNeoXForCausalLM"], hidden_size=768, intermediate_size=3072,
        num_attention_heads=12, num_hidden_layers=4, rotary_emb_base=25000, rotary_pct=1.0,
        use_parallel_residual=False, attention_bias=False, vocab_size=50304),
    "falcon-7b": dict(architectures=["FalconForCausalLM"], alibi=False, bias=False, hidden_size=4544,
        multi_query=True, new_decoder_architecture=False, num_attention_heads=71, num_hidden_layers=4,
        parallel_attn=True, vocab_size=65024, layer_norm_epsilon=1e-5),
    "falcon-40b": dict(architectures=["FalconForCausalLM"], alibi=False, bias=False, hidden_size=8192,
        new_decoder_architecture=True, num_attention_heads=128, num_hidden_layers=4, num_kv_heads=8,
        parallel_attn=True, vocab_size=65024),
    "falcon-rw": dict(architectures=["FalconForCausalLM"], alibi=True, bias=True, hidden_size=2048,
        multi_query=False, new_decoder_architecture=False, num_attention_heads=32, num_hidden_layers=4,
        parallel_attn=False, vocab_size=50304),
    "falcon-11b": dict(architectures=["FalconForCausalLM"], alibi=False, bias=False, hidden_size=4096,
        new_decoder_architecture=True, num_attention_heads=32, num_hidden_layers=4, num_kv_heads=8,
        num_ln_in_parallel_attn=1, ffn_hidden_size=16384, max_position_embeddings=8192, rope_theta=500042.0,
        vocab_size=65024, activation="gelu"),
    "gpt2": dict(architectures=["GPT2LMHeadModel"], n_ctx=1024, n_embd=768, n_head=12, n_layer=4, n_positions=1024,
        vocab_size=50257, activation_function="gelu_new", layer_norm_epsilon=1e-5),
    "gpt-j": dict(architectures=["GPTJForCausalLM"], n_embd=4096, n_head=16, n_layer=4, n_positions=2048,
        rotary=True, rotary_dim=64, vocab_size=50400, tie_word_embeddings=False),
    "opt-125m": dict(architectures=["OPTForCausalLM"], hidden_size=768, ffn_dim=3072, num_attention_heads=12,
        num_hidden_layers=4, max_position_embeddings=2048, do_layer_norm_before=True, vocab_size=50272,
        word_embed_proj_dim=768, activation_function="relu", prefix="</s>"),
    "opt-350m": dict(architectures=["OPTForCausalLM"], hidden_size=1024, ffn_dim=4096, num_attention_heads=16,
        num_hidden_layers=4, max_position_embeddings=2048, do_layer_norm_before=False, vocab_size=50272,
        word_embed_proj_dim=512),
    "bloom-560m": dict(architectures=["BloomForCausalLM"], n_embed=1024, n_layer=4, num_attention_heads=16,
        vocab_size=250880, layer_norm_epsilon=1e-5, apply_residual_connection_post_layernorm=False),
    "glm-4-9b": dict(LLAMA, architectures=["GlmForCausalLM"], head_dim=128, attention_bias=True,
        partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7, rope_theta=10000.0),
    "glm-4-0414": dict(LLAMA, architectures=["Glm4ForCausalLM"], head_dim=128, attention_bias=False,
        partial_rotary_factor=0.5),
    "glm-4.5": dict(LLAMA, architectures=["Glm4MoeForCausalLM"], head_dim=128, attention_bias=True,
        partial_rotary_factor=0.5, n_routed_experts=160, num_experts_per_tok=8, n_shared_experts=1, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, first_k_dense_replace=3, use_qk_norm=True,
        moe_intermediate_size=1536, num_nextn_predict_layers=1, rope_theta=1000000, rope_scaling=None),
    "exaone-4-32b": dict(LLAMA, architectures=["Exaone4ForCausalLM"], sliding_window=4096, num_hidden_layers=8,
        sliding_window_pattern="LLLG", layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2,
        rope_theta=1000000, rope_scaling=dict(rope_type="llama3", factor=16.0, high_freq_factor=4.0,
            low_freq_factor=1.0, original_max_position_embeddings=8192)),
    "exaone-4-1.2b": dict(LLAMA, architectures=["Exaone4ForCausalLM"], sliding_window=None,
        sliding_window_pattern=None, layer_types=["full_attention"] * 4),
    "mixtral-8x7b": dict(LLAMA, architectures=["MixtralForCausalLM"], num_local_experts=8, num_experts_per_tok=2,
        sliding_window=None, rope_theta=1e6),
    "gpt-oss": dict(LLAMA, architectures=["GptOssForCausalLM"], head_dim=64, num_local_experts=32,
        num_experts_per_tok=4, experts_per_token=4, sliding_window=128, attention_bias=True, swiglu_limit=7.0,
        rope_theta=150000, rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0,
            original_max_position_embeddings=4096, rope_type="yarn", truncate=False)),
    "deepseek-v2-lite": dict(LLAMA, architectures=["DeepseekV2ForCausalLM"], kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, moe_layer_freq=1, n_group=1,
        topk_group=1, topk_method="greedy", norm_topk_prob=False, scoring_func="softmax", routed_scaling_factor=1.0,
        num_key_value_heads=32, rope_scaling=YARN, max_position_embeddings=163840),
    "deepseek-v2": dict(LLAMA, architectures=["DeepseekV2ForCausalLM"], kv_lora_rank=512, q_lora_rank=1536,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=160, n_shared_experts=2,
        num_experts_per_tok=6, moe_intermediate_size=1536, first_k_dense_replace=1, n_group=8, topk_group=3,
        topk_method="group_limited_greedy", routed_scaling_factor=16.0, num_key_value_heads=32, rope_scaling=YARN),
    "longcat-flash": dict(architectures=["LongcatFlashForCausalLM"], model_type="longcat_flash", vocab_size=131072,
                          hidden_size=6144, num_layers=4, num_attention_heads=64, max_position_embeddings=131072,
                          rms_norm_eps=1e-5, rope_theta=1e7, attention_bias=False, ffn_hidden_size=12288,
                          q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                          v_head_dim=128, mla_scale_q_lora=True, mla_scale_kv_lora=True, moe_topk=12,
                          n_routed_experts=512, zero_expert_num=256, zero_expert_type="identity",
                          expert_ffn_hidden_size=2048, routed_scaling_factor=6.0, attention_method="MLA",
                          tie_word_embeddings=False),
    "deepseek-v3": dict(LLAMA, architectures=["DeepseekV3ForCausalLM"], kv_lora_rank=512, q_lora_rank=1536,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, moe_layer_freq=1, n_group=8,
        topk_group=4, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, num_hidden_layers=6,
        routed_scaling_factor=2.5, num_key_value_heads=32, num_nextn_predict_layers=1,
        rope_scaling=dict(YARN, mscale=1.0, mscale_all_dim=1.0)),
    "dots.llm1": dict(LLAMA, architectures=["Dots1ForCausalLM"], n_routed_experts=128, n_shared_experts=2,
        num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="noaux_tc", sliding_window=None),
    "smollm3": dict(LLAMA, architectures=["SmolLM3ForCausalLM"], no_rope_layer_interval=4, rope_theta=5000000.0,
        no_rope_layers=[1, 1, 1, 0], use_sliding_window=False, sliding_window=None, tie_word_embeddings=True),
    "seed-oss": dict(LLAMA, architectures=["SeedOssForCausalLM"], head_dim=128, attention_bias=True,
        attention_out_bias=False, rope_theta=1e7, rope_scaling=dict(rope_type="default")),
    "helium": dict(LLAMA, architectures=["HeliumForCausalLM"], head_dim=128, rms_norm_eps=1e-8, rope_theta=100000.0),
    "arcee": dict(LLAMA, architectures=["ArceeForCausalLM"], hidden_act="relu2", rope_theta=10000.0, rope_scaling=dict(
        beta_fast=32.0, beta_slow=1.0, factor=20.0, mscale=1.0, original_max_position_embeddings=4096,
        rope_type="yarn")),
    "ministral-3": dict(LLAMA, architectures=["Ministral3ForCausalLM"], head_dim=128, sliding_window=None,
        rope_parameters=dict(beta_fast=32.0, beta_slow=1.0, factor=16.0, llama_4_scaling_beta=0.1, mscale=1.0,
            mscale_all_dim=1.0, original_max_position_embeddings=16384, rope_theta=1e6, rope_type="yarn", type="yarn")),
    "qwen3-next": dict(LLAMA, architectures=["Qwen3NextForCausalLM"], head_dim=256, num_hidden_layers=8,
        num_key_value_heads=2, partial_rotary_factor=0.25, rope_theta=10000000, full_attention_interval=4,
        linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_value_head_dim=128, decoder_sparse_step=1, moe_intermediate_size=512, mlp_only_layers=[],
        shared_expert_intermediate_size=512, num_experts=512, num_experts_per_tok=10, norm_topk_prob=True),
    "qwen3.5 text": dict(LLAMA, architectures=["Qwen3_5ForCausalLM"], head_dim=256, num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2, linear_num_value_heads=48,
        mamba_ssm_dtype="float32", rope_parameters=dict(rope_type="default", rope_theta=10000000,
            partial_rotary_factor=0.25, mrope_interleaved=True, mrope_section=[11, 11, 10])),
    "qwen3.5-moe text": dict(LLAMA, architectures=["Qwen3_5MoeForCausalLM"], head_dim=256, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512),
    "olmo-hybrid": dict(LLAMA, architectures=["OlmoHybridForCausalLM"], linear_num_key_heads=30, num_hidden_layers=8,
        linear_num_value_heads=30, linear_key_head_dim=96, linear_value_head_dim=192, linear_allow_neg_eigval=True,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0)),
    "olmo-hybrid without rope": dict(LLAMA, architectures=["OlmoHybridForCausalLM"],
        rope_parameters=dict(rope_type="default", rope_theta=None)),
    "mamba2-2.7b": dict(architectures=["Mamba2ForCausalLM"], hidden_size=2560, num_hidden_layers=4, num_heads=80,
        head_dim=64, state_size=128, n_groups=1, vocab_size=50288, tie_word_embeddings=True),
    "codestral-mamba": dict(architectures=["Mamba2ForCausalLM"], hidden_size=4096, num_hidden_layers=4, n_groups=8,
        num_heads=128, head_dim=64, vocab_size=32768, time_step_limit=[0.0, float("inf")], norm_before_gate=True),
    "bamba-9b": dict(LLAMA, architectures=["BambaForCausalLM"], attn_layer_indices=[1, 3], mamba_chunk_size=256,
        mamba_d_conv=4, mamba_d_head=64, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=128,
        partial_rotary_factor=0.5, rope_theta=10000.0),
    "falcon-h1": dict(LLAMA, architectures=["FalconH1ForCausalLM"], mamba_d_ssm=4096, mamba_n_heads=32,
        mamba_d_head=128, mamba_d_state=128, mamba_n_groups=1, mamba_rms_norm=False, key_multiplier=0.39,
        mlp_multipliers=[0.88, 0.58], ssm_multipliers=[0.35, 0.25, 0.18, 0.5, 0.35], ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.23, attention_out_multiplier=0.93, embedding_multiplier=5.65, lm_head_multiplier=0.039,
        rope_theta=1e11),
    "granite-4-h": dict(LLAMA, architectures=["GraniteMoeHybridForCausalLM"], position_embedding_type="nope",
        layer_types=["mamba", "mamba", "attention", "mamba"], shared_intermediate_size=1024, num_local_experts=64,
        num_experts_per_tok=6, mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128, attention_multiplier=0.0078125,
        embedding_multiplier=12, residual_multiplier=0.22, logits_scaling=8, tie_word_embeddings=True),
    "granite-4 dense": dict(LLAMA, architectures=["GraniteMoeHybridForCausalLM"], position_embedding_type="rope",
        layer_types=["attention"] * 4, shared_intermediate_size=8192, num_local_experts=0, num_experts_per_tok=0),
    "nemotron-h": dict(architectures=["NemotronHForCausalLM"], hidden_size=4096, vocab_size=131072,
        hybrid_override_pattern="M-M*", num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, n_groups=8, time_step_min=0.001,
        mlp_hidden_act="relu2", rms_norm_eps=1e-5, layer_norm_epsilon=1e-5, max_position_embeddings=8192),
    "mamba-130m": dict(architectures=["MambaForCausalLM"], hidden_size=768, num_hidden_layers=4, state_size=16,
        intermediate_size=1536, time_step_rank=48, vocab_size=50280),
    "falcon-mamba-7b": dict(architectures=["FalconMambaForCausalLM"], hidden_size=4096, num_hidden_layers=4,
        state_size=16, intermediate_size=8192, time_step_rank=256, vocab_size=65024, tie_word_embeddings=False),
    "jamba": dict(LLAMA, architectures=["JambaForCausalLM"], num_hidden_layers=16, attn_layer_offset=4,
        attn_layer_period=8, expert_layer_offset=1, expert_layer_period=2, num_experts=16, num_experts_per_tok=2,
        mamba_d_state=16, mamba_dt_rank=256),
    "lfm2-1.2b": dict(architectures=["Lfm2ForCausalLM"], hidden_size=2048, block_ff_dim=12288, num_hidden_layers=6,
        full_attn_idxs=[2, 5], num_attention_heads=32, num_key_value_heads=8, norm_eps=1e-5, rope_theta=1000000.0,
        vocab_size=65536, block_multiple_of=256, block_ffn_dim_multiplier=1.0, tie_embedding=True),
    "lfm2-8b-a1b": dict(architectures=["Lfm2MoeForCausalLM"], hidden_size=2048, num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"], num_experts=32, num_experts_per_tok=4,
        moe_intermediate_size=1792, num_dense_layers=2, use_expert_bias=True, rope_theta=1000000.0, vocab_size=65536),
    "zamba2-1.2b": dict(architectures=["Zamba2ForCausalLM"], hidden_size=2048, num_hidden_layers=6, n_mamba_heads=64,
        layers_block_type=["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"], mamba_d_state=64, num_mem_blocks=1,
        use_mem_rope=True, use_shared_attention_adapter=True, adapter_rank=128, vocab_size=32000, rope_theta=10000,
        num_attention_heads=32, num_key_value_heads=32, intermediate_size=8192, hidden_act="gelu"),
    "kimi-linear-48b-a3b": dict(architectures=["KimiLinearForCausalLM"], hidden_size=2304, num_hidden_layers=5,
        linear_attn_config=dict(full_attn_layers=[4], kda_layers=[1, 2, 3, 5], head_dim=128, num_heads=32,
            short_conv_kernel_size=4), first_k_dense_replace=1, kv_lora_rank=512, num_experts=256,
        num_experts_per_token=8, moe_intermediate_size=1024, moe_renormalize=True, num_expert_group=1, topk_group=1,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, routed_scaling_factor=2.446, num_shared_experts=1,
        num_attention_heads=32, num_key_value_heads=32, model_max_length=1048576, vocab_size=163840, head_dim=72),
    "minimax-text-01": dict(architectures=["MiniMaxForCausalLM"], hidden_size=6144, num_hidden_layers=8, head_dim=128,
        layer_types=["linear_attention"] * 7 + ["full_attention"], intermediate_size=9216, num_local_experts=32,
        num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=10000000, vocab_size=200064, num_attention_heads=64,
        full_attn_alpha_factor=3.5565588200778455, full_attn_beta_factor=1.0, mlp_alpha_factor=3.5565588200778455,
        linear_attn_alpha_factor=3.5565588200778455, linear_attn_beta_factor=1.0, mlp_beta_factor=1.0,
        partial_rotary_factor=0.5),
    **MORE,
}  # fmt: skip


def new_spelling(old):
    """What transformers makes of a config, written out in full."""
    name = old["architectures"][0]
    config = getattr(transformers, name).config_class.from_dict(dict(old))
    return config.to_dict() | {"architectures": [name]}


@pytest.mark.parametrize("hub", OLD)
def test_old_and_new_spelling_agree(hub):
    assert read_arch(OLD[hub]) == read_arch(new_spelling(OLD[hub]))


def test_first_names_of_longrope():
    """Early Phi-3 files call it su or yarn; transformers no longer reads the first of these."""
    want = read_arch(OLD["phi-3-mini-128k"])
    for name in ("su", "yarn"):
        assert read_arch(dict(OLD["phi-3-mini-128k"], rope_scaling=dict(LONG, type=name))) == want


def test_old_spellings_cover_every_family():
    assert {config["architectures"][0] for config in OLD.values()} == set(ARCHS)


@pytest.mark.parametrize("name", ARCHS)
def test_absent_keys_mean_transformers_defaults(name):
    bare = {"architectures": [name], "model_type": "whatever"}
    assert read_arch(bare) == read_arch(new_spelling(bare))


@pytest.mark.parametrize("name", ARCHS)
def test_saved_config_reads_like_the_full_one(name):
    """save_pretrained leaves keys out; nothing of the architecture may hang on them."""
    config = tiny_config(name)
    saved = config.to_diff_dict() | {"architectures": [name]}
    assert read_arch(saved) == read_arch(config.to_dict() | {"architectures": [name]})


def test_layers_and_windows_of_known_models():
    """Facts stated by hand, so that both readings cannot be wrong together."""
    gemma3 = read_arch(OLD["gemma-3-1b"])
    assert [layer.window for layer in gemma3.layers] == [512, 512, 512, 512, 512, 0, 512, 512]
    assert [layer.rope.theta for layer in gemma3.layers] == [10000, 10000, 10000, 10000, 10000, 1000000, 10000, 10000]
    gemma3n = read_arch(OLD["gemma-3n-e2b"])
    assert [layer.kv_from for layer in gemma3n.layers] == [-1] * 8 + [6, 6, 6, 7]
    assert [index for index, layer in enumerate(gemma3n.layers) if layer.lends] == [6, 7]
    assert [layer.window for layer in gemma3n.layers] == [512, 512, 512, 0] * 3
    assert [layer.rope.theta for layer in gemma3n.layers[2:4]] == [10000, 1000000]
    stretched = read_arch(OLD["gemma-3 stretched"])
    assert stretched.layers[0].rope.scaling is None and stretched.layers[5].rope.scaling["factor"] == 8.0
    assert [layer.window for layer in read_arch(OLD["gemma-2"]).layers] == [4096, 0, 4096, 0]
    assert [layer.window for layer in read_arch(OLD["qwen2.5"]).layers] == [0, 0, 0, 0]
    assert [layer.window for layer in read_arch(OLD["qwen2 with windows"]).layers] == [0, 0, 1024, 1024]
    assert [layer.window for layer in read_arch(OLD["mistral-v0.1"]).layers] == [4096] * 4
    assert [layer.window for layer in read_arch(OLD["mistral-v0.3"]).layers] == [0] * 4
    assert [bool(layer.rope) for layer in read_arch(OLD["command-r7b"]).layers] == [True, True, True, False] * 2
    assert [layer.moe for layer in read_arch(OLD["deepseek-v3"]).layers] == [False] * 3 + [True] * 3
    assert read_arch(OLD["llama-1, no kv heads, no theta"]).kv_heads == 32
    assert read_arch(OLD["gemma-2b"]).act == "gelu_pytorch_tanh"
    assert read_arch(OLD["falcon-7b"]).kv_heads == 1


def test_kv_specs_follow_the_layers():
    model = build_model(tiny_config("Gemma2ForCausalLM").to_dict() | {"architectures": ["Gemma2ForCausalLM"]},
                        dtype=torch.float32)  # fmt: skip
    specs = model.kv_specs(16, "bfloat16")
    assert [(spec.kind, spec.window) for spec in specs] == [(KVKind.WINDOW, 5), (KVKind.FULL, 0)] * 2
    assert len({spec.layer for spec in specs}) == 4
    assert all((s.num_kv_heads, s.head_size, s.v_head_size, s.block_size) == (2, 16, -1, 16) for s in specs)
    assert specs[0].page_bytes == 16 * 2 * 32 * 2


def test_latent_attention_keeps_one_head():
    config = tiny_config("DeepseekV3ForCausalLM").to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    spec = build_model(config, dtype=torch.float32).kv_specs(4, "float32")[0]
    assert (spec.num_kv_heads, spec.head_size, spec.v_head_size) == (1, 24 + 8, 0)


def test_unknown_architecture_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'LlamaForCausalLN' is not declared.*LlamaForCausalLM.*transformers"):
        build_model({"architectures": ["LlamaForCausalLN"]}, dtype=torch.float32)
    with pytest.raises(ConfigError, match="has no architecture"):
        build_model({"hidden_size": 64}, dtype=torch.float32)


def test_first_declared_name_wins():
    assert architecture_name({"architectures": ["SomethingNew", "LlamaForCausalLM"]}) == "LlamaForCausalLM"


def test_aliases_read_like_their_first_name():
    for first, others in ALIASES.items():
        for other in others:
            assert ZOO.get(other) is ZOO.get(first)
            assert read_arch({"architectures": [other]}) == read_arch({"architectures": [first]})


def test_configs_of_the_first_releases():
    """Names that came before transformers took the models in."""
    rw7b = dict(architectures=["RWForCausalLM"], hidden_size=4544, n_head=71, n_layer=4, multi_query=True,
                parallel_attn=True, bias=False, alibi=False, vocab_size=65024)  # fmt: skip
    assert read_arch(rw7b) == read_arch(OLD["falcon-7b"])
    rw40b = dict(architectures=["RWForCausalLM"], hidden_size=8192, n_head=128, n_layer=4, n_head_kv=8,
                 parallel_attn=True, bias=False, alibi=False, vocab_size=65024)  # fmt: skip
    assert read_arch(rw40b) == read_arch(OLD["falcon-40b"])
    epoch = dict(architectures=["StableLMEpochForCausalLM"], hidden_size=2560, intermediate_size=6912, norm_eps=1e-5,
                 num_attention_heads=32, num_heads=32, num_hidden_layers=4, num_key_value_heads=32, rope_pct=0.5,
                 rope_theta=10000, use_qkv_bias=True, vocab_size=50304)  # fmt: skip
    today = {k: v for k, v in epoch.items() if k not in ("norm_eps", "rope_pct", "num_heads")} | dict(
        architectures=["StableLmForCausalLM"], layer_norm_eps=1e-5, partial_rotary_factor=0.5
    )
    assert read_arch(epoch) == read_arch(today)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rope_scaling=dict(rope_type="spiral", factor=2.0)), "unknown rope type 'spiral'"),
        (dict(hidden_act="wobble"), "unknown activation 'wobble'"),
        (dict(layer_types=["full_attention"]), "layer_types names 1 layers, num_hidden_layers is 4"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        read_arch(dict(LLAMA, architectures=["LlamaForCausalLM"], **changes))


def test_refused_variants_say_why():
    with pytest.raises(ConfigError, match="topk_method = 'dice'"):
        read_arch(dict(OLD["deepseek-v2"], topk_method="dice"))
    with pytest.raises(ConfigError, match="apply_residual_connection_post_layernorm"):
        read_arch(dict(OLD["bloom-560m"], apply_residual_connection_post_layernorm=True))
