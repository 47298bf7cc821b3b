"""The folder of a tiny tokenizer with a chat template: what a server needs of a model that it does not run."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% if tools %}{{ 'tools: ' ~ tools | map(attribute='function.name') | join(',') ~ '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """256 bytes as ids 0..255 in the order of the byte-level alphabet, then three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    builder = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    builder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    builder.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    builder.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    builder.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
