"""Shapes of well-known models by name, so that a cache can be planned without a download: a plain table.

Holds what decides the size of a cache, never weights; the figures are those that each model was published with.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AutoConfig, PreTrainedConfig


@dataclass(frozen=True)
class Published:
    """A model's type in transformers, the attributes that matter, and where they were published.

    `source` is the name on the Hugging Face hub whose config.json has them, or a paper.
    """

    model_type: str
    attributes: dict[str, object]
    source: str


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, positions: int) -> dict[str, object]:
    return dict(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        max_position_embeddings=positions,
    )


_DEEPSEEK = dict(
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_attention_heads=128,
    num_key_value_heads=128,
    n_group=8,
    max_position_embeddings=163840,
)

SHAPES: dict[str, Published] = {
    "smollm2-135m": Published("llama", _llama(576, 30, 9, 3, 1536, 8192), "HuggingFaceTB/SmolLM2-135M"),
    "llama-2-7b": Published("llama", _llama(4096, 32, 32, 32, 11008, 4096), "meta-llama/Llama-2-7b-hf"),
    "llama-2-70b": Published("llama", _llama(8192, 80, 64, 8, 28672, 4096), "meta-llama/Llama-2-70b-hf"),
    "llama-3.1-8b": Published("llama", _llama(4096, 32, 32, 8, 14336, 131072), "meta-llama/Llama-3.1-8B"),
    "llama-3.1-70b": Published("llama", _llama(8192, 80, 64, 8, 28672, 131072), "meta-llama/Llama-3.1-70B"),
    "mixtral-8x7b": Published(
        "mixtral", {**_llama(4096, 32, 32, 8, 14336, 32768), "sliding_window": None}, "mistralai/Mixtral-8x7B-v0.1"
    ),
    "qwen3-1.7b": Published("qwen3", {**_llama(2048, 28, 16, 8, 6144, 40960), "head_dim": 128}, "Qwen/Qwen3-1.7B"),
    "qwen3-8b": Published("qwen3", {**_llama(4096, 36, 32, 8, 12288, 40960), "head_dim": 128}, "Qwen/Qwen3-8B"),
    # Multi-query attention: all heads share one key and value head.
    "falcon-7b": Published(
        "falcon",
        dict(
            hidden_size=4544,
            num_hidden_layers=32,
            num_attention_heads=71,
            multi_query=True,
            new_decoder_architecture=False,
            max_position_embeddings=2048,
        ),
        "tiiuae/falcon-7b",
    ),
    # No config was published: heads, layers and width are those of the paper's table 2.1, in a decoder of that kind.
    "gpt3-175b": Published(
        "gpt2", dict(n_embd=12288, n_layer=96, n_head=96, n_positions=2048), "Brown et al., 2020 (arXiv:2005.14165)"
    ),
    # Latent attention: 512 channels of latent and 64 of a rotated key, whatever the number of heads.
    "deepseek-v2": Published(
        "deepseek_v2",
        {
            **_DEEPSEEK,
            "hidden_size": 5120,
            "num_hidden_layers": 60,
            "n_routed_experts": 160,
            "num_experts_per_tok": 6,
            "topk_group": 3,
            "first_k_dense_replace": 1,
        },
        "deepseek-ai/DeepSeek-V2",
    ),
    "deepseek-v3": Published(
        "deepseek_v3",
        {
            **_DEEPSEEK,
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
        },
        "deepseek-ai/DeepSeek-V3",
    ),
    # Five sliding layers for each full one.
    "gemma-3-27b": Published(
        "gemma3_text",
        {
            **_llama(5376, 62, 32, 16, 21504, 131072),
            "head_dim": 128,
            "sliding_window": 1024,
            "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(62)],
        },
        "google/gemma-3-27b-it",
    ),
    # Four sliding layers for each full one; the last fifteen read the cache of an earlier layer.
    "gemma-3n-e4b": Published(
        "gemma3n_text",
        {
            **_llama(2048, 35, 8, 2, 16384, 32768),
            "head_dim": 256,
            "sliding_window": 512,
            "num_kv_shared_layers": 15,
            "layer_types": ["full_attention" if i % 5 == 4 else "sliding_attention" for i in range(35)],
        },
        "google/gemma-3n-E4B-it",
    ),
    # A sliding layer before each full one.
    "gpt-oss-20b": Published(
        "gpt_oss",
        {
            **_llama(2880, 24, 64, 8, 2880, 131072),
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
        },
        "openai/gpt-oss-20b",
    ),
    # Three linear-attention layers for each full one.
    "qwen3-next-80b-a3b": Published(
        "qwen3_next",
        {
            **_llama(2048, 48, 16, 2, 5120, 262144),
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(48)],
        },
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
    ),
}


def shape(name: str) -> PreTrainedConfig:
    """The config of a built-in shape, in bfloat16.

    Raises:
        ValueError: there is none of that name; lists those that there are.
    """
    if name not in SHAPES:
        raise ValueError(f"name={name!r} is not a built-in shape; use one of {', '.join(SHAPES)}")
    published = SHAPES[name]
    return AutoConfig.for_model(published.model_type, **published.attributes, dtype="bfloat16")
