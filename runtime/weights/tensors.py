"""A checkpoint's tensors, checked and copied to the device by name.

They go there in pieces. On the host they are pages of a read-only map, which leave it again with each piece, so that
loading takes PIECE_BYTES of host memory, twice, whatever the size of model and tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kerngen.errors import CheckpointError
from kerngen.runtime.ops import Ops
from kerngen.runtime.weights.mapped import Box
from kerngen.runtime.weights.quantized import FLOATS, INTS
from kerngen.runtime.weights.safetensors import Checkpoint
from kerngen.runtime.weights.staging import Stage
from kerngen.runtime.world import Span

WIDER_RANGE = "run it with --dtype bf16, or on a GPU without bf16 with --backend torch --dtype fp32"
LOOK_EVERY = 256  # tensors that are copied before the host waits to hear whether they hold NaN

Advance = Callable[[int, int], None]  # bytes that were loaded, of how many
Wanted = tuple[str, Tensor, tuple[str, ...], Box]  # a tensor's name, where it goes, dtypes that it may have, which part


class TensorSource:
    """The tensors of a folder. A dry pass checks names, shapes and dtypes, and returns tensors without storage."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops, advance: Advance | None = None) -> None:
        self.checkpoint = checkpoint
        self.ops = ops
        self.is_dry = True
        self.used: set[str] = set()
        self._advance = advance
        self._stage: Stage | None = None
        self._loaded_bytes = self._total_bytes = 0
        self._looks: list[tuple[str, Tensor, torch.dtype]] = []  # a tensor's name, its extremes on the device, as what
        self._parts: dict[str, dict[tuple[Span, ...], int]] = {}  # of tensors that are read in part: bytes of each

    def begin(self) -> None:
        """From here on, tensors are loaded."""
        self.is_dry = False
        self._total_bytes = sum(
            sum(self._parts[name].values()) if name in self._parts else self.checkpoint.num_bytes(name)
            for name in self.used
        )

    def finish(self) -> None:
        """Raise CheckpointError if a tensor that was loaded holds NaN or infinity."""
        looks, self._looks = self._looks, []
        if not looks:
            return
        # One wait for the device. NaN spreads into both extremes, infinity is one of them.
        bad = torch.stack([extremes for _, extremes, _ in looks]).isfinite().all(-1).logical_not().tolist()
        for (name, _, dtype), is_bad in zip(looks, bad, strict=True):
            if is_bad:
                raise self._not_finite(name, dtype)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A float tensor in `ops.dtype`, or one in `dtype`, which is of floats or of integers."""
        out = self._allocate(shape, dtype or self.ops.dtype)
        self._copy(name, out, FLOATS if out.is_floating_point() else INTS)
        return out

    def rows(self, name: str, rows: Span, width: int) -> Tensor:
        out = self._allocate((rows.size, width), self.ops.dtype)
        self._copy(name, out, FLOATS, box=(rows, Span.of(width)))
        return out

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta" if self.is_dry else self.ops.device)

    def _copy(
        self, name: str, out: Tensor, dtypes: tuple[str, ...], *, is_transposed: bool = False, box: Box = ()
    ) -> None:
        """Copy the tensor `name` to `out` piece by piece; stored [in, out] where it is_transposed. box: the part of it
        that `out` is, in out's dimensions; () for all.
        """
        self._copy_all([(name, out, dtypes, box)], is_transposed=is_transposed)

    def _copy_all(self, wanted: Sequence[Wanted], *, is_transposed: bool = False) -> None:
        """As `_copy`, of tensors that may lie in the same bytes: these are read once."""
        boxes = []
        for name, out, dtypes, box in wanted:
            self.used.add(name)
            stored = tuple(box) or tuple(Span.of(n) for n in out.shape)
            if is_transposed:
                stored = stored[::-1]
            self.checkpoint.require(name, tuple(span.whole for span in stored), dtypes)
            if self.is_dry and not all(span.is_whole for span in stored):
                self._parts.setdefault(name, {})[stored] = self._stored_bytes(name, out.numel())
            boxes.append((name, stored))
        if self.is_dry:
            return
        if self._stage is None:
            self._stage = Stage(self.ops.device)
        extremes: list[list[Tensor]] = [[] for _ in wanted]
        for row, piece, made in self.checkpoint.stored_together(boxes):
            into = []
            for index, decode in made:
                _, out, _, _ = wanted[index]
                rows = slice(row, row + len(piece)) if out.dim() else ...
                into.append((out[:, rows] if is_transposed else out[rows], decode))
            self._stage.copy_to_all(piece, into, is_transposed=is_transposed)
            for (index, _), (part, _) in zip(made, into, strict=True):
                if part.is_floating_point() and part.numel():
                    extremes[index] += torch.aminmax(part)
                self._loaded(self._stored_bytes(wanted[index][0], part.numel()))
        for (name, out, _, _), found in zip(wanted, extremes, strict=True):
            if found:
                low_and_high = torch.stack(found)
                both = torch.stack((low_and_high.amin(), low_and_high.amax()))
                self._looks.append((name, both, out.dtype))
        if len(self._looks) >= LOOK_EVERY:
            self.finish()

    def _stored_bytes(self, name: str, num_values: int) -> int:
        """Of so many of the tensor's values."""
        return num_values * self.checkpoint.num_bytes(name) // max(self.checkpoint.num_values(name), 1)

    def _loaded(self, num_bytes: int) -> None:
        self._loaded_bytes += num_bytes
        if self._advance is not None:
            self._advance(min(self._loaded_bytes, self._total_bytes), self._total_bytes)

    def _is_copy(self, name: str, table: Tensor, box: Box) -> bool:
        """Whether that part of the stored tensor has the values of `table`."""
        same = True
        for row, piece in self.checkpoint.pieces(name, box=box):
            part = table[row : row + len(piece)]
            if not (same := torch.equal(piece.to(part.device, part.dtype), part)):
                break
        return same

    def _not_finite(self, name: str, dtype: torch.dtype) -> CheckpointError:
        """Says what is wrong with a tensor that has NaN or infinity in `dtype`, looking at it once more."""
        where = f"{self.checkpoint.path(name)}: {name}"
        count, first, largest = 0, -1, 0.0
        for row, piece in self.checkpoint.pieces(name):
            wrong = piece.reshape(-1).isfinite().logical_not_()
            if first < 0 and bool(wrong.any()):
                per_row = piece.numel() // len(piece) if piece.dim() else 1
                first = row * per_row + int(wrong.nonzero()[0])
            count += int(wrong.sum())
            largest = max(largest, float(piece.abs().max()))
        if not count:
            kind = str(dtype).removeprefix("torch.")
            return CheckpointError(
                f"{where} has values up to {largest:.3g}, which {kind} cannot hold", hint=WIDER_RANGE
            )
        total, index = self.checkpoint.num_values(name), _index(first, self.checkpoint.shape(name))
        return CheckpointError(
            f"{where} holds NaN or infinity: {count:,} of {total:,} values, the first at {index}",
            hint="the file is damaged, or whatever wrote it diverged; get or make it again",
        )


def _index(flat: int, shape: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    for size in reversed(shape):
        found.insert(0, flat % size)
        flat //= size
    return found
