"""A tokenizer and a chat template for tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content | trim }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
BYTES = 16  # byte-fallback tokens: enough for one character outside the letters


def write_tokenizer(folder: Path) -> None:
    """Letters as tokens, byte fallback for é, and Gemma's special tokens; no more than the tiny vocabulary."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
    pieces = specials + ["<0xC3>", "<0xA9>", "<0x0A>", "▁"] + [chr(c) for c in range(ord("a"), ord("z") + 1)]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
