"""A random Llama of 0.2 million weights with a byte-level tokenizer: token ids 0..255 are bytes, three are special."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, TURN_START, TURN_END = 256, 257, 258
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, LAYERS, HEADS, KV_HEADS = 64, 2, 4, 2
CONTEXT = 1024
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": TURN_START,
    "eos_token_id": TURN_END,
    "dtype": "float32",
}
_KV = HIDDEN * KV_HEADS // HEADS
_LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (_KV, HIDDEN),
    "self_attn.v_proj": (_KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (2 * HIDDEN, HIDDEN),
    "mlp.up_proj": (2 * HIDDEN, HIDDEN),
    "mlp.down_proj": (HIDDEN, 2 * HIDDEN),
}


def byte_of(token_id: int) -> int:
    """The byte that a token id stands for."""
    return _BYTES[token_id]


_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# GPT-2's alphabet shows printable bytes as themselves and the other ones, in order, as U+0100 and after.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [b for b in range(256) if b not in _PRINTABLE]
_BYTES = [ord(char) if ord(char) < 0x100 else _OTHERS[ord(char) - 0x100] for char in _ALPHABET]


def write_model(folder: Path) -> Path:
    """A folder with config, weights, tokenizer and chat template."""
    builder = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(_ALPHABET)}, merges=[]))
    builder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    builder.decoder = decoders.ByteLevel()
    builder.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    builder.save(str(folder / "tokenizer.json"))
    named = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(5)
    tensors = {
        "model.embed_tokens.weight": torch.randn(259, HIDDEN, generator=generator) * 0.3,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, shape in _LAYER.items():
            tensors[f"{prefix}.{name}.weight"] = torch.randn(shape, generator=generator) * 0.2
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, str(folder / "model.safetensors"))
    return folder
