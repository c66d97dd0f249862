"""Grammars that constrain an answer, by llguidance: a JSON schema, a regular expression, a choice of texts, tool calls.

A Guide masks, at each step, the tokens after which no valid answer is possible. Grammars are llguidance's Lark text
(https://github.com/guidance-ai/llguidance, docs/syntax.md and docs/json_schema.md). json_grammar.py has the
grammar of JSON, tool_grammar.py that of tool calls, whose arguments are not JSON.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from kerngen.errors import KerngenError, UsageError
from kerngen.runtime.serve.grammar_compiler import GrammarCompiler, said_by
from kerngen.runtime.serve.grammar_cost import MAX_COMPILE_S, GrammarCosts, GrammarTooCostly
from kerngen.runtime.serve.lark import MAX_GRAMMAR_CHARS, is_texts, literal, regex
from kerngen.runtime.serve.tool_grammar import call_grammar
from kerngen.runtime.text import TextCodec

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Compiled grammars that are kept: a chat with tools asks for the same one again and again.
NUM_KEPT, MAX_KEPT_BYTES = 64, 256 * 1024 * 1024
MAX_LIVE_BYTES = 512 * 1024 * 1024  # of those, and of those that answers under way follow
NUM_REFUSED = 1024  # grammars that took too much, which is not tried again


class GuidesBusy(KerngenError):
    """Answers under way follow as many costly grammars as there is memory for."""


class _Compiled:
    """A grammar that answers copy. is_spent: its states, which all its answers share, have reached their limit."""

    def __init__(self, matcher: LLMatcher, size_bytes: int) -> None:
        self.matcher, self.size_bytes, self.is_spent = matcher, size_bytes, False


class Guide:
    """The engine's TokenMask for one answer."""

    def __init__(self, compiled: _Compiled, vocab_size: int) -> None:
        self._compiled, self._shape = compiled, (-(-vocab_size // 32),)
        self._matcher = compiled.matcher.deep_copy()

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
            error = self._matcher.get_error()
            self._compiled.is_spent |= "too many states" in error
            raise UsageError(f"the answer cannot be guided on: {said_by(error)}")


class Guides:
    """Makes guides for a checkpoint: `codec` and its model's vocab_size, of which the tokenizer may name fewer.

    stop_ids: tokens that end an answer. Takes a second for Gemma-4's 262,144 tokens. Two threads may use it at once.
    Raises UsageError without llguidance, CheckpointError for a tokenizer that it cannot read.
    """

    def __init__(self, codec: TextCodec, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._codec, self.vocab_size = codec, vocab_size
        self._costs = GrammarCosts(codec.folder, codec.bos_id, vocab_size, stop_ids)
        self._compiler = GrammarCompiler(codec, vocab_size, stop_ids)
        self._lock = threading.Lock()  # around the three below
        self._kept: OrderedDict[str, _Compiled] = OrderedDict()  # by grammar, the one that was asked for last is last
        self._live: WeakValueDictionary[str, _Compiled] = WeakValueDictionary()
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # why, by the grammar's digest

    def close(self) -> None:
        """End the processes that weigh grammars."""
        self._costs.close()

    def guide(
        self, grammar: str, *, may_think: bool = False, is_thinking: bool = False, within_s: float = MAX_COMPILE_S
    ) -> Guide:
        """A guide by `grammar`, the Lark rule `body` and what it needs: see json_grammar and the others.

        may_think: a thought may come first. is_thinking: the prompt has opened one, which ends first. Raises UsageError
        for a grammar that llguidance refuses, or that allows nothing, GrammarTooSlow where it takes more than
        `within_s` to compile, GrammarTooCostly where it takes more than any may; GuidesBusy.
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
        return Guide(self._compiled(grammar, within_s), self.vocab_size)

    def calls(self, tools: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """call_grammar's text with this checkpoint's tokens. Raises UsageError where it has none for calls."""
        if self._codec.call_ids is None:
            raise UsageError(f"the tokenizer of {self._codec.folder} has no tokens for tool calls")
        return call_grammar(tools, self._codec.call_ids, **options).text

    def _compiled(self, grammar: str, within_s: float) -> _Compiled:
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise UsageError(f"the grammar has {len(grammar):,} characters; {MAX_GRAMMAR_CHARS:,} are allowed")
        digest = sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if (found := self._live.get(grammar)) is not None and not found.is_spent:
                self._keep(grammar, found)
                return found
            if (refused := self._refused.get(digest)) is not None:
                raise GrammarTooCostly(refused)
        try:
            size_bytes = self._costs.measure(grammar, within_s)
        except GrammarTooCostly as e:
            with self._lock:
                self._refused[digest] = e.message
                if len(self._refused) > NUM_REFUSED:
                    self._refused.popitem(last=False)
            raise
        with self._lock:
            self._make_room(size_bytes)
        compiled = _Compiled(self._compiler.compile(grammar), size_bytes)
        with self._lock:
            self._live[grammar] = compiled
            self._keep(grammar, compiled)
        return compiled

    def _keep(self, grammar: str, compiled: _Compiled) -> None:
        self._kept[grammar] = compiled
        self._kept.move_to_end(grammar)
        while len(self._kept) > NUM_KEPT or sum(c.size_bytes for c in self._kept.values()) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)

    def _make_room(self, size_bytes: int) -> None:
        """For another grammar. What is kept and nobody uses goes first; raises GuidesBusy where that is not enough."""
        while sum(c.size_bytes for c in list(self._live.values())) + size_bytes > MAX_LIVE_BYTES:
            if not self._kept:
                raise GuidesBusy(f"grammars of answers under way take {MAX_LIVE_BYTES >> 20} MB, and more is not taken")
            self._kept.popitem(last=False)


# ---- grammars --------------------------------------------------------------------------------------------------------


def regex_grammar(pattern: str) -> str:
    """Of text that `pattern` matches from end to end: Rust's syntax, without looking around."""
    return f"body: /{regex(pattern, from_end_to_end=True)}/\n"


def choice_grammar(choices: Sequence[str]) -> str:
    """Of one of `choices`."""
    if not choices or not is_texts(choices):
        raise UsageError("a choice is a list of at least one text")
    return f"body: {' | '.join(map(literal, choices))}\n"
