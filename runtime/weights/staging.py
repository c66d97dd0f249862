"""Copies parts of a memory-mapped file to the device."""

from __future__ import annotations

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
        if not self._buffers or not piece.numel():
            made = piece if decode is None else decode(piece)
            out.copy_(made.T if is_transposed else made)
            return
        self._turn = 1 - self._turn
        buffer, free = self._buffers[self._turn], self._free[self._turn]
        if (size := piece.numel() * piece.element_size()) <= buffer.numel():
            free.synchronize()  # at once, if it was never recorded
            pinned = buffer[:size].view(piece.dtype).view(piece.shape)
            pinned.copy_(piece)
            piece = pinned
        if piece.dtype == out.dtype and not is_transposed and decode is None:
            out.copy_(piece, non_blocking=True)
        else:  # turned, converted and decoded there: the host would make a copy of its own for that
            here = piece.to(self._device, non_blocking=True)
            here = here if decode is None else decode(here)
            out.copy_(here.T if is_transposed else here)
        free.record(torch.cuda.current_stream(self._device))
