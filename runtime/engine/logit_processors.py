"""Logit processors as device tensors: suppressed tokens, masks, biases, penalties and minimum lengths of each row.

Each tensor is made when a row first needs it and stays at its address, so a step that was captured reads what is there
when it is replayed. Rows that need nothing of a kind have what changes nothing, so that a token does not depend on who
else is in the batch. A step in which no row needs any of a kind does nothing for it (`SamplingMode`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kerngen.runtime.engine.plan import NewRow, SamplingMode
from kerngen.runtime.penalties import counts_at, forbidden, held_back, penalized

Values = Tensor | Sequence[float] | Sequence[Sequence[float]]
Send = Callable[[Values, torch.dtype], Tensor]


class LogitProcessors:
    """Of rows 0 to max_batch - 1 of the decode batch. Tensors begin as what changes nothing."""

    def __init__(self, max_batch: int, vocab: int, device: torch.device, send: Send) -> None:
        """send: brings values to the device without waiting for it."""
        self._shape, self._device, self._send = (max_batch, vocab), device, send
        self._forbidden: Tensor | None = None  # [max_batch, vocab] bool
        self._bias: Tensor | None = None  # [max_batch, vocab] fp32
        self._stops: Tensor | None = None  # [max_batch, vocab] bool: what would end the answer
        self._first_stop: Tensor | None = None  # [max_batch] int64: the first position at which it may
        self._made: Tensor | None = None  # [max_batch, vocab] int32: how often the answer has a token
        self._prompt: Tensor | None = None  # [max_batch, vocab] bool
        self._penalties: Tensor | None = None  # [3, max_batch] fp32, see penalties.penalized
        self._guided: Tensor | None = None  # [max_batch] bool

    # -- rows

    def join(self, first: int, new_rows: Sequence[NewRow]) -> None:
        """Rows `first` and on are `new_rows`."""
        self._make(new_rows)
        for row, new in enumerate(new_rows, first):
            sampling = new.sampling
            if self._forbidden is not None:
                self._set(self._forbidden[row], new.suppressed_ids)
            if self._bias is not None:
                self._bias[row] = 0
                if sampling.logit_bias:
                    tokens, values = zip(*sampling.logit_bias, strict=True)
                    self._bias[row].index_copy_(0, self._send(tokens, torch.int64), self._send(values, torch.float32))
            if self._stops is not None and self._first_stop is not None:
                self._set(self._stops[row], new.stop_ids)
                self._first_stop[row] = new.first_stop
            if self._made is not None and self._prompt is not None and self._penalties is not None:
                self._set(self._prompt[row], new.prompt)
                self._made[row] = 0
                if new.answer:
                    made = self._send(new.answer, torch.int64)
                    self._made[row].index_add_(0, made, torch.ones_like(made, dtype=torch.int32))
                self._penalties[:, row] = self._send(sampling.penalties, torch.float32)
            if self._guided is not None:
                self._guided[row] = new.mask is not None

    def _make(self, new_rows: Sequence[NewRow]) -> None:
        """The tensors that one of `new_rows` is the first to need."""
        mode = SamplingMode.for_sampling([new.sampling for new in new_rows])
        guided = any(new.mask is not None for new in new_rows)
        max_batch, _ = self._shape
        if (guided or any(new.suppressed_ids for new in new_rows)) and self._forbidden is None:
            self._forbidden = self._zeros(self._shape, torch.bool)
        if mode.biased and self._bias is None:
            self._bias = self._zeros(self._shape, torch.float32)
        if any(new.sampling.min_tokens for new in new_rows) and self._stops is None:
            self._stops = self._zeros(self._shape, torch.bool)
            self._first_stop = self._zeros((max_batch,), torch.int64)
        if mode.penalized and self._made is None:
            self._made = self._zeros(self._shape, torch.int32)
            self._prompt = self._zeros(self._shape, torch.bool)
            self._penalties = self._zeros((3, max_batch), torch.float32)
            self._penalties[0] = 1
        if guided and self._guided is None:
            self._guided = self._zeros((max_batch,), torch.bool)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _set(self, row: Tensor, tokens: Sequence[int]) -> None:
        """`row` [vocab] is true for `tokens` alone."""
        row.zero_()
        if tokens:
            row.index_fill_(0, self._send(list(tokens), torch.int64), True)

    def leave(self, row: int, last: int) -> None:
        """Row `last` becomes row `row`. What it leaves behind is overwritten by who joins there."""
        if row == last:
            return
        for tensor in (self._forbidden, self._bias, self._stops, self._first_stop, self._made, self._prompt,
                       self._guided):  # fmt: skip
            if tensor is not None:
                tensor[row] = tensor[last]
        if self._penalties is not None:
            self._penalties[:, row] = self._penalties[:, last]

    def guide(self, masks: Sequence[tuple[int, bytes]]) -> None:
        """What the masks of rows allow next: (row, bits) of each."""
        if not masks or self._forbidden is None:
            return
        words = np.frombuffer(b"".join(bits for _, bits in masks), np.int32).reshape(len(masks), -1)
        bits = self._send(torch.from_numpy(words.copy()), torch.int32)
        at = self._send([row for row, _ in masks], torch.int64)
        self._forbidden.index_copy_(0, at, forbidden(bits, self._shape[1]))

    # -- a step

    @property
    def written(self) -> list[Tensor]:
        """What a step changes."""
        return [] if self._made is None else [self._made]

    def apply(
        self, logits: Tensor, positions: Tensor, drafts: Tensor | None, rows: slice, mode: SamplingMode
    ) -> Tensor:
        """logits [n, vocab] fp32 of `rows` as `mode` wants them changed. A row has its tokens one after the other.

        positions [n] int64: where the tokens that are chosen will stand; drafts [rows, q_len - 1]: those in between.
        """
        q_len = 1 if drafts is None else drafts.shape[1] + 1

        def each(tensor: Tensor) -> Tensor:
            return tensor[rows] if q_len == 1 else tensor[rows].repeat_interleave(q_len, 0)

        if mode.masked and self._forbidden is not None:
            logits = logits.masked_fill(each(self._forbidden), -math.inf)
        if mode.held and self._stops is not None and self._first_stop is not None:
            logits = held_back(logits, each(self._stops), each(self._first_stop), positions)
        if mode.biased and self._bias is not None:
            logits = logits + each(self._bias)
        if mode.penalized and self._made is not None and self._prompt is not None and self._penalties is not None:
            penalties = self._penalties[:, rows].repeat_interleave(q_len, 1)
            logits = penalized(logits, counts_at(self._made[rows], drafts), each(self._prompt), penalties)
        return logits

    def refuse(self, drafts: Tensor | None, rows: slice, mode: SamplingMode) -> Tensor | None:
        """drafts [rows, q_len - 1] as they are compared with what was chosen: a row with a mask accepts none."""
        if drafts is None or not mode.guided or self._guided is None:
            return drafts
        return drafts.masked_fill(self._guided[rows, None], -2)  # no token, nor the -1 of one that was not chosen

    def count(self, result: Tensor, rows: slice, mode: SamplingMode) -> None:
        """The tokens of `rows` that count were generated. result [rows, q_len + 2] int64: decode_advance's."""
        if not mode.penalized or self._made is None:
            return
        tokens = result[:, 1:-1].clamp(min=0)
        does_count = torch.arange(tokens.shape[1], device=result.device) < result[:, :1]
        self._made[rows].scatter_add_(1, tokens, does_count.to(torch.int32))
