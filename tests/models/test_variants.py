"""Switches of the architectures that change what is computed, each against transformers: rope scalings, biases,
norm placement, sparse patterns, head layouts. The default form of every architecture is in test_parity.py."""

import random

import pytest
import torch

from quire.models.build import build_model, read_arch
from quire.schema.errors import CheckpointError
from tests.paged import Paged
from tests.tiny_models import VOCAB, tiny_model

LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16)
MSCALE = dict(YARN, mscale=0.9, mscale_all_dim=0.6)
LONG = dict(rope_type="longrope", rope_theta=1000.0, short_factor=[1.0, 1.1, 1.3, 1.5, 1.6, 1.8, 2.0, 2.2],
            long_factor=[2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0])  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"

VARIANTS = [
    ("LlamaForCausalLM", dict(rope_parameters=LLAMA3)),
    ("LlamaForCausalLM", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=100.0))),
    ("LlamaForCausalLM", dict(rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=100.0))),
    ("LlamaForCausalLM", dict(rope_parameters=YARN)),
    ("LlamaForCausalLM", dict(rope_parameters=dict(YARN, attention_factor=1.3, beta_fast=4.0, beta_slow=0.5))),
    ("LlamaForCausalLM", dict(rope_parameters=MSCALE)),
    ("LlamaForCausalLM", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    ("LlamaForCausalLM", dict(head_dim=24, num_key_value_heads=1)),
    ("LlamaForCausalLM", dict(num_key_value_heads=4, hidden_act="gelu")),
    ("MistralForCausalLM", dict(sliding_window=None)),
    ("Ministral3ForCausalLM", dict(rope_parameters=dict(MSCALE, llama_4_scaling_beta=0.5,
                                                        original_max_position_embeddings=8))),
    ("Qwen2ForCausalLM", dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)),
    ("Qwen3ForCausalLM", dict(attention_bias=True, use_sliding_window=True, sliding_window=3, max_window_layers=1)),
    ("Qwen2MoeForCausalLM", dict(mlp_only_layers=[1], decoder_sparse_step=2, norm_topk_prob=True)),
    ("Qwen3MoeForCausalLM", dict(norm_topk_prob=True, use_sliding_window=True, sliding_window=6)),
    ("SeedOssForCausalLM", dict(attention_bias=False, attention_out_bias=True, mlp_bias=True)),
    ("SmolLM3ForCausalLM", dict(use_sliding_window=True, sliding_window=5)),
    ("Gemma3ForCausalLM", dict(num_hidden_layers=6, rope_parameters={
        FULL: dict(rope_type="linear", factor=8.0, rope_theta=1000.0),
        SLIDING: dict(rope_type="default", rope_theta=100.0)})),
    ("Gemma2ForCausalLM", dict(attn_logit_softcapping=1.0, final_logit_softcapping=None)),
    ("Phi3ForCausalLM", dict(sliding_window=None, rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5,
                                                                       rope_theta=1000.0))),
    ("PhiForCausalLM", dict(qk_layernorm=True)),
    ("OlmoForCausalLM", dict(clip_qkv=None)),
    ("OlmoeForCausalLM", dict(clip_qkv=0.7, norm_topk_prob=True)),
    ("Olmo3ForCausalLM", dict(rope_parameters={FULL: YARN, SLIDING: dict(rope_type="default", rope_theta=1000.0)})),
    ("CohereForCausalLM", dict(use_qk_norm=False, attention_bias=True)),
    ("Starcoder2ForCausalLM", dict(use_bias=False, sliding_window=None)),
    ("StableLmForCausalLM", dict(qk_layernorm=True, use_qkv_bias=True)),
    ("StableLmForCausalLM", dict(use_parallel_residual=True)),
    ("GraniteForCausalLM", dict(attention_bias=True, mlp_bias=True)),
    ("NemotronForCausalLM", dict(attention_bias=True, mlp_bias=True)),
    ("GPTNeoXForCausalLM", dict(use_parallel_residual=False, attention_bias=False)),
    ("FalconForCausalLM", dict(new_decoder_architecture=False, multi_query=True)),
    ("FalconForCausalLM", dict(new_decoder_architecture=False, multi_query=False, parallel_attn=False, bias=True,
                               alibi=True, num_kv_heads=4)),
    ("FalconForCausalLM", dict(num_ln_in_parallel_attn=1, ffn_hidden_size=96)),
    ("GPT2LMHeadModel", dict(scale_attn_by_inverse_layer_idx=True, n_inner=96)),
    ("GPT2LMHeadModel", dict(scale_attn_weights=False)),
    ("GPTJForCausalLM", dict(rotary_dim=16)),
    ("OPTForCausalLM", dict(do_layer_norm_before=False, word_embed_proj_dim=32)),
    ("OPTForCausalLM", dict(enable_bias=False, layer_norm_elementwise_affine=False)),
    ("OPTForCausalLM", dict(_remove_final_layer_norm=True)),
    ("BloomForCausalLM", dict(hidden_size=96, n_head=6)),
    ("GlmForCausalLM", dict(attention_bias=False)),
    ("Glm4MoeForCausalLM", dict(use_qk_norm=False, attention_bias=False, n_group=4, topk_group=2)),
    ("Exaone4ForCausalLM", dict(sliding_window=None, layer_types=[FULL] * 4)),
    ("MixtralForCausalLM", dict(sliding_window=None)),
    ("GptOssForCausalLM", dict(swiglu_limit=0.5, attention_bias=False)),
    ("DeepseekV2ForCausalLM", dict(q_lora_rank=None, topk_method="greedy", rope_parameters=MSCALE)),
    ("DeepseekV2ForCausalLM", dict(attention_bias=True, n_group=4, topk_group=2, first_k_dense_replace=0)),
    ("DeepseekV3ForCausalLM", dict(rope_interleave=False, rope_parameters=MSCALE)),
    ("DeepseekV3ForCausalLM", dict(q_lora_rank=None, norm_topk_prob=False, n_group=4, topk_group=2)),
    ("Dots1ForCausalLM", dict(sliding_window=5, max_window_layers=2)),
    ("GraniteMoeForCausalLM", dict(attention_bias=True)),
    ("Qwen3NextForCausalLM", dict(mlp_only_layers=[1], decoder_sparse_step=2, attention_bias=True)),
    ("Qwen3NextForCausalLM", dict(linear_num_value_heads=2, linear_conv_kernel_dim=3, layer_types=["linear_attention",
                                  FULL, FULL, "linear_attention"])),
    ("Mamba2ForCausalLM", dict(use_bias=True, use_conv_bias=False, n_groups=1, time_step_limit=(0.5, 1.0))),
    ("Zamba2ForCausalLM", dict(num_mem_blocks=2, layers_block_type=["hybrid"] * 2, num_hidden_layers=2,
                               use_mem_rope=False, use_shared_attention_adapter=False, add_bias_linear=True,
                               mamba_ngroups=1)),
    ("MiniMaxForCausalLM", dict(layer_types=["linear_attention", "full_attention"] * 2, num_experts_per_tok=1)),
    ("BambaForCausalLM", dict(mamba_proj_bias=True, attention_bias=True, mlp_bias=True)),
    ("FalconH1ForCausalLM", dict(mamba_rms_norm=False, projectors_bias=True, mamba_proj_bias=True, attention_bias=True,
                                 mlp_bias=True)),
    ("FalconH1ForCausalLM", dict(mamba_norm_before_gate=True)),
    ("GraniteMoeHybridForCausalLM", dict(position_embedding_type="rope", num_local_experts=0)),
    ("NemotronHForCausalLM", dict(moe_latent_size=24, use_bias=True, n_group=2, topk_group=1, mlp_bias=False)),
    ("MambaForCausalLM", dict(use_bias=True, use_conv_bias=False, tie_word_embeddings=False)),
    ("JambaForCausalLM", dict(num_experts=1, mamba_proj_bias=True)),
    ("Lfm2ForCausalLM", dict(conv_bias=True, block_auto_adjust_ff_dim=False)),
    ("Lfm2MoeForCausalLM", dict(use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=2.0)),
    ("HyperCLOVAXForCausalLM", dict(use_post_norm=False, attention_bias=True)),
    ("GraniteSWAForCausalLM", dict(layer_rope_theta=None, attention_bias=True)),
    ("NanoChatForCausalLM", dict(final_logit_softcapping=None, attention_bias=True)),
    ("HunYuanDenseV1ForCausalLM", dict(attention_bias=True)),
    ("MiniCPM3ForCausalLM", dict(q_lora_rank=None, scale_depth=None, dim_model_base=None)),
    ("Ernie4_5_MoeForCausalLM", dict(use_bias=True, moe_layer_interval=2, moe_layer_end_index=3)),
    ("Cohere2MoeForCausalLM", dict(num_shared_experts=1, expert_selection_fn="sigmoid", first_k_dense_replace=1,
                                   prefix_dense_intermediate_size=48)),
    ("Cohere2MoeForCausalLM", dict(num_shared_experts=1, shared_expert_combination_strategy="sum", rms_norm_eps=1e-5)),
    ("Llama4ForCausalLM", dict(num_experts_per_tok=2, use_qk_norm=False, attention_bias=True)),
    ("Llama4ForCausalLM", dict(attn_temperature_tuning=False, no_rope_layers=[1, 0, 0, 1])),
    ("PhimoeForCausalLM", dict(router_jitter_noise=0.2, attention_bias=True, lm_head_bias=True, sliding_window=5)),
    ("AfmoeForCausalLM", dict(mup_enabled=False, num_dense_layers=0)),
    ("AriaTextForCausalLM", dict(mlp_bias=True, attention_bias=True)),
    ("GPTBigCodeForCausalLM", dict(multi_query=False, scale_attn_weights=False)),
    ("MptForCausalLM", dict(attn_config=dict(clip_qkv=1.0, softmax_scale=0.1))),
    ("MptForCausalLM", dict(d_model=96, n_heads=6)),
    ("PersimmonForCausalLM", dict(qk_layernorm=False)),
    ("XGLMForCausalLM", dict(scale_embedding=False)),
    ("BartForCausalLM", dict(scale_embedding=True)),
    ("OlmoHybridForCausalLM", dict(linear_allow_neg_eigval=False, rope_parameters=dict(rope_type="default",
                                                                                       rope_theta=None))),
]  # fmt: skip


