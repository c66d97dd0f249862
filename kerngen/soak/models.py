"""Opens what is soaked: a checkpoint with its weights, or generated weights in a model's shapes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kerngen.errors import UsageError
from kerngen.runtime.backend import explaining_memory, open_backend
from kerngen.runtime.config import Keeping
from kerngen.runtime.config_fields import is_gguf
from kerngen.runtime.gguf.place import place_of_model
from kerngen.runtime.hub import find_checkpoint
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops
from kerngen.runtime.session import find_drafter, open_checkpoint, open_divided
from kerngen.soak.drafts import RememberingDrafter
from kerngen.workload.generated import generated_model
from kerngen.workload.workload import find_model

if TYPE_CHECKING:
    from kerngen.runtime.engine.ranks import Ranks
    from kerngen.runtime.executors.collectives import Collectives


@dataclass(slots=True, eq=False, weakref_slot=True)
class Opened:
    """weights: where they come from, in words. seconds: it took. ranks: the other ranks of a divided model, None where
    it is whole; they end with this.
    """

    name: str
    model: Gemma4
    drafter: RememberingDrafter | None
    weights: str
    seconds: float
    ranks: Ranks | None = None

    @property
    def ops(self) -> Ops:
        return self.model.ops


def open_model(
    name: str,
    *,
    draft: str | None,
    kept: Keeping,
    drafting: bool,
    generated: bool,
    backend: str,
    device: str | None,
    dtype: str | None,
    db_url: str | None,
    bundle: str | None,
    seed: int,
    advance: Callable[[int, int], None],
    tensor_parallel: int = 1,
) -> Opened:
    """The released model or the folder `name`, with a drafter where `drafting`.

    Weights are the checkpoint's where the folder has any, else, or where `generated`, random ones from `seed`. draft:
    the drafter's folder, None for the one that goes with the model; kept: how tensors and the cache are. advance: is
    told how many bytes of how many are loaded. tensor_parallel: ranks that the model is divided among, as by `load`.
    Raises as `load` and `open_backend` do, and UsageError where there is no drafter to be had.
    """
    opens = partial(
        _opened_part, name, draft=draft, kept=kept, drafting=drafting, generated=generated,
        backend=backend, dtype=dtype, db_url=db_url, bundle=bundle, seed=seed,
    )  # fmt: skip
    if tensor_parallel == 1:
        return opens(None, device, advance)
    return open_divided(tensor_parallel, find_model(name).target, opens, device, advance=advance, backend=backend)


@torch.inference_mode()
def _opened_part(
    name: str, collectives: Collectives | None, device: str | None, advance: Callable[[int, int], None] | None, *,
    draft: str | None, kept: Keeping, drafting: bool, generated: bool, backend: str, dtype: str | None,
    db_url: str | None, bundle: str | None, seed: int,
) -> Opened:  # fmt: skip
    """What the rank of `collectives` has of the model; all of it for None."""
    began = time.perf_counter()
    opens_backend = partial(
        open_backend, backend, device=device, dtype=dtype, db_url=db_url, bundle=bundle, collectives=collectives
    )
    place = place_of_model(Path(name))
    if not generated and (is_gguf(place) or any(place.glob("*.safetensors"))):
        assistant = None if not drafting else find_drafter(place) if draft is None else find_checkpoint(draft)
        if drafting and assistant is None:
            raise UsageError(
                f"no drafter lies in or beside {name}", hint="name one with --draft, or use --drafting off"
            )
        ops, weights = opens_backend(), f"weights of {name}"
        with explaining_memory(ops.device):
            session = open_checkpoint(
                place, ops, drafts=() if assistant is None else (assistant,), kept=kept, advance=advance
            )
        model, drafter = session.model, session.drafter
    else:
        found = find_model(name, draft, kept)
        if drafting and found.drafter is None:
            raise UsageError(f"{name} is a folder without weights, and no drafter goes with it by itself",
                             hint="name one with --draft, or use --drafting off")  # fmt: skip
        ops, weights = opens_backend(), "generated weights"
        found = found.divided(ops.collectives.world)
        drafter_config = found.drafter if drafting else None
        model, drafter = generated_model(name, found.target, drafter_config, ops, seed, own_head=True)
    remembering = None if drafter is None else RememberingDrafter(drafter, ops)
    return Opened(name, model, remembering, weights, time.perf_counter() - began)
