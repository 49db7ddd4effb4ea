"""Small language models of transformers, of random sizes that are no powers of two."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

WORDS = 53
# The config's class, and what its family has of its own.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 4}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma": ("GemmaConfig", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 8}),
    "olmo2": ("Olmo2Config", {}),
    "phi3": ("Phi3Config", {}),
    "granite": ("GraniteConfig", {}),
    "smollm3": ("SmolLM3Config", {}),
}


def language_model(family: str, seed: int = 0, **more: Any) -> nn.Module:
    """One with random weights, those of its norms too, in training mode."""
    import transformers

    draw = random.Random(f"{family} {seed}")
    name, own = FAMILIES[family]
    heads, width = draw.choice([2, 3, 4]), 2 * draw.choice([3, 4, 5])
    sizes = {
        "vocab_size": WORDS,
        "hidden_size": heads * width,
        "intermediate_size": draw.choice([19, 30, 41]),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if heads % 2 else draw.choice([heads, heads // 2]),
        "head_dim": width,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": draw.random() < 0.5,
    }
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**(sizes | own | more))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                module.weight.add_(0.3 * torch.randn_like(module.weight))
    return model.train()


def batch(seed: int = 0, rows: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    """Words and labels, some of which are ignored."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, WORDS, (rows, length), generator=generator)
    labels = words.clone()
    labels[:, :2] = -100
    return {"input_ids": words, "labels": labels}