def prompts_of(*lengths, seed=5):
    rng = random.Random(seed)
    return [[rng.randrange(4, VOCAB) for _ in range(n)] for n in lengths]


def both(name, prompts, overrides, **options):
    """(our model, largest relative error over all prompts in random chunks)."""
    hf = tiny_model(name, **overrides)
    if overrides.get("alibi"):
        hf.config._attn_implementation = "sdpa"  # Falcon's eager form adds the slopes twice
    config = hf.config.to_dict() | {"architectures": [name]}
    model = build_model(config, dtype=torch.float32, **options)
    model.load_weights(hf.state_dict().items())
    with torch.no_grad():
        want = [hf(torch.tensor([p])).logits[0] for p in prompts]
    got = Paged(model, prompts, block_size=4).in_chunks(seed=1)
    return model, max(((w - g).abs().max() / w.abs().max()).item() for w, g in zip(want, got, strict=True))


@pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_variant(name, overrides):
    _, error = both(name, prompts_of(24, 9), overrides)
    assert error <= 1e-4


def test_dynamic_rope_beyond_the_trained_length():
    """transformers stretches by the sequence it sees; we by the longest we are asked to serve. Equal at that length."""
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=100.0)
    overrides = dict(max_position_embeddings=16, rope_parameters=rope)
    assert both("LlamaForCausalLM", prompts_of(24), overrides, max_model_len=24)[1] <= 1e-4
    assert both("LlamaForCausalLM", prompts_of(24), overrides, max_model_len=48)[1] > 1e-2
    assert both("LlamaForCausalLM", prompts_of(16), overrides, max_model_len=16)[1] <= 1e-4


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_longrope_short_and_long(partial):
    """Short factors while nothing longer than the trained length may come, long ones (for all tokens) otherwise."""
    n = int(8 * partial)
    rope = dict(LONG, short_factor=LONG["short_factor"][:n], long_factor=LONG["long_factor"][:n],
                partial_rotary_factor=partial)  # fmt: skip
    overrides = dict(sliding_window=None, original_max_position_embeddings=16, rope_parameters=rope)
    assert both("Phi3ForCausalLM", prompts_of(16), overrides, max_model_len=16)[1] <= 1e-4
    assert both("Phi3ForCausalLM", prompts_of(24), overrides, max_model_len=512)[1] <= 1e-4
    assert both("Phi3ForCausalLM", prompts_of(24), overrides, max_model_len=16)[1] > 1e-2


