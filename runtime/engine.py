"""Generates: chunked prefill, then decode steps, each one of which may draft, verify and accept.

A step reads and writes device tensors only (`_State`), so the next one can start before the host has seen this one's
tokens: where the backend can, the step is one CUDA graph and the host runs one step behind. A greedy step with drafting
emits exactly the tokens that steps without it would: drafts only decide how many come at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kerngen.errors import NumericsError, UsageError
from kerngen.runtime.cache import PAGE_SIZE, KVCache
from kerngen.runtime.drafting import Drafter
from kerngen.runtime.model import Batch, Gemma4
from kerngen.runtime.ops import Ops
from kerngen.runtime.sampling import Sampling, accept_greedy, accept_sampled, distribution, likeliest, sample

PREFILL_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class Stats:
    """Times in seconds. prefill_s ends with the first token; decode_s covers the rest, made in num_steps steps."""

    num_prompt_tokens: int
    num_tokens: int
    num_steps: int
    num_draft_tokens: int
    num_emitted: int  # by the steps, before the last one was cut at a stop token or the limit
    prefill_s: float
    decode_s: float

    @property
    def tokens_per_s(self) -> float:
        """Decode rate, without the first token; 0 if there was no step."""
        return (self.num_tokens - 1) / self.decode_s if self.num_steps and self.decode_s > 0 else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.num_prompt_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step emits on average: 1 without drafting, num_draft_tokens + 1 at most; 0 without steps."""
        return self.num_emitted / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """tokens: what was generated, a stop token included. stop_reason: "stop" or "length"."""

    tokens: list[int]
    stop_reason: str
    stats: Stats


@dataclass(slots=True)
class _State:
    """What one step leaves for the next, on the device. Tensors keep their addresses: a captured step reads them.

    token [1]: known, but not yet in the cache. lengths [1]: tokens in the cache. hidden [1, H]: gave `token`.
    uniforms [positions, 2]: see Sampling.uniforms.
    """

    token: Tensor
    lengths: Tensor
    hidden: Tensor
    uniforms: Tensor


def require_draft_tokens(count: int, ops: Ops) -> None:
    """Raises UsageError unless a step of `ops` can verify `count` drafts; 0 is no drafting."""
    if not 0 <= count < ops.max_decode_len:
        raise UsageError(
            f"{count} draft tokens; a step verifies at most {ops.max_decode_len - 1} of them",
            hint=f"ask for 1 to {ops.max_decode_len - 1}",
        )


