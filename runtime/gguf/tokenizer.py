"""The tokenizer and the chat template that a GGUF file carries, as tokenizer.json and chat_template.jinja have them.

Gemma-4's is BPE over characters, with bytes for those that it lacks: spaces become ▁, text is parted behind each, and
merges have a rank. llama.cpp (src/llama-vocab.cpp) parts it at line feeds as well, which is the same as long as no
merge crosses one. What is made here is tokenizer.json's own pipeline in the same library: ids are equal by
construction.
"""

from __future__ import annotations

import json
from typing import Any

from kerngen.errors import CheckpointError
from kerngen.runtime.gguf.container import GgufModel

MODEL = "gemma4"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # of tokenizer.ggml.token_type
_SPACE = "▁"
# User-defined tokens that tokenizer.json calls special, which a text leaves out: marks of tools and channels.
_SPECIAL = frozenset((
    "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>",
    "<|channel>", "<channel|>", "<|turn>", "<turn|>",
))  # fmt: skip
_TEMPLATE = "tokenizer.chat_template"
_NO_CHAT = "--no-chat passes the prompt as it is"
_BESIDE = "put the model's tokenizer.json beside the file; it is read in place of the file's own"


def tokenizer_json(model: GgufModel) -> str:
    """What tokenizer.json of the same model says. Raises CheckpointError for another kind, or one that contradicts
    itself.
    """
    head = model.head
    if (kind := head.text("tokenizer.ggml.model")) != MODEL:
        raise head.error(f"tokenizer.ggml.model is {kind!r}; only {MODEL!r} is made a tokenizer of", hint=_BESIDE)
    tokens = head.texts("tokenizer.ggml.tokens")
    types = head.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise head.error(f"tokenizer.ggml.token_type is of {len(types):,} tokens; there are {len(tokens):,}")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise head.error(f"tokenizer.ggml.tokens has {twice!r} twice")
    unknown = head.integer("tokenizer.ggml.unknown_token_id", 3)
    if unknown >= len(tokens):
        raise head.error(f"tokenizer.ggml.unknown_token_id is {unknown}; there are {len(tokens):,} tokens")
    made = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(index, tokens[index], kind) for index, kind in enumerate(types) if _is_added(kind)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": tokens[unknown], "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocab, "merges": _merges(model, vocab),
        },
    }  # fmt: skip
    return json.dumps(made, ensure_ascii=False)


def template_of(model: GgufModel) -> str:
    """The chat template. Raises CheckpointError where there is none."""
    if _TEMPLATE not in model.head:
        raise CheckpointError(f"{model.head.path} has no chat template", hint=_NO_CHAT)
    return model.head.text(_TEMPLATE)


def has_template(model: GgufModel) -> bool:
    return _TEMPLATE in model.head


def tokens_of(model: GgufModel) -> dict[str, int] | None:
    """By their text; None where the file has none."""
    if "tokenizer.ggml.tokens" not in model.head:
        return None
    return {token: index for index, token in enumerate(model.head.texts("tokenizer.ggml.tokens"))}


def _is_added(kind: int) -> bool:
    return kind in (UNKNOWN, CONTROL, USER_DEFINED)


def _added(index: int, token: str, kind: int) -> dict[str, Any]:
    return {
        "id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": kind != USER_DEFINED or token in _SPECIAL,
    }  # fmt: skip


def _merges(model: GgufModel, vocab: dict[str, int]) -> list[str]:
    """Pairs, parted by a space: tokens have none, as spaces are ▁.

    Raises CheckpointError for one that is no pair, and for one that crosses a line feed: llama.cpp would not make it.
    """
    head = model.head
    found = head.texts("tokenizer.ggml.merges") if "tokenizer.ggml.merges" in head else []
    for merge in found:
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise head.error(f"tokenizer.ggml.merges has {merge!r}, which is no pair of tokens that make a third")
        if "\n" in merge and (left + right).strip("\n"):
            raise head.error(
                f"tokenizer.ggml.merges has {merge!r}, which joins a line feed with something else", hint=_BESIDE
            )
    return found
