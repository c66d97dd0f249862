"""Compiles grammars by llguidance, with a checkpoint's tokens."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.serve.lark import llguidance_library
from kerngen.runtime.text import TextCodec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# llguidance calls itself for each rule of a chain: 8 MB are too few for 2,000, and it would crash.
STACK_BYTES = 256 * 1024 * 1024
# verbose_errors: else its messages quote the grammar. max_lexer_states: they are added as answers need them, some 450 B
# each, so that a grammar grows by 45 MB at most.
_LIMITS = {"verbose_errors": False, "max_lexer_states": 100_000}
# In its messages: the place of an error, in a grammar that nobody wrote, and what it shows of that grammar.
_PLACE, _SHOWN = re.compile(r"^at \d+\(\d+\): "), re.compile(r"\n *\d+ \| |\n<")
_STACK = threading.Lock()  # around what sets the stack of the threads to come


class GrammarCompiler:
    """For `codec` and its model's vocab_size, of which the tokenizer may name fewer.

    stop_ids: tokens that end an answer. Takes a second for Gemma-4's 262,144 tokens. Raises UsageError without
    llguidance, CheckpointError for a tokenizer that it cannot read.
    """

    def __init__(self, codec: TextCodec, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._library = llguidance = llguidance_library()
        try:
            read = llguidance.LLTokenizer(codec.to_json(), n_vocab=vocab_size)
            plain = llguidance.TokenizerWrapper(_PlainTokenizer(codec, read, stop_ids))
            self._tokenizer = llguidance.LLTokenizer(plain, eos_token=list(stop_ids))
        except Exception as e:  # whatever its Rust code finds wrong
            raise CheckpointError(f"llguidance cannot read the tokenizer of {codec.folder}: {e}") from e

    def compile(self, grammar: str) -> LLMatcher:
        """The matcher of `grammar`, whatever time and memory that takes.

        Raises UsageError where llguidance refuses it, or it allows nothing.
        """
        limits = self._library.LLParserLimits(**_LIMITS)
        made: list[tuple[LLMatcher, LLMatcher]] = []
        failed: list[BaseException] = []

        def make() -> None:
            try:
                matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
                probe = matcher.deep_copy()
                if not probe.is_error():
                    probe.compute_bitmask()
                made.append((matcher, probe))
            except BaseException as e:  # its Rust code may panic, which is no Exception
                failed.append(e)

        with _STACK:
            before = threading.stack_size(STACK_BYTES)
            try:
                thread = threading.Thread(target=make)
                thread.start()
            finally:
                threading.stack_size(before)
        thread.join()
        if failed:
            raise UsageError(f"the answer cannot be guided so: llguidance failed: {failed[0]}") from failed[0]
        matcher, probe = made[0]
        if matcher.is_error():
            raise UsageError(f"the answer cannot be guided so: {said_by(matcher.get_error())}")
        if probe.is_error() or (probe.is_stopped() and not probe.is_accepting()):
            raise UsageError("the answer cannot be guided so: nothing that ends satisfies it")
        return matcher


class _PlainTokenizer:
    """The tokens as llguidance read them, and an encoder to which <turn|> in a grammar's texts is text.

    Where only one text can follow, llguidance allows the tokens that encode it alone: its own would be the control one.
    """

    def __init__(self, codec: TextCodec, read: LLTokenizer, stop_ids: Sequence[int]) -> None:
        self._encoder = Tokenizer.from_str(codec.to_json())
        self._encoder.encode_special_tokens = True
        self.bos_token_id, self.eos_token_id = codec.bos_id, stop_ids[0]
        self.tokens = [read.decode_bytes([i]) for i in range(read.vocab_size)]
        self.special_token_ids = [i for i in range(read.vocab_size) if read.is_special_token(i)]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("texts, not bytes")  # how llguidance learns it
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids


def said_by(error: str) -> str:
    """llguidance's message without the place, the grammar and its state behind it."""
    return _PLACE.sub("", _SHOWN.split(error)[0].strip())
