"""Tiny random models, one function each, and random prompts for them.

The weights are drawn ten times wider than usual: a correct cache then differs from its oracle by under 2e-5 in the
logits, and a wrong one by more than 1.
"""

import torch
import transformers

VOCAB = 97
PAD = 0
TINY = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    initializer_range=0.2,
    pad_token_id=PAD,
    bos_token_id=None,
    eos_token_id=None,
)

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}


def build(model_class, config, seed=0, **changes):
    """A model of `model_class` with weights drawn from `seed`, in evaluation mode."""
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    return model_class(config).eval()


def tiny_llama(seed=0, *, attention="sdpa", **overrides):
    config = transformers.LlamaConfig(**{**TINY, **overrides})
    config._attn_implementation = attention
    return build(transformers.LlamaForCausalLM, config, seed)


def tiny_phi(seed=0, **overrides):
    """Partial rotary embedding: half of each head is rotated, in halves as Llama does it."""
    settings = {**TINY, "partial_rotary_factor": 0.5, **overrides}
    settings.pop("head_dim")
    return build(transformers.PhiForCausalLM, transformers.PhiConfig(**settings), seed)


def tiny_glm(seed=0, **overrides):
    """Partial rotary embedding whose pairs are interleaved."""
    settings = {**TINY, "partial_rotary_factor": 0.5, **overrides}
    return build(transformers.GlmForCausalLM, transformers.GlmConfig(**settings), seed)


def tiny_gemma2(seed=0, **overrides):
    """Soft-capped attention scores; sliding and full layers in turn."""
    settings = {**TINY, "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, **overrides}
    config = transformers.Gemma2Config(**settings)
    config._attn_implementation = "eager"  # sdpa has no soft-capping, and not every transformers avoids it by itself
    return build(transformers.Gemma2ForCausalLM, config, seed)


def tiny_gemma3(seed=0, **overrides):
    """Three sliding layers and one full layer, each kind with its own rotary base."""
    settings = {
        **TINY,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        **overrides,
    }
    return build(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**settings), seed)


def tiny_gpt_oss(seed=0, **overrides):
    """Learned attention sinks; sliding and full layers in turn; a mixture of experts."""
    settings = {
        **TINY,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": ROPES["default"],
        **overrides,
    }
    model = build(transformers.GptOssForCausalLM, transformers.GptOssConfig(**settings), seed)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.uniform_(0.5, 3.0)  # large enough to take a real share of the softmax
    return model


def tiny_qwen3_next(seed=0, **overrides):
    """Linear-attention layers with one full-attention layer."""
    settings = {
        **TINY,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        **overrides,
    }
    return build(transformers.Qwen3NextForCausalLM, transformers.Qwen3NextConfig(**settings), seed)


def tiny_deepseek(seed=0, **overrides):
    """Latent attention: the cache gets one head, 24 channels as keys and 8 as values, and the model expands them."""
    settings = {
        **TINY,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 8,
        **overrides,
    }
    settings.pop("head_dim")
    return build(transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config(**settings), seed)


def tiny_gemma3n(seed=0, **overrides):
    """Sliding and full layers, of which the last two read the cache of an earlier layer and have none of their own."""
    settings = {
        **TINY,
        "num_hidden_layers": 5,
        "sliding_window": 8,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 5,
        **overrides,
    }
    return build(transformers.Gemma3nForCausalLM, transformers.Gemma3nTextConfig(**settings), seed)


def tiny_gemma4(seed=0, **overrides):
    """As Gemma 3n: the last four layers read the keys and values of the last full and the last sliding one before them.

    Its scores are not divided by the root of the head's width.
    """
    settings = {
        **TINY,
        "num_hidden_layers": 7,
        "initializer_range": 0.1,
        "sliding_window": 8,
        "layer_types": [f"{'full' if i in (2, 4, 6) else 'sliding'}_attention" for i in range(7)],
        "num_kv_shared_layers": 4,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 16,
        **overrides,
    }
    return build(transformers.Gemma4ForCausalLM, transformers.Gemma4TextConfig(**settings), seed)


def tiny_falcon(seed=0, **overrides):
    """Multi-query attention: all heads share one key and value head, whatever the config's number of them says."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "multi_query": True,
        "new_decoder_architecture": False,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        **overrides,
    }
    return build(transformers.FalconForCausalLM, transformers.FalconConfig(**settings), seed)


def tiny_lfm2(seed=0, **overrides):
    """Short convolutions, whose last inputs are their state, with one full-attention layer."""
    settings = {**TINY, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, **overrides}
    settings.pop("head_dim")
    return build(transformers.Lfm2ForCausalLM, transformers.Lfm2Config(**settings), seed)


def tiny_jamba(seed=0, **overrides):
    """A state space layer with a full-attention layer."""
    settings = {
        **TINY,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
        **overrides,
    }
    settings.pop("head_dim")
    return build(transformers.JambaForCausalLM, transformers.JambaConfig(**settings), seed)


def tiny_bloom(seed=0):
    """A model that computes attention in its own code: no attention function can be routed."""
    config = transformers.BloomConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        n_layer=2,
        n_head=4,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return build(transformers.BloomForCausalLM, config, seed)


def tokens(rows, length, seed=0):
    """Random token ids `[rows, length]`, none of them the padding token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (rows, length), generator=generator)


def left_padded(lengths, seed=0):
    """Rows of the given lengths: `(the rows alone, ids, attention_mask)`, the latter two padded on the left."""
    rows = [tokens(1, length, seed + i) for i, length in enumerate(lengths)]
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :] = row
        mask[i, width - row.shape[1] :] = 1
    return rows, ids, mask
