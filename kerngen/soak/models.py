"""Opens what is soaked: a checkpoint with its weights, or generated weights in a model's shapes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kerngen.errors import UsageError
from kerngen.runtime.backend import open_backend
from kerngen.runtime.drafting import Drafter
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops
from kerngen.runtime.session import load
from kerngen.workload.generated import generated_model
from kerngen.workload.workload import find_model


@dataclass(frozen=True, slots=True)
class Opened:
    """weights: where they come from, in words. seconds: it took."""

    name: str
    model: Gemma4
    drafter: Drafter | None
    weights: str
    seconds: float

    @property
    def ops(self) -> Ops:
        return self.model.ops


@torch.inference_mode()
def open_model(
    name: str,
    *,
    draft: str | None,
    draft_weights: str,
    drafting: bool,
    generated: bool,
    backend: str,
    device: str | None,
    dtype: str | None,
    db_url: str | None,
    bundle: str | None,
    seed: int,
    advance: Callable[[int, int], None],
) -> Opened:
    """The released model or the folder `name`, with a drafter where `drafting`.

    Weights are the checkpoint's where the folder has any, else, or where `generated`, random ones from `seed`. draft:
    the drafter's folder, None for the one that goes with the model; draft_weights: see `load`. advance: is told how
    many bytes of how many are loaded. Raises as `load` and `open_backend` do, and UsageError where there is no drafter
    to be had.
    """
    began = time.perf_counter()
    if not generated and any(Path(name).glob("*.safetensors")):
        session = load(name, draft=draft or drafting, draft_weights=draft_weights, device=device, dtype=dtype,
                       backend=backend, db=db_url, bundle=bundle, advance=advance)  # fmt: skip
        if drafting and session.drafter is None:
            raise UsageError(
                f"no drafter lies in or beside {name}", hint="name one with --draft, or use --drafting off"
            )
        return Opened(name, session.model, session.drafter, f"weights of {name}", time.perf_counter() - began)
    found = find_model(name, draft, draft_weights)
    if drafting and found.drafter is None:
        raise UsageError(f"{name} is a folder without weights, and no drafter goes with it by itself",
                         hint="name one with --draft, or use --drafting off")  # fmt: skip
    ops = open_backend(backend, device=device, dtype=dtype, db_url=db_url, bundle=bundle)
    drafter_config = found.drafter if drafting else None
    model, drafter = generated_model(name, found.target, drafter_config, ops, seed, own_head=True)
    return Opened(name, model, drafter, "generated weights", time.perf_counter() - began)