# --- loading ---------------------------------------------------------------------------------------------------------


def small_llama():
    hf = tiny_model("LlamaForCausalLM")
    return build_model(hf.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, dtype=torch.float32), hf


def test_wrong_shape_names_tensor_and_shapes():
    model, _ = small_llama()
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.up_proj.weight.*\[95, 64\].*\[96, 64\]"):
        model.load_weights([("model.layers.0.mlp.up_proj.weight", torch.zeros(95, 64))])


def test_unexpected_and_missing_names():
    model, hf = small_llama()
    table = model.table()
    assert not table.load("model.layers.0.mlp.side_proj.weight", torch.zeros(1))
    tensors = dict(hf.state_dict())
    tensors.pop("model.layers.2.self_attn.k_proj.weight")
    for name, tensor in tensors.items():
        assert table.load(name, tensor)
    assert table.missing() == ["model.layers.2.self_attn.k_proj.weight"]
    with pytest.raises(CheckpointError, match="side_proj"):
        model.load_weights([("model.layers.0.mlp.side_proj.weight", torch.zeros(1))])


def test_fused_spelling_fills_all_parts():
    model, hf = small_llama()
    state, table = hf.state_dict(), model.table()
    stem = "model.layers.1."
    qkv = torch.cat([state[f"{stem}self_attn.{p}_proj.weight"] for p in "qkv"])
    up = torch.cat([state[f"{stem}mlp.{p}_proj.weight"] for p in ("gate", "up")])
    before = set(table.missing())
    assert table.load(f"{stem}self_attn.qkv_proj.weight", qkv) and table.load(f"{stem}mlp.gate_up_proj.weight", up)
    assert len(before - set(table.missing())) == 5
    assert torch.equal(model.layers[1].attn.qkv.weight, qkv)


