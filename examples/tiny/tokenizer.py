"""A byte-level BPE tokenizer with Gemma-4's special tokens at their released ids."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# ids as in the released tokenizers; those between are reserved there too
SPECIAL: dict[int, str] = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>",
    46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>",
    51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>", 100: "<|channel>", 101: "<channel|>",
    105: "<|turn>", 106: "<turn|>",
}  # fmt: skip
NEWLINE = "Ċ"  # how a byte-level vocabulary spells "\n": id 107
PAD, EOS, BOS, TURN, END_OF_TURN = 0, 1, 2, 105, 106


def train(texts: Iterable[str], vocab_size: int, special: dict[int, str] = SPECIAL) -> Tokenizer:
    """Learn merges from `texts` and lay the vocabulary out as in `special`, then bytes, then merges."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    reserved = [special.get(i, f"<unused{i}>") for i in range(max(special) + 1)]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = split
    learner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size - len(reserved),
            initial_alphabet=alphabet,
            special_tokens=[],
            show_progress=False,
        ),
    )
    learned = sorted(learner.get_vocab().items(), key=lambda item: item[1])  # bytes first, then merges in order
    pieces = [NEWLINE, *(piece for piece, _ in learned if piece != NEWLINE)]
    vocab = {piece: i for i, piece in enumerate([*reserved, *pieces])}
    merges = _merges(learner)

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special.values()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The merges in the order in which they were learned."""
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
