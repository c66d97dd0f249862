"""What embeds images and sound asks of the kernels: recorded as a model's steps are (steps.py), without storage."""

from __future__ import annotations

from functools import cache
from typing import Any

from kerngen.arch import Arch
from kerngen.runtime.executors.record import Record
from kerngen.runtime.media.config import MediaConfig
from kerngen.runtime.media.towers import conformer, rows
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.towers import conformer_of, rows_of
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE


@cache
def tower_problems(media: MediaConfig, arch: Arch) -> tuple[tuple[str, Any], ...]:
    """(kernel, problem), each once, at every power of two of patches and tokens, in the dtype of `arch`."""
    asked: dict[tuple[str, Any], None] = {}
    dtype = TORCH_DTYPE[arch.dtype]
    ops = KernelOps(Record(lambda kernel, problem, _: asked.setdefault((kernel, problem)), lambda _: None), dtype)
    if media.vision is not None:
        rows.ask_all(rows_of(media.vision, ops), media.vision, dtype)
    if media.audio is not None:
        conformer.ask_all(conformer_of(media.audio, ops), media.audio, dtype)
    return tuple(asked)
