"""The defaults of transformers 5 for the families of dense.py, mixtures.py and classic.py; see defaults.py."""

from __future__ import annotations

from typing import Any

# fmt: off
MORE: dict[str, dict[str, Any]] = {
    "MinistralForCausalLM": dict(
        sliding_window=4096, num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, rms_norm_eps=1e-06,
        vocab_size=32000, num_key_value_heads=8, intermediate_size=14336, max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    "CwmForCausalLM": dict(
        num_hidden_layers=64, hidden_size=6144, num_attention_heads=48, head_dim=128, sliding_window=8192,
        max_position_embeddings=131072, rms_norm_eps=1e-05, vocab_size=128256, num_key_value_heads=8,
        intermediate_size=21504, tie_word_embeddings=False, rope_parameters={"rope_theta": 1000000.0, "factor": 16.0,
        "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type":
        "llama3"},
    ),
    "Ernie4_5ForCausalLM": dict(
        use_bias=False, hidden_size=1024, num_attention_heads=16, num_hidden_layers=18, head_dim=128,
        rms_norm_eps=1e-05, vocab_size=103424, num_key_value_heads=2, intermediate_size=3072,
        max_position_embeddings=131072, tie_word_embeddings=True, rope_theta=500000.0,
    ),
    "ApertusForCausalLM": dict(
        hidden_size=4096, num_attention_heads=32, num_hidden_layers=32, max_position_embeddings=65536,
        rms_norm_eps=1e-05, vocab_size=131072, intermediate_size=14336, hidden_act="xielu", tie_word_embeddings=False,
        rope_parameters={"rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "BitNetForCausalLM": dict(
        hidden_size=2560, num_attention_heads=20, num_hidden_layers=30, rms_norm_eps=1e-05, vocab_size=128256,
        num_key_value_heads=5, intermediate_size=6912, max_position_embeddings=2048, hidden_act="relu2",
        tie_word_embeddings=False, rope_theta=500000.0,
    ),
    "Jais2ForCausalLM": dict(
        hidden_size=3328, num_attention_heads=26, num_hidden_layers=32, layer_norm_eps=1e-05, attention_bias=True,
        vocab_size=150272, intermediate_size=26624, max_position_embeddings=8192, hidden_act="relu2", mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "NanoChatForCausalLM": dict(
        final_logit_softcapping=15.0, hidden_size=768, num_attention_heads=6, num_hidden_layers=12, rms_norm_eps=1e-06,
        vocab_size=50304, intermediate_size=8192, max_position_embeddings=2048, hidden_act="relu2",
        tie_word_embeddings=False,
    ),
    "HunYuanDenseV1ForCausalLM": dict(
        hidden_size=4096, num_attention_heads=32, num_hidden_layers=32, rms_norm_eps=1e-05, vocab_size=290943,
        intermediate_size=11008, max_position_embeddings=2048, tie_word_embeddings=False,
    ),
    "HyperCLOVAXForCausalLM": dict(
        logits_scaling=1.0, embedding_multiplier=1.0, residual_multiplier=1.0, hidden_size=4096,
        num_attention_heads=32, num_hidden_layers=32, rms_norm_eps=1e-06, vocab_size=32000, intermediate_size=11008,
        max_position_embeddings=2048, tie_word_embeddings=False, use_post_norm=True,
    ),
    "GraniteSWAForCausalLM": dict(
        num_hidden_layers=24, attention_multiplier=1.0, embedding_multiplier=1.0, residual_multiplier=1.0,
        logits_scaling=1.0, hidden_size=2560, num_attention_heads=20, sliding_window=128, rms_norm_eps=1e-05,
        vocab_size=100352, num_key_value_heads=4, intermediate_size=8192, max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "VaultGemmaForCausalLM": dict(
        num_hidden_layers=26, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, hidden_size=2304, num_attention_heads=8,
        head_dim=256, sliding_window=4096, rms_norm_eps=1e-06, vocab_size=256000, num_key_value_heads=4,
        intermediate_size=9216, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "YoutuForCausalLM": dict(
        rope_interleave=True, v_head_dim=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        q_lora_rank=1536, hidden_size=2048, num_attention_heads=16, num_hidden_layers=32, rms_norm_eps=1e-06,
        vocab_size=128256, num_key_value_heads=16, intermediate_size=6144, max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
    "MiniCPM3ForCausalLM": dict(
        num_hidden_layers=62, hidden_size=2560, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32,
        q_lora_rank=768, num_attention_heads=40, rms_norm_eps=1e-05, vocab_size=73448, num_key_value_heads=40,
        intermediate_size=6400, max_position_embeddings=32768, tie_word_embeddings=True, scale_depth=1.4,
        dim_model_base=256, scale_emb=12,
    ),
    "Ernie4_5_MoeForCausalLM": dict(
        moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1, moe_intermediate_size=1536,
        moe_num_experts=64, moe_k=6, moe_num_shared_experts=2, use_bias=False, hidden_size=2560,
        num_attention_heads=20, num_hidden_layers=28, rms_norm_eps=1e-05, vocab_size=103424, num_key_value_heads=4,
        intermediate_size=12288, max_position_embeddings=131072, tie_word_embeddings=True, rope_theta=500000.0,
    ),
    "HunYuanMoEV1ForCausalLM": dict(
        num_experts=1, moe_topk=1, intermediate_size=11008, hidden_size=4096, num_attention_heads=32,
        num_hidden_layers=32, rms_norm_eps=1e-05, vocab_size=290943, max_position_embeddings=2048,
        tie_word_embeddings=False,
    ),
    "HYV3ForCausalLM": dict(
        hidden_size=4096, num_attention_heads=64, num_hidden_layers=80, head_dim=128, rms_norm_eps=1e-05,
        vocab_size=120832, num_key_value_heads=8, intermediate_size=13312, max_position_embeddings=131072,
        tie_word_embeddings=False, num_experts=192, num_experts_per_tok=8, moe_intermediate_size=1536,
        router_scaling_factor=2.826, num_shared_experts=1, rope_theta=11158840.0,
        first_k_dense_replace=1,
    ),
    "ExaoneMoeForCausalLM": dict(
        sliding_window_pattern=4, num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, sliding_window=4096,
        rms_norm_eps=1e-05, vocab_size=102400, num_key_value_heads=32, intermediate_size=16384,
        max_position_embeddings=2048, tie_word_embeddings=False, norm_topk_prob=True, n_group=1, topk_group=1,
        num_experts=64, num_experts_per_tok=8, moe_intermediate_size=1024, routed_scaling_factor=2.5,
        num_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "FlexOlmoForCausalLM": dict(
        num_experts=7, num_experts_per_tok=5, intermediate_size=11008, norm_topk_prob=False, hidden_size=4096,
        num_attention_heads=32, num_hidden_layers=32, rms_norm_eps=1e-06, vocab_size=100352,
        max_position_embeddings=4096, tie_word_embeddings=False, rope_theta=500000.0,
    ),
    "Kolibri1ForCausalLM": dict(
        num_local_experts=384, num_experts_per_tok=6, moe_intermediate_size=512, norm_topk_prob=False,
        shared_expert_intermediate_size=512, num_hidden_layers=50, hidden_size=2560, num_attention_heads=48,
        head_dim=128, sliding_window=513, rms_norm_eps=1e-06, vocab_size=128000, num_key_value_heads=4,
        max_position_embeddings=262144, tie_word_embeddings=False,
    ),
    "MellumForCausalLM": dict(
        num_local_experts=64, num_experts_per_tok=8, moe_intermediate_size=896, norm_topk_prob=True, hidden_size=2304,
        num_attention_heads=32, num_hidden_layers=28, head_dim=128, sliding_window=1024, rms_norm_eps=1e-06,
        vocab_size=98304, num_key_value_heads=4, intermediate_size=7168, max_position_embeddings=131072,
        tie_word_embeddings=False, rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "MiniMaxM2ForCausalLM": dict(
        num_local_experts=256, num_experts_per_tok=8, intermediate_size=1536, hidden_size=3072, num_attention_heads=48,
        num_hidden_layers=62, head_dim=128, rms_norm_eps=1e-06, vocab_size=200064, num_key_value_heads=8,
        max_position_embeddings=196608, tie_word_embeddings=False, rope_theta=5000000.0,
    ),
    "SolarOpenForCausalLM": dict(
        moe_intermediate_size=1280, hidden_size=4096, num_attention_heads=64, num_hidden_layers=48, head_dim=128,
        rms_norm_eps=1e-05, vocab_size=196608, num_key_value_heads=8, max_position_embeddings=131072,
        tie_word_embeddings=False, norm_topk_prob=True, n_group=1, topk_group=1, n_routed_experts=128,
        num_experts_per_tok=8, routed_scaling_factor=1.0, n_shared_experts=1, rope_theta=1000000.0,
    ),
    "Glm4MoeLiteForCausalLM": dict(
        rope_interleave=True, v_head_dim=256, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64,
        q_lora_rank=768, hidden_size=2048, num_attention_heads=20, num_hidden_layers=47, rms_norm_eps=1e-05,
        vocab_size=154880, num_key_value_heads=20, intermediate_size=10240, max_position_embeddings=202752,
        tie_word_embeddings=False, norm_topk_prob=True, n_group=1, topk_group=1, n_routed_experts=64,
        num_experts_per_tok=4, moe_intermediate_size=1536, routed_scaling_factor=1.8, n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "AXK1ForCausalLM": dict(
        rope_interleave=True, v_head_dim=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        q_lora_rank=1536, hidden_size=7168, num_attention_heads=64, num_hidden_layers=61, rms_norm_eps=1e-06,
        vocab_size=163840, num_key_value_heads=64, intermediate_size=18432, max_position_embeddings=32768,
        tie_word_embeddings=False, norm_topk_prob=True, n_group=8, topk_group=4, n_routed_experts=192,
        num_experts_per_tok=8, moe_intermediate_size=2048, routed_scaling_factor=2.5, n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "DeepseekV32ForCausalLM": dict(
        index_topk=2048, v_head_dim=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, q_lora_rank=1536,
        hidden_size=7168, num_attention_heads=128, num_hidden_layers=61, rms_norm_eps=1e-06, vocab_size=129280,
        num_key_value_heads=128, intermediate_size=18432, max_position_embeddings=163840, tie_word_embeddings=False,
        norm_topk_prob=True, n_group=8, topk_group=4, n_routed_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=2048, routed_scaling_factor=2.5, n_shared_experts=1,
        first_k_dense_replace=3,
    ),
    "GlmMoeDsaForCausalLM": dict(
        index_topk=2048, v_head_dim=256, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, q_lora_rank=2048,
        hidden_size=6144, num_attention_heads=64, num_hidden_layers=78, rms_norm_eps=1e-05, vocab_size=154880,
        num_key_value_heads=64, intermediate_size=12288, max_position_embeddings=202752, tie_word_embeddings=False,
        norm_topk_prob=True, n_group=1, topk_group=1, n_routed_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=2048, routed_scaling_factor=2.5, n_shared_experts=1,
        first_k_dense_replace=3,
    ),
    "AfmoeForCausalLM": dict(
        moe_intermediate_size=1408, num_experts=64, num_experts_per_tok=6, route_scale=1.0, num_shared_experts=2,
        global_attn_every_n_layers=4, num_hidden_layers=32, mup_enabled=False, hidden_size=2048,
        num_attention_heads=16, head_dim=128, sliding_window=1024, rms_norm_eps=1e-05, vocab_size=200192,
        intermediate_size=6144, max_position_embeddings=16384, tie_word_embeddings=False, num_dense_layers=1,
    ),
    "FlintForCausalLM": dict(
        num_hidden_layers=49, num_experts=256, num_experts_per_tok=6, moe_intermediate_size=512, norm_topk_prob=True,
        shared_expert_intermediate_size=1024, hidden_size=2048, num_attention_heads=32, head_dim=128,
        sliding_window=513, rms_norm_eps=1e-06, vocab_size=150144, num_key_value_heads=4, intermediate_size=6144,
        max_position_embeddings=262144, tie_word_embeddings=False, decoder_sparse_step=1,
    ),
    "PhimoeForCausalLM": dict(
        num_local_experts=16, num_experts_per_tok=2, intermediate_size=6400, router_jitter_noise=0.01,
        lm_head_bias=False, hidden_size=4096, num_attention_heads=32, num_hidden_layers=32, rms_norm_eps=1e-05,
        vocab_size=32064, num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False,
        rope_theta=1000000.0,
    ),
    "GraniteMoeSharedForCausalLM": dict(
        num_local_experts=8, num_experts_per_tok=2, intermediate_size=11008, shared_intermediate_size=0,
        attention_multiplier=1.0, embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0,
        hidden_size=4096, num_attention_heads=32, num_hidden_layers=32, rms_norm_eps=1e-06, vocab_size=32000,
        max_position_embeddings=2048, tie_word_embeddings=False,
    ),
    "GraniteMoeSWAForCausalLM": dict(
        num_local_experts=8, num_experts_per_tok=2, intermediate_size=11008, shared_intermediate_size=0,
        num_hidden_layers=32, attention_multiplier=1.0, embedding_multiplier=1.0, residual_multiplier=1.0,
        logits_scaling=1.0, hidden_size=4096, num_attention_heads=32, sliding_window=128, rms_norm_eps=1e-06,
        vocab_size=32000, max_position_embeddings=2048, tie_word_embeddings=False,
    ),
    "Cohere2MoeForCausalLM": dict(
        num_hidden_layers=40, intermediate_size=22528, expert_selection_fn="softmax", num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, num_shared_experts=0, sliding_window_pattern=4, logit_scale=0.0625,
        hidden_size=8192, num_attention_heads=64, head_dim=128, sliding_window=4096, layer_norm_eps=1e-05,
        vocab_size=256000, max_position_embeddings=8192, tie_word_embeddings=True,
        prefix_dense_sliding_window_pattern=1,
    ),
    "Llama4ForCausalLM": dict(
        num_hidden_layers=48, interleave_moe_layer_step=1, num_local_experts=16, num_experts_per_tok=1,
        intermediate_size=8192, attn_temperature_tuning=True, attn_scale=0.1, floor_scale=8192,
        intermediate_size_mlp=16384, use_qk_norm=True, hidden_size=5120, num_attention_heads=40, head_dim=128,
        rms_norm_eps=1e-05, vocab_size=202048, num_key_value_heads=8, max_position_embeddings=131072,
        tie_word_embeddings=False, attention_chunk_size=8192, rope_theta=500000.0,
        no_rope_layer_interval=4,
    ),
    "AriaTextForCausalLM": dict(
        moe_num_experts=8, moe_topk=2, intermediate_size=4096, moe_num_shared_experts=2, hidden_size=4096,
        num_attention_heads=32, num_hidden_layers=32, rms_norm_eps=1e-06, vocab_size=32000,
        max_position_embeddings=2048, tie_word_embeddings=False,
        mlp_bias=False,
    ),
    "GPTBigCodeForCausalLM": dict(
        scale_attn_weights=True, multi_query=True, n_positions=1024, n_embd=768, n_head=12, n_layer=12,
        layer_norm_epsilon=1e-05, vocab_size=50257, num_key_value_heads=1, activation_function="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
    "GPTNeoForCausalLM": dict(
        max_position_embeddings=2048, hidden_size=2048, num_heads=16, num_layers=24, layer_norm_epsilon=1e-05,
        vocab_size=50257, activation_function="gelu_new", tie_word_embeddings=True, window_size=256,
        attention_types=[[["global", "local"], 12]],
    ),
    "CodeGenForCausalLM": dict(
        n_embd=4096, n_head=16, n_layer=28, layer_norm_epsilon=1e-05, vocab_size=50400, n_positions=2048,
        activation_function="gelu_new", tie_word_embeddings=False, rotary_dim=64,
    ),
    "MptForCausalLM": dict(
        layer_norm_epsilon=1e-05, d_model=2048, n_heads=16, n_layers=24, vocab_size=50368, max_seq_len=2048,
        tie_word_embeddings=True,
    ),
    "OpenAIGPTLMHeadModel": dict(
        afn="gelu", n_positions=512, n_embd=768, n_head=12, n_layer=12, layer_norm_epsilon=1e-05, vocab_size=40478,
        tie_word_embeddings=True,
    ),
    "PersimmonForCausalLM": dict(
        qk_layernorm=True, hidden_size=4096, num_attention_heads=64, num_hidden_layers=36, layer_norm_eps=1e-05,
        vocab_size=262144, intermediate_size=16384, max_position_embeddings=16384, hidden_act="relu2",
        tie_word_embeddings=False, partial_rotary_factor=0.5,
    ),
    "XGLMForCausalLM": dict(
        d_model=1024, max_position_embeddings=2048, scale_embedding=True, attention_heads=16, num_layers=24,
        vocab_size=256008, ffn_dim=4096, activation_function="gelu", tie_word_embeddings=True,
    ),
    "BioGptForCausalLM": dict(
        scale_embedding=True, hidden_size=1024, max_position_embeddings=1024, num_attention_heads=16,
        num_hidden_layers=24, layer_norm_eps=1e-12, vocab_size=42384, intermediate_size=4096, hidden_act="gelu",
        tie_word_embeddings=True,
    ),
    "BartForCausalLM": dict(
        max_position_embeddings=1024, scale_embedding=False, decoder_attention_heads=16, decoder_ffn_dim=4096,
        d_model=1024, decoder_layers=12, vocab_size=50265, activation_function="gelu", tie_word_embeddings=True,
    ),
    "PLBartForCausalLM": dict(
        max_position_embeddings=1024, scale_embedding=True, d_model=768, decoder_attention_heads=12,
        decoder_ffn_dim=3072, decoder_layers=6, vocab_size=50005, activation_function="gelu", tie_word_embeddings=True,
    ),
    "MvpForCausalLM": dict(
        max_position_embeddings=1024, scale_embedding=False, decoder_attention_heads=16, decoder_ffn_dim=4096,
        d_model=1024, decoder_layers=12, vocab_size=50267, activation_function="gelu", tie_word_embeddings=True,
    ),
    "MBartForCausalLM": dict(
        max_position_embeddings=1024, scale_embedding=False, decoder_attention_heads=16, decoder_ffn_dim=4096,
        d_model=1024, decoder_layers=12, vocab_size=50265, activation_function="gelu", tie_word_embeddings=True,
    ),
    "PegasusForCausalLM": dict(
        max_position_embeddings=1024, scale_embedding=False, decoder_attention_heads=16, decoder_ffn_dim=4096,
        d_model=1024, decoder_layers=12, vocab_size=50265, activation_function="gelu", tie_word_embeddings=True,
    ),
    "BlenderbotForCausalLM": dict(
        max_position_embeddings=128, scale_embedding=False, decoder_attention_heads=32, decoder_ffn_dim=10240,
        d_model=2560, decoder_layers=24, vocab_size=8008, activation_function="gelu", tie_word_embeddings=True,
    ),
    "MarianForCausalLM": dict(
        max_position_embeddings=1024, scale_embedding=False, decoder_attention_heads=16, decoder_ffn_dim=4096,
        d_model=1024, decoder_layers=12, vocab_size=58101, activation_function="gelu", tie_word_embeddings=True,
    ),
}
# fmt: on
