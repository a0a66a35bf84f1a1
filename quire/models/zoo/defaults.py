"""Defaults for keys that a config.json lacks: those of transformers 5, per architecture.

Data only. tests/models/test_declared.py compares every entry with transformers' config classes.
"""

from __future__ import annotations

from typing import Any

from quire.models.zoo.defaults_more import MORE

_GPT_OSS_ROPE = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096
)
_MINISTRAL3_ROPE = dict(
    rope_type="yarn", rope_theta=1000000.0, factor=16.0, original_max_position_embeddings=16384, beta_fast=32.0,
    beta_slow=1.0, mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.1,
)  # fmt: skip

# fmt: off
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=2048, rms_norm_eps=1e-06, tie_word_embeddings=False,
    ),
    "MistralForCausalLM": dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-06, tie_word_embeddings=False,
        sliding_window=4096,
    ),
    "Ministral3ForCausalLM": dict(
        vocab_size=131072, hidden_size=4096, intermediate_size=14336, num_hidden_layers=34, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-05,
        tie_word_embeddings=False, rope_theta=10000.0, rope_parameters=_MINISTRAL3_ROPE,
    ),
    "Qwen2ForCausalLM": dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=32768, rms_norm_eps=1e-06, tie_word_embeddings=False,
        use_sliding_window=False, sliding_window=4096, max_window_layers=28,
    ),
    "Qwen3ForCausalLM": dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, head_dim=128, max_position_embeddings=32768, rms_norm_eps=1e-06,
        tie_word_embeddings=False, use_sliding_window=False, sliding_window=4096, max_window_layers=28,
    ),
    "SeedOssForCausalLM": dict(
        vocab_size=155136, hidden_size=4096, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=80,
        num_key_value_heads=8, max_position_embeddings=524288, rms_norm_eps=1e-06, tie_word_embeddings=False,
        attention_bias=True, attention_out_bias=False, head_dim=128,
    ),
    "ArceeForCausalLM": dict(
        vocab_size=32000, hidden_size=2560, intermediate_size=18432, num_hidden_layers=32, num_attention_heads=32,
        hidden_act="relu2", max_position_embeddings=4096, rms_norm_eps=1e-05, tie_word_embeddings=False,
    ),
    "SmolLM3ForCausalLM": dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=32768, rms_norm_eps=1e-06, use_sliding_window=False,
        no_rope_layer_interval=4, tie_word_embeddings=True, rope_theta=2000000.0,
    ),
    "HeliumForCausalLM": dict(
        vocab_size=48000, hidden_size=2560, intermediate_size=7040, num_hidden_layers=24, num_attention_heads=20,
        num_key_value_heads=20, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-08,
        tie_word_embeddings=False, rope_theta=100000.0,
    ),
    "GemmaForCausalLM": dict(
        vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=16, head_dim=256, hidden_act="gelu_pytorch_tanh", max_position_embeddings=8192,
        rms_norm_eps=1e-06, tie_word_embeddings=True,
    ),
    "Gemma2ForCausalLM": dict(
        vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192,
        rms_norm_eps=1e-06, tie_word_embeddings=True, query_pre_attn_scalar=256, sliding_window=4096,
        final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
    ),
    "Gemma3ForCausalLM": dict(
        vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=131072,
        rms_norm_eps=1e-06, tie_word_embeddings=True, query_pre_attn_scalar=256, sliding_window=4096,
        rope_theta=1000000.0, rope_local_base_freq=10000.0,
    ),
    "Gemma3nForCausalLM": dict(
        vocab_size=262400, hidden_size=2048, intermediate_size=16384, num_hidden_layers=35, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=32768,
        rms_norm_eps=1e-06, tie_word_embeddings=True, sliding_window=512, rope_theta=1000000.0,
        rope_local_base_freq=10000.0, final_logit_softcapping=30.0, vocab_size_per_layer_input=262144,
        hidden_size_per_layer_input=256, altup_active_idx=0, altup_correct_scale=True, altup_num_inputs=4,
        num_kv_shared_layers=15, laurel_rank=64,
    ),
    "Phi3ForCausalLM": dict(
        vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-05,
        tie_word_embeddings=False,
    ),
    "PhiForCausalLM": dict(
        vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32,
        hidden_act="gelu_new", max_position_embeddings=2048, layer_norm_eps=1e-05, tie_word_embeddings=False,
        qk_layernorm=False, partial_rotary_factor=0.5,
    ),
    "OlmoForCausalLM": dict(
        vocab_size=50304, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=2048, tie_word_embeddings=False,
    ),
    "Olmo2ForCausalLM": dict(
        vocab_size=50304, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=2048, tie_word_embeddings=False, rms_norm_eps=1e-05,
    ),
    "Olmo3ForCausalLM": dict(
        vocab_size=50304, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=2048, tie_word_embeddings=False, rms_norm_eps=1e-05, sliding_window=4096,
        rope_theta=500000.0,
    ),
    "CohereForCausalLM": dict(
        vocab_size=256000, hidden_size=8192, intermediate_size=22528, logit_scale=0.0625, num_hidden_layers=40,
        num_attention_heads=64, max_position_embeddings=8192, layer_norm_eps=1e-05, tie_word_embeddings=True,
        use_qk_norm=False, rope_theta=500000.0,
    ),
    "Cohere2ForCausalLM": dict(
        vocab_size=256000, hidden_size=8192, intermediate_size=22528, logit_scale=0.0625, num_hidden_layers=40,
        num_attention_heads=64, max_position_embeddings=8192, layer_norm_eps=1e-05, tie_word_embeddings=True,
        sliding_window=4096,
    ),
    "Starcoder2ForCausalLM": dict(
        vocab_size=49152, hidden_size=3072, intermediate_size=12288, num_hidden_layers=30, num_attention_heads=24,
        num_key_value_heads=2, hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096, norm_epsilon=1e-05,
        use_bias=True, tie_word_embeddings=True,
    ),
    "StableLmForCausalLM": dict(
        vocab_size=50304, intermediate_size=6912, hidden_size=2560, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=4096, layer_norm_eps=1e-05, tie_word_embeddings=False,
        use_qkv_bias=False, qk_layernorm=False, use_parallel_residual=False, partial_rotary_factor=0.25,
    ),
    "GraniteForCausalLM": dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=2048, rms_norm_eps=1e-06, tie_word_embeddings=False, embedding_multiplier=1.0,
        logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0,
    ),
    "NemotronForCausalLM": dict(
        vocab_size=256000, hidden_size=6144, intermediate_size=24576, num_hidden_layers=32, num_attention_heads=48,
        hidden_act="relu2", max_position_embeddings=4096, norm_eps=1e-05, tie_word_embeddings=False,
        partial_rotary_factor=0.5,
    ),
    "GPTNeoXForCausalLM": dict(
        vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64, intermediate_size=24576,
        hidden_act="gelu", max_position_embeddings=2048, layer_norm_eps=1e-05, tie_word_embeddings=False,
        use_parallel_residual=True, attention_bias=True, partial_rotary_factor=0.25,
    ),
    "FalconForCausalLM": dict(
        vocab_size=65024, hidden_size=4544, num_hidden_layers=32, num_attention_heads=71, layer_norm_epsilon=1e-05,
        alibi=False, new_decoder_architecture=False, multi_query=True, parallel_attn=True, bias=False,
        max_position_embeddings=2048, activation="gelu", tie_word_embeddings=True,
    ),
    "GPT2LMHeadModel": dict(
        vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12, activation_function="gelu_new",
        layer_norm_epsilon=1e-05, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
        tie_word_embeddings=True,
    ),
    "OPTForCausalLM": dict(
        vocab_size=50272, hidden_size=768, num_hidden_layers=12, ffn_dim=3072, max_position_embeddings=2048,
        do_layer_norm_before=True, num_attention_heads=12, activation_function="relu", enable_bias=True,
        layer_norm_elementwise_affine=True, tie_word_embeddings=True,
    ),
    "BloomForCausalLM": dict(
        vocab_size=250880, hidden_size=64, n_layer=2, n_head=8, layer_norm_epsilon=1e-05,
        apply_residual_connection_post_layernorm=False, tie_word_embeddings=True,
    ),
    "GPTJForCausalLM": dict(
        vocab_size=50400, n_positions=2048, n_embd=4096, n_layer=28, n_head=16, rotary_dim=64,
        activation_function="gelu_new", layer_norm_epsilon=1e-05, tie_word_embeddings=False,
    ),
    "GlmForCausalLM": dict(
        vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-07,
        tie_word_embeddings=False, attention_bias=True, partial_rotary_factor=0.5,
    ),
    "Glm4ForCausalLM": dict(
        vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-07,
        tie_word_embeddings=False, attention_bias=True, partial_rotary_factor=0.5,
    ),
    "Exaone4ForCausalLM": dict(
        vocab_size=102400, hidden_size=4096, intermediate_size=16384, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=2048, rms_norm_eps=1e-05, tie_word_embeddings=False,
        sliding_window=4096, sliding_window_pattern=4,
    ),
    "MixtralForCausalLM": dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-05, tie_word_embeddings=False,
        num_experts_per_tok=2, num_local_experts=8, rope_theta=1000000.0,
    ),
    "Qwen2MoeForCausalLM": dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=32768, rms_norm_eps=1e-06, tie_word_embeddings=False,
        use_sliding_window=False, sliding_window=4096, max_window_layers=28, decoder_sparse_step=1,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts_per_tok=4, num_experts=60,
        norm_topk_prob=False, qkv_bias=True,
    ),
    "Qwen3MoeForCausalLM": dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=32768, rms_norm_eps=1e-06, tie_word_embeddings=False,
        use_sliding_window=False, sliding_window=4096, decoder_sparse_step=1, moe_intermediate_size=768,
        num_experts_per_tok=8, num_experts=128, norm_topk_prob=False,
    ),
    "OlmoeForCausalLM": dict(
        vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=16,
        max_position_embeddings=4096, rms_norm_eps=1e-05, tie_word_embeddings=False, num_experts_per_tok=8,
        num_experts=64, norm_topk_prob=False,
    ),
    "GptOssForCausalLM": dict(
        num_hidden_layers=36, num_local_experts=128, vocab_size=201088, hidden_size=2880, intermediate_size=2880,
        head_dim=64, num_attention_heads=64, num_key_value_heads=8, sliding_window=128, tie_word_embeddings=False,
        max_position_embeddings=131072, rms_norm_eps=1e-05, num_experts_per_tok=4, swiglu_alpha=1.702,
        swiglu_limit=7.0, attention_bias=True, rope_theta=150000.0, rope_parameters=_GPT_OSS_ROPE,
    ),
    "DeepseekV2ForCausalLM": dict(
        vocab_size=102400, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=2048, rms_norm_eps=1e-06, tie_word_embeddings=False, first_k_dense_replace=0,
        kv_lora_rank=512, q_lora_rank=1536, n_routed_experts=64, n_shared_experts=2, qk_nope_head_dim=128,
        qk_rope_head_dim=64, routed_scaling_factor=1.0, topk_method="greedy", norm_topk_prob=False, v_head_dim=128,
        moe_intermediate_size=1407,
    ),
    "DeepseekV3ForCausalLM": dict(
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
        num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, n_shared_experts=1,
        n_routed_experts=256, routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
        v_head_dim=128, qk_nope_head_dim=128, n_group=8, topk_group=4, num_experts_per_tok=8, first_k_dense_replace=3,
        norm_topk_prob=True, max_position_embeddings=4096, rms_norm_eps=1e-06, tie_word_embeddings=False,
        rope_interleave=True, num_nextn_predict_layers=1,
    ),
    "LongcatFlashForCausalLM": dict(
        vocab_size=131072, hidden_size=6144, num_layers=28, num_attention_heads=64, hidden_act="silu",
        max_position_embeddings=131072, rms_norm_eps=1e-05, tie_word_embeddings=False, attention_bias=False,
        ffn_hidden_size=12288, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, moe_topk=12, n_routed_experts=512, zero_expert_num=256, expert_ffn_hidden_size=2048,
        routed_scaling_factor=6.0, rope_theta=10000000.0,
    ),
    "Glm4MoeForCausalLM": dict(
        vocab_size=151552, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46, num_attention_heads=96,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-05, tie_word_embeddings=False,
        moe_intermediate_size=1408, num_experts_per_tok=8, n_shared_experts=1, n_routed_experts=128,
        routed_scaling_factor=1.0, n_group=1, topk_group=1, first_k_dense_replace=1, norm_topk_prob=True,
        use_qk_norm=False, num_nextn_predict_layers=1, partial_rotary_factor=0.5,
    ),
    "Dots1ForCausalLM": dict(
        vocab_size=152064, hidden_size=4608, intermediate_size=10944, moe_intermediate_size=1408,
        num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=32, n_group=1, topk_group=1,
        first_k_dense_replace=0, norm_topk_prob=False, max_position_embeddings=2048, rms_norm_eps=1e-06,
        tie_word_embeddings=False, routed_scaling_factor=1.0, sliding_window=4096, max_window_layers=62,
    ),
    "GraniteMoeForCausalLM": dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=2048, rms_norm_eps=1e-06, tie_word_embeddings=False, embedding_multiplier=1.0,
        logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0, num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "Qwen3NextForCausalLM": dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=48, num_attention_heads=16,
        num_key_value_heads=2, hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-06,
        tie_word_embeddings=False, head_dim=256, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, decoder_sparse_step=1,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts_per_tok=10, num_experts=512,
        norm_topk_prob=True, partial_rotary_factor=0.25,
    ),
    "Mamba2ForCausalLM": dict(
        num_heads=128, head_dim=64, vocab_size=32768, hidden_size=4096, state_size=128, num_hidden_layers=64,
        layer_norm_epsilon=1e-05, expand=2, conv_kernel=4, n_groups=8, use_bias=False, use_conv_bias=True,
        hidden_act="silu", tie_word_embeddings=False,
    ),
    "BambaForCausalLM": dict(
        vocab_size=128000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, hidden_act="silu", max_position_embeddings=262144, rms_norm_eps=1e-05,
        tie_word_embeddings=False, mamba_n_heads=128, mamba_d_head="auto", mamba_n_groups=1, mamba_d_state=256,
        mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True, mamba_proj_bias=False, partial_rotary_factor=0.5,
    ),
    "Qwen3_5ForCausalLM": dict(
        vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=4, hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-06,
        tie_word_embeddings=False, head_dim=256, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, partial_rotary_factor=0.25,
    ),
    "Qwen3_5MoeForCausalLM": dict(
        vocab_size=248320, hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
        hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-06, tie_word_embeddings=False, head_dim=256,
        linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
        linear_num_value_heads=32, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        num_experts_per_tok=8, num_experts=256, partial_rotary_factor=0.25,
    ),
    "OlmoHybridForCausalLM": dict(
        vocab_size=100352, hidden_size=3840, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=30,
        hidden_act="silu", max_position_embeddings=65536, rms_norm_eps=1e-06, tie_word_embeddings=False,
        linear_conv_kernel_dim=4, linear_allow_neg_eigval=True,
    ),
    "FalconH1ForCausalLM": dict(
        vocab_size=128000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, hidden_act="silu", max_position_embeddings=8192, rms_norm_eps=1e-05,
        tie_word_embeddings=False, mamba_d_ssm=1024, mamba_n_heads=128, mamba_d_head="auto", mamba_n_groups=1,
        mamba_d_state=256, mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True, mamba_proj_bias=False,
        mamba_norm_before_gate=True, mamba_rms_norm=False, projectors_bias=False, lm_head_multiplier=1.0,
        embedding_multiplier=1.0, key_multiplier=1.0, attention_out_multiplier=1.0, attention_in_multiplier=1.0,
        ssm_in_multiplier=1.0, ssm_out_multiplier=1.0,
    ),
    "GraniteMoeHybridForCausalLM": dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        hidden_act="silu", max_position_embeddings=2048, rms_norm_eps=1e-06, tie_word_embeddings=False,
        embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0,
        num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=1024, mamba_n_heads=128,
        mamba_n_groups=1, mamba_d_state=256, mamba_d_head="auto", mamba_d_conv=4, mamba_expand=2,
        mamba_conv_bias=True, mamba_proj_bias=False,
    ),
    "NemotronHForCausalLM": dict(
        vocab_size=131072, hidden_size=4096, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        tie_word_embeddings=False, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=4096, intermediate_size=21504, mlp_hidden_act="relu2", mlp_bias=False,
        ssm_state_size=128, mamba_num_heads=128, mamba_head_dim=64, mamba_hidden_act="silu", n_groups=8, conv_kernel=4,
        time_step_min=0.001, use_conv_bias=True, n_routed_experts=8, moe_intermediate_size=7688,
        moe_shared_expert_intermediate_size=7688, num_experts_per_tok=2, routed_scaling_factor=1.0, n_group=1,
        topk_group=1, norm_topk_prob=True, use_bias=False, layer_norm_epsilon=1e-05,
    ),
    "MambaForCausalLM": dict(
        vocab_size=50280, hidden_size=768, state_size=16, num_hidden_layers=32, layer_norm_epsilon=1e-05, expand=2,
        conv_kernel=4, use_bias=False, use_conv_bias=True, hidden_act="silu", time_step_rank="auto",
        tie_word_embeddings=True,
    ),
    "FalconMambaForCausalLM": dict(
        vocab_size=50280, hidden_size=768, state_size=16, num_hidden_layers=32, layer_norm_epsilon=1e-05, expand=2,
        conv_kernel=4, use_bias=False, use_conv_bias=True, hidden_act="silu", time_step_rank="auto",
        tie_word_embeddings=True, mixer_rms_eps=1e-06,
    ),
    "JambaForCausalLM": dict(
        vocab_size=65536, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, hidden_act="silu", max_position_embeddings=262144, rms_norm_eps=1e-06,
        tie_word_embeddings=False, num_experts_per_tok=2, num_experts=16, expert_layer_period=2, expert_layer_offset=1,
        attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
        mamba_dt_rank="auto", mamba_conv_bias=True, mamba_proj_bias=False,
    ),
    "Lfm2ForCausalLM": dict(
        vocab_size=65536, hidden_size=2560, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=128000, norm_eps=1e-05, tie_word_embeddings=True,
        conv_bias=False, conv_L_cache=3, block_multiple_of=256, block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True, rope_theta=1000000.0,
    ),
    "Lfm2MoeForCausalLM": dict(
        vocab_size=65536, hidden_size=2048, intermediate_size=7168, moe_intermediate_size=1792, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=128000, norm_eps=1e-05,
        tie_word_embeddings=True, conv_bias=False, conv_L_cache=3, num_dense_layers=2, num_experts_per_tok=4,
        num_experts=32, use_expert_bias=True, routed_scaling_factor=1.0, norm_topk_prob=True, rope_theta=1000000.0,
    ),
    "MiniMaxForCausalLM": dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, hidden_act="silu", max_position_embeddings=131072, rms_norm_eps=1e-05,
        tie_word_embeddings=False, num_experts_per_tok=2, num_local_experts=8, rope_theta=1000000.0,
    ),
    "Zamba2ForCausalLM": dict(
        vocab_size=32000, max_position_embeddings=4096, hidden_size=2560, num_hidden_layers=54, mamba_d_state=64,
        mamba_d_conv=4, mamba_expand=2, mamba_ngroups=1, time_step_min=0.001, n_mamba_heads=8, add_bias_linear=False,
        hidden_act="gelu", num_attention_heads=32, num_mem_blocks=1, use_shared_attention_adapter=False,
        adapter_rank=128, use_mem_rope=False, rms_norm_eps=1e-05, use_long_context=False, tie_word_embeddings=True,
        layers_block_type=["hybrid" if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "linear_attention"
                           for i in range(54)],
    ),
    "KimiLinearForCausalLM": dict(
        vocab_size=163840, hidden_size=2304, intermediate_size=9216, moe_intermediate_size=1024, num_hidden_layers=27,
        num_attention_heads=32, num_key_value_heads=32, num_shared_experts=1, routed_scaling_factor=2.446,
        kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128, num_expert_group=1, topk_group=1,
        num_experts_per_token=8, moe_renormalize=True, hidden_act="silu", model_max_length=1048576, rms_norm_eps=1e-05,
        tie_word_embeddings=False, num_experts=256, linear_head_dim=128, linear_num_heads=32, linear_conv_kernel_dim=4,
    ),
    **MORE,
}
# fmt: on
