"""A tiny random Llama with a byte tokenizer, saved as a model folder once for all eval tests."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from evals.models import Loaded, load


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A model folder: two layers, 2,048 positions, one token a byte."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tiny_folder) -> Loaded:
    """That model, loaded afresh."""
    return load(str(tiny_folder))
