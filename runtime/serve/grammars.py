"""Grammars that constrain an answer, by llguidance: a JSON schema, a regular expression, a choice of texts, tool calls.

A Guide masks, at each step, the tokens after which no valid answer is possible. Grammars are llguidance's Lark text
(https://github.com/guidance-ai/llguidance, docs/syntax.md and docs/json_schema.md). llguidance compiles JSON schemas
itself; tool_grammar.py has the grammar of tool calls, whose arguments are not JSON.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.serve.lark import MAX_GRAMMAR_CHARS, dumped, is_texts, literal, llguidance_library, regex
from kerngen.runtime.serve.schema import require_small
from kerngen.runtime.serve.tool_grammar import call_grammar
from kerngen.runtime.text import TextCodec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# llguidance calls itself for each rule of a chain: 8 MB are too few for 2,000, and it would crash.
STACK_BYTES = 256 * 1024 * 1024
NUM_KEPT = 64  # compiled grammars: a chat with tools asks for the same one again and again
# Between the parts of JSON: with more a weak model fills each gap up to the bound. Outlines has the same.
_WHITESPACE = r" "
_LIMITS = {"verbose_errors": False}  # else its messages quote the grammar
# In its messages: the place of an error, in a grammar that nobody wrote, and what it shows of that grammar.
_PLACE, _SHOWN = re.compile(r"^at \d+\(\d+\): "), re.compile(r"\n *\d+ \| |\n<")


class Guide:
    """The engine's TokenMask for one answer."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._shape = matcher, (-(-vocab_size // 32),)

    def accept(self, token: int) -> None:
        """Go on behind `token`. Raises UsageError where it is not allowed, or the grammar is too costly to follow."""
        self._matcher.consume_token(token)
        self._check()

    def fill(self, bits: NDArray[np.int32]) -> bool:
        """Set bit i of `bits` (int32 [ceil(vocab_size / 32)]) where token i may follow; always True, for masked.

        The stop tokens may follow where the answer may end, and nothing else where it must. Raises UsageError where the
        grammar is too costly to follow.
        """
        if bits.dtype != np.int32 or bits.shape != self._shape or not bits.flags.c_contiguous:
            raise ValueError(f"bits are int32 {self._shape}, contiguous; not {bits.dtype} {bits.shape}")
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        return True

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UsageError(f"the answer cannot be guided on: {_said(self._matcher.get_error())}")


class Guides:
    """Makes guides for a checkpoint: `codec` and its model's vocab_size, of which the tokenizer may name fewer.

    stop_ids: tokens that end an answer. Takes a second for Gemma-4's 262,144 tokens. Raises UsageError without
    llguidance, CheckpointError for a tokenizer that it cannot read.
    """

    def __init__(self, codec: TextCodec, vocab_size: int, stop_ids: Sequence[int]) -> None:
        llguidance = llguidance_library()
        self._library, self._codec, self.vocab_size = llguidance, codec, vocab_size
        try:
            read = llguidance.LLTokenizer(codec.to_json(), n_vocab=vocab_size)
            plain = llguidance.TokenizerWrapper(_PlainTokenizer(codec, read, stop_ids))
            self._tokenizer = llguidance.LLTokenizer(plain, eos_token=list(stop_ids))
        except Exception as e:  # whatever its Rust code finds wrong
            raise CheckpointError(f"llguidance cannot read the tokenizer of {codec.folder}: {e}") from e
        self._compiled = lru_cache(NUM_KEPT)(self._compile)

    def guide(self, grammar: str, *, may_think: bool = False, is_thinking: bool = False) -> Guide:
        """A guide by `grammar`, the Lark rule `body` and what it needs: see json_grammar and the others.

        may_think: a thought may come first. is_thinking: the prompt has opened one, which ends first. Raises UsageError
        for a grammar that llguidance refuses, or that allows nothing.
        """
        if may_think or is_thinking:
            if self._codec.channel_ids is None:
                raise UsageError(f"the tokenizer of {self._codec.folder} has no tokens for thoughts")
            first, last = self._codec.channel_ids
            thought = f"THOUGHT <[{last}]>"
            start = f"start: {thought} body" if is_thinking else f"start: (<[{first}]> {thought})? body"
            grammar = f"{start}\nTHOUGHT: /(?s:.*)/\n{grammar}"
        else:
            grammar = f"start: body\n{grammar}"
        return Guide(self._compiled(grammar).deep_copy(), self.vocab_size)

    def calls(self, tools: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """call_grammar's text with this checkpoint's tokens. Raises UsageError where it has none for calls."""
        if self._codec.call_ids is None:
            raise UsageError(f"the tokenizer of {self._codec.folder} has no tokens for tool calls")
        return call_grammar(tools, self._codec.call_ids, **options).text

    def _compile(self, grammar: str) -> LLMatcher:
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise UsageError(f"the grammar has {len(grammar):,} characters; {MAX_GRAMMAR_CHARS:,} are allowed")
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
            raise UsageError(f"the answer cannot be guided so: {_said(matcher.get_error())}")
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


_STACK = threading.Lock()  # around what sets the stack of the threads to come


def _said(error: str) -> str:
    """llguidance's message without the place, the grammar and its state behind it."""
    return _PLACE.sub("", _SHOWN.split(error)[0].strip())


# ---- grammars --------------------------------------------------------------------------------------------------------


def json_grammar(schema: Mapping[str, Any] | bool | None = None) -> str:
    """Of JSON text that `schema` allows; of any JSON object without one.

    JSON Schema 2020-12 as far as llguidance has it: a keyword or a format that it has not is an error that names it.
    Members come in the order of `properties`; oneOf is taken as anyOf. Raises UsageError for what is no schema.
    """
    if schema is None:
        schema = {"type": "object"}
    if isinstance(schema, bool) or not isinstance(schema, Mapping):
        raise UsageError(f"a JSON schema is an object, not {json.dumps(schema, default=repr)}")
    require_small(schema)
    options = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
    return f"body: %json {dumped({**schema, 'x-guidance': options})}\n"


def regex_grammar(pattern: str) -> str:
    """Of text that `pattern` matches from end to end: Rust's syntax, without looking around."""
    return f"body: /{regex(pattern, from_end_to_end=True)}/\n"


def choice_grammar(choices: Sequence[str]) -> str:
    """Of one of `choices`."""
    if not choices or not is_texts(choices):
        raise UsageError("a choice is a list of at least one text")
    return f"body: {' | '.join(map(literal, choices))}\n"