@pytest.mark.parametrize(
    ("name", "junk"),
    [
        ("GPT2LMHeadModel", "h.0.attn.bias"),
        ("GPT2LMHeadModel", "transformer.h.0.attn.masked_bias"),
        ("GPTNeoXForCausalLM", "gpt_neox.layers.1.attention.bias"),
        ("GPTNeoXForCausalLM", "gpt_neox.layers.1.attention.rotary_emb.inv_freq"),
        ("LlamaForCausalLM", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("DeepseekV3ForCausalLM", "model.layers.4.mlp.experts.0.up_proj.weight"),
        ("GPT2LMHeadModel", "lm_head.weight"),
    ],
)
def test_known_junk_is_ignored(name, junk):
    hf = tiny_model(name)
    table = build_model(hf.config.to_dict() | {"architectures": [name]}, dtype=torch.float32).table()
    assert table.ignores(junk) and table.load(junk, torch.zeros(3))
    assert not any(table.ignores(slot.name) for slot in table)


@pytest.mark.parametrize(("name", "prefix"), [
    ("GPT2LMHeadModel", "transformer."), ("BloomForCausalLM", "transformer."), ("OPTForCausalLM", "model."),
    ("SmolLM3ForCausalLM", "model."),
])  # fmt: skip
def test_checkpoints_without_their_prefix(name, prefix):
    """Some hubs hold the base model: names without the first word."""
    hf = tiny_model(name)
    model = build_model(hf.config.to_dict() | {"architectures": [name]}, dtype=torch.float32)
    table = model.table()
    for key, tensor in hf.state_dict().items():
        assert table.load(key.removeprefix(prefix), tensor), key
    assert table.missing() == []


def test_tied_head_is_one_tensor():
    hf = tiny_model("SmolLM3ForCausalLM")
    model = build_model(hf.config.to_dict() | {"architectures": ["SmolLM3ForCausalLM"]}, dtype=torch.float32)
    assert model.head.weight is model.embed.weight
    assert read_arch(hf.config.to_dict() | {"architectures": ["SmolLM3ForCausalLM"]}).tie


def test_weights_arrive_in_the_model_dtype():
    hf = tiny_model("DeepseekV3ForCausalLM")
    config = hf.config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    model = build_model(config, dtype=torch.bfloat16)
    model.load_weights(hf.state_dict().items())
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    wide = {name for name, dtype in kinds.items() if dtype is torch.float32}
    assert wide == {name for name in kinds if name.endswith("select_bias")} and wide
    assert all(not p.requires_grad for p in model.parameters())
