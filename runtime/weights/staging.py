"""Copies parts of a memory-mapped file to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kerngen.runtime.weights import mapped
from kerngen.runtime.weights.mapped import Decode


class Stage:
    """Copies pieces to `device`. To a GPU they go through two pinned buffers: one is filled, by all of torch's threads,
    while the device reads the other. Straight from pages that are not pinned one thread would do both in turn.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        self._buffers: list[Tensor] = []
        self._free: list[torch.cuda.Event] = []  # recorded behind the copy from the buffer
        if device.type == "cuda":
            size = mapped.PIECE_BYTES
            self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._free = [torch.cuda.Event() for _ in range(2)]

    def copy(self, piece: Tensor, out: Tensor, *, is_transposed: bool = False, decode: Decode | None = None) -> None:
        """out <- piece, in out's dtype; its transpose where `is_transposed`. `piece` may go when this returns.

        decode: what makes out's values of the piece, which it does on the device.
        """
        self.copy_to_all(piece, ((out, decode),), is_transposed=is_transposed)

    def copy_to_all(
        self, piece: Tensor, into: Sequence[tuple[Tensor, Decode | None]], *, is_transposed: bool = False
    ) -> None:
        """As `copy`, of a piece that several tensors are made of, which crosses the bus once."""
        if not self._buffers or not piece.numel():
            _make(piece, into, is_transposed)
            return
        self._turn = 1 - self._turn
        buffer, free = self._buffers[self._turn], self._free[self._turn]
        if (size := piece.numel() * piece.element_size()) <= buffer.numel():
            free.synchronize()  # at once, if it was never recorded
            pinned = buffer[:size].view(piece.dtype).view(piece.shape)
            pinned.copy_(piece)
            piece = pinned
        (out, decode), *others = into
        if piece.dtype == out.dtype and not is_transposed and decode is None and not others:
            out.copy_(piece, non_blocking=True)
        else:  # turned, converted and decoded there: the host would make a copy of its own for that
            _make(piece.to(self._device, non_blocking=True), into, is_transposed)
        free.record(torch.cuda.current_stream(self._device))


def _make(here: Tensor, into: Sequence[tuple[Tensor, Decode | None]], is_transposed: bool) -> None:
    for out, decode in into:
        made = here if decode is None else decode(here)
        out.copy_(made.T if is_transposed else made)
