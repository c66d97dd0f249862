"""Sessions of tiny divided models, opened in every rank's process: what tests hand to `Ranks.load`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kerngen.runtime.config import read_drafter_config, read_model_config
from kerngen.runtime.drafters import drafter_for, together
from kerngen.runtime.executors.collectives import Collectives
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.media.input import MediaInput
from kerngen.runtime.media.values import Media
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.session import Session
from kerngen.runtime.weights.loader import load_drafter, load_model

NOTHING: Any = None


def opens(
    target: Path,
    drafter: Path | Sequence[Path] | None,
    backend: str,
    collectives: Collectives | None,
    device: str | None,
    advance: Any,
) -> Session:
    """In fp32, on the torch backend or on the kernels' references; without text, so without a tokenizer. drafter: or
    several.
    """
    ops: Ops = TorchOps(torch.device("cpu"), torch.float32, collectives)
    if backend == "kernels":
        ops = KernelOps(Reference(collectives=collectives), torch.float32)
    whole = read_model_config(target)
    config = whole.divided(ops.collectives.world)
    model, drafting = Gemma4(config, load_model(target, config, ops), ops), []
    for folder in [drafter] if isinstance(drafter, Path) else drafter or ():
        drafts = read_drafter_config(folder, whole).divided(config)
        drafting.append(drafter_for(drafts, load_drafter(folder, drafts, ops), model))
    return Session(target, config, NOTHING, model, together(drafting), (), 0.0)


def opens_and_hangs(*how: Any) -> Session:
    """As `opens`; after some steps rank 1 does nothing more, alive as it is."""
    session = opens(*how)
    if session.ops.collectives.world.rank == 1:
        greedy: Callable[..., Tensor] = session.model.greedy
        steps = 0

        def stuck(*values: Any, **named: Any) -> Tensor:
            nonlocal steps
            steps += 1
            if steps > 4:
                time.sleep(120)
            return greedy(*values, **named)

        session.model.greedy = stuck  # type: ignore[method-assign]
    return session


def opens_and_fails(*how: Any) -> Session:
    """Rank 1 alone cannot open its part."""
    if how[-3] is not None and how[-3].world.rank == 1:
        raise ZeroDivisionError("of this rank alone")
    return opens(*how)


def too_large(rank: int) -> Media:
    from tiny_media import item

    return item(13, 100 + rank)


def opens_with_media(target: Path, collectives: Collectives | None, device: str | None, advance: Any) -> Session:
    """As `opens`; it takes images and sounds, whose embeddings every rank makes. For `too_large` of a rank it has no
    memory there.
    """
    from tiny_media import PLACEHOLDERS, Towers

    session = opens(target, None, "torch", collectives, device, advance)
    never, embed = too_large(session.ops.collectives.world.rank).digest, Towers().embed

    def embed_or_fail(items: Sequence[Media]) -> list[Tensor]:
        if any(item.digest == never for item in items):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return embed(items)

    media = MediaInput(embed_or_fail, PLACEHOLDERS, bidirectional=True)
    model = session.model
    session.model = Gemma4(model.config, model.weights, model.ops, media=media)
    return session