class Engine:
    """One sequence at a time, on a cache of `max_len` tokens that is allocated here."""

    def __init__(
        self,
        model: Gemma4,
        drafter: Drafter | None = None,
        *,
        max_len: int,
        num_draft_tokens: int = 3,
        prefill_chunk: int = PREFILL_CHUNK,
        page_size: int = PAGE_SIZE,
        suppressed_ids: Sequence[int] = (),
    ) -> None:
        ops, config = model.ops, model.config
        self.model, self.drafter = model, drafter
        self.num_drafts = num_draft_tokens if drafter is not None else 0
        if max_len > config.max_positions:
            raise UsageError(f"{max_len} tokens of context; the model takes {config.max_positions:,}")
        require_draft_tokens(self.num_drafts, ops)
        if prefill_chunk < 1:
            raise UsageError(f"a prefill chunk of {prefill_chunk} tokens never ends")
        self.max_len = max_len
        self.prefill_chunk = min(prefill_chunk, max_len)
        step = self.num_drafts + 1
        self._lag = 1 if ops.supports_graphs else 0
        room = self._room = (
            max_len + (self._lag + 1) * step
        )  # a step may start on the last token, and one more behind it
        self.cache = KVCache(
            config, ops, batch=1, max_len=room, max_step=max(self.prefill_chunk, step), page_size=page_size
        )
        device = ops.device
        self._state = _State(
            token=torch.zeros(1, dtype=torch.int64, device=device),
            lengths=torch.zeros(1, dtype=torch.int64, device=device),
            hidden=torch.zeros(1, config.hidden_size, dtype=ops.dtype, device=device),
            uniforms=torch.zeros(room + step + 1, 2, device=device),
        )
        if bad := [i for i in suppressed_ids if i >= config.vocab_size]:
            raise UsageError(f"suppressed token {bad[0]} is outside the vocabulary of {config.vocab_size}")
        if len(set(suppressed_ids)) == config.vocab_size:
            raise UsageError(f"all {config.vocab_size} tokens are suppressed; none is left to generate")
        self._suppressed = torch.tensor(list(suppressed_ids), dtype=torch.int64, device=device)
        self._num_streams = 0
        self._graphs: dict[tuple[Sampling, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] = (),
    ) -> Generation:
        """Continue `prompt`: `stream`, at once."""
        steps = self.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                done: Generation = end.value
                return done

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] = (),
    ) -> Generator[list[int], None, Generation]:
        """Continue `prompt`: yields each step's new tokens as they come, and returns all of it.

        Times in Stats include what the consumer takes between two steps. Raises UsageError if the prompt is empty,
        holds unknown ids, or does not fit with max_new_tokens in max_len. What is returned raises NumericsError where
        the model computes NaN or infinity instead of logits, and UsageError once another stream began here.
        """
        self._check(prompt, max_new_tokens)
        self._num_streams += 1
        return self._stream(prompt, max_new_tokens, sampling or Sampling(), frozenset(stop_ids), self._num_streams)

    @torch.inference_mode()
    def _stream(
        self, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, stops: frozenset[int], turn: int
    ) -> Generator[list[int], None, Generation]:
        self._require_turn(turn)
        began = time.perf_counter()
        token = self._prefill(prompt, sampling)
        prefilled = time.perf_counter()
        # A kernel that fuses the choice may choose a token from NaN, but what NaN weights do is in `hidden` by now. It
        # is looked at on the host: once torch's reduction kernel is loaded, an H200 takes 1.6 % longer for every step
        # (31B: 7.72 ms in place of 7.60; the kernels are the same and each starts a little later).
        if token < 0 or not bool(self._state.hidden.cpu().isfinite().all()):
            raise self._no_number(len(prompt))
        tokens = [token]
        yield [token]
        num_steps = num_emitted = 0
        if token not in stops and max_new_tokens > 1:
            self._require_turn(turn)
            for new in self._steps(sampling, len(prompt) + max_new_tokens):
                num_steps += 1
                num_emitted += len(new)
                new = _until_stop(new[: max_new_tokens - len(tokens)], stops)
                if -1 in new:
                    raise self._no_number(len(prompt) + len(tokens) + new.index(-1))
                tokens += new
                yield new
                if tokens[-1] in stops or len(tokens) == max_new_tokens:
                    break
                self._require_turn(turn)
        ended = time.perf_counter()
        stats = Stats(
            num_prompt_tokens=len(prompt),
            num_tokens=len(tokens),
            num_steps=num_steps,
            num_draft_tokens=self.num_drafts,
            num_emitted=num_emitted,
            prefill_s=prefilled - began,
            decode_s=ended - prefilled,
        )
        return Generation(tokens, "stop" if tokens[-1] in stops else "length", stats)

    def _require_turn(self, turn: int) -> None:
        """The cache and the state hold one sequence: the last stream's."""
        if turn != self._num_streams:
            raise UsageError("another generation began here before this one ended", hint="finish one, or load twice")

    def _check(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        vocab = self.model.config.vocab_size
        if not prompt:
            raise UsageError("the prompt is empty", hint="a raw prompt needs at least the <bos> token")
        if bad := [i for i in prompt if not 0 <= i < vocab]:
            raise UsageError(f"token {bad[0]} of the prompt is outside the vocabulary of {vocab}")
        if max_new_tokens < 1:
            raise UsageError(f"{max_new_tokens} new tokens were asked for; at least 1 is made")
        if (need := len(prompt) + max_new_tokens) > self.max_len:
            raise UsageError(
                f"{len(prompt)} prompt tokens and {max_new_tokens} new ones need {need}; the cache holds {self.max_len}"
            )

    def _no_number(self, length: int) -> NumericsError:
        dtype = str(self.model.ops.dtype).removeprefix("torch.")
        hint = "check the checkpoint's weights for NaN and infinity, and that config.json belongs to them"
        if self.model.ops.dtype == torch.float16:
            hint += "; fp16 overflows beyond 65,504: try --dtype bf16 or fp32"
        return NumericsError(
            f"no token can follow {length} tokens: the model computed NaN or infinity ({dtype}) where logits should be",
            hint=hint,
        )

    def _prefill(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Fill the cache with the prompt and choose the first token. Leaves `_state` ready for a step."""
        device = self.model.ops.device
        ids = torch.tensor(prompt, dtype=torch.int64, device=device)
        state = self._state
        if not sampling.is_greedy:
            state.uniforms.copy_(sampling.uniforms(len(state.uniforms)))
        for start in range(0, len(prompt), self.prefill_chunk):
            chunk = ids[start : start + self.prefill_chunk]
            is_last = start + len(chunk) == len(prompt)
            batch = Batch.prefill(chunk, start, self.cache)
            hidden = self.model.forward(batch, self.cache, outputs="last" if is_last else "none")
        state.lengths.fill_(len(prompt))
        state.hidden.copy_(hidden)
        token = self._choose(hidden, state.lengths, sampling)
        torch.clamp(token, min=0, out=state.token)
        return int(token)

    def _choose(self, hidden: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
        """The tokens [n] that follow hidden [n, H]; positions [n]: where they will stand."""
        if sampling.is_greedy:
            return self._greedy(hidden)
        ids, probs = distribution(self._logits(hidden), sampling)
        return sample(ids, probs, self._state.uniforms[positions, 1])

    def _greedy(self, hidden: Tensor) -> Tensor:
        if len(self._suppressed):
            return likeliest(self._logits(hidden))
        return self.model.greedy(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        return logits.index_fill(1, self._suppressed, float("-inf")) if len(self._suppressed) else logits

    def _step(self, sampling: Sampling, max_kv_len: int) -> Tensor:
        """One decode step, all on the device. Returns [k + 2] int64: how many tokens are valid, then the tokens.

        One that is -1 could not be chosen; the step that may be running behind goes on from token 0. max_kv_len: no
        context is longer, nor will be when a captured step is replayed.
        """
        state, k = self._state, self.num_drafts
        ids = state.token[:, None]
        if self.drafter is not None and k:
            drafts = self.drafter.draft(state.token, state.hidden, state.lengths, self.cache, k, max_kv_len)
            ids = torch.cat((ids, drafts), dim=1)
        batch = Batch.decode(ids, state.lengths, self.cache, max_kv_len)
        hidden = self.model.forward(batch, self.cache)  # [k + 1, H]
        if not k:
            accepted = torch.zeros_like(state.lengths)
            tokens = self._choose(hidden, batch.positions + 1, sampling)[None]
        elif sampling.is_greedy:
            tokens = self._greedy(hidden)[None]
            accepted = accept_greedy(drafts, tokens)
        else:
            kept, probs = distribution(self._logits(hidden), sampling)
            uniforms = self._state.uniforms[batch.positions + 1]
            accepted, tokens = accept_sampled(drafts, kept[None], probs[None], uniforms[None])
        torch.clamp(tokens.gather(1, accepted[:, None]).squeeze(1), min=0, out=state.token)
        state.hidden.copy_(hidden[accepted])
        count = accepted + 1
        state.lengths.add_(count)
        return torch.cat((count, tokens[0]))

    def _steps(self, sampling: Sampling, max_len: int) -> Iterator[list[int]]:
        """The tokens of step after step, until the caller has `max_len`. On a device the host reads one step behind."""
        pending: deque[Callable[[], Tensor]] = deque()
        launch = self._launcher(sampling, max_len)
        while True:
            pending.append(launch())
            if len(pending) > self._lag:
                count, *tokens = pending.popleft()().tolist()
                yield tokens[:count]

    def _launcher(self, sampling: Sampling, max_len: int) -> Callable[[], Callable[[], Tensor]]:
        """A function that starts a step and returns a function that waits for its result."""
        if not self.model.ops.supports_graphs:

            def eager() -> Callable[[], Tensor]:
                result = self._step(sampling, self._room)
                return lambda: result

            return eager
        graph, result = self._captured(sampling, max_len)
        # One buffer more than steps in flight: a result is read before its buffer is written again.
        buffers = deque(torch.empty(result.shape, dtype=result.dtype, pin_memory=True) for _ in range(self._lag + 2))

        def replay() -> Callable[[], Tensor]:
            buffers.rotate(1)
            buffer, done = buffers[0], torch.cuda.Event()
            graph.replay()
            buffer.copy_(result, non_blocking=True)
            done.record()

            def wait() -> Tensor:
                done.synchronize()
                return buffer

            return wait

        return replay

    def _captured(self, sampling: Sampling, max_len: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The step as a CUDA graph and the tensor that it leaves its result in. Warm-up leaves the state unchanged.

        There is one graph for each power of two of context: kernels choose their KV splits for its longest.
        What the warm-up writes to the cache lies at and after the current length, where the first step writes again.
        """
        slack = self._room - self.max_len  # steps may end beyond max_len
        bucket = min(self._room, 1 << (max_len + slack - 1).bit_length())
        key = replace(sampling, seed=0), bucket
        if key in self._graphs:
            return self._graphs[key]
        state = self._state
        saved = state.token.clone(), state.lengths.clone(), state.hidden.clone()

        def restore() -> None:
            for tensor, value in zip((state.token, state.lengths, state.hidden), saved, strict=True):
                tensor.copy_(value)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(sampling, bucket)
                restore()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self._step(sampling, bucket)
        self._graphs[key] = graph, result
        return graph, result


def _until_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """`tokens` up to and with the first stop token."""
    for i, token in enumerate(tokens):
        if token in stops:
            return tokens[: i + 1]
    return tokens
