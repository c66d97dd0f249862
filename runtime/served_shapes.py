"""Whether kernels serve a model's shapes, asked before its weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kerngen.errors import ProblemError, UsageError
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import NO_DRAFTER, DrafterConfig, ModelConfig
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.drafters import drafter_for, forward, together
from kerngen.runtime.executors.layer_dedup import dedupe
from kerngen.runtime.executors.record import Record
from kerngen.runtime.executors.shapes import ShapesAlone
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.loader import planned_drafter, planned_model
from kerngen.templates import find_kernel

WAY_ON = "the torch backend serves any: --backend torch"


def require_served(
    folder: Path, config: ModelConfig, ops: Ops, drafters: Sequence[tuple[Path, DrafterConfig | DflashConfig]] = ()
) -> None:
    """Raises UsageError, with the way on, where a forward of the model in `folder`, or a draft of one of `drafters`
    (their folders and configurations), would ask a kernel for a shape that it does not serve; CheckpointError as
    loading does.

    Nothing is computed: headers of the checkpoint are read, and layers that are alike are asked for once.
    """
    if not isinstance(ops, KernelOps):
        return
    here = ops.executor.target

    def note(name: str, problem: Any, place: str) -> None:
        if here is not None and (why := find_kernel(name).why_unsupported(problem, here)) is not None:
            raise ProblemError(f"{name}: {why}")

    record = Record(note, lambda _: None, world=config.world)
    shapes = KernelOps(record, ops.dtype)
    try:
        with torch.inference_mode(), ShapesAlone():
            model = Gemma4(config, planned_model(folder, config, shapes), shapes)
            dedupe(model, record)
            start = 0 if config.sparse is None else config.sparse.most_whole  # behind which queries choose keys
            among = [drafter_for(c, planned_drafter(draft, c, shapes), model) for draft, c in drafters]
            for small in among:
                dedupe(small, record)
            joint = together(among)
            policy = NO_DRAFTER if joint is None else joint.policy
            cache = KVCache.whole(config, shapes, batch=1, max_len=start + 2 + max(policy.block, policy.max_drafts),
                                  drafter_layers=policy.cache_layers)  # fmt: skip
            ids = torch.zeros(1, dtype=torch.int64, device=shapes.device)
            states = forward(model, joint, Batch.decode(ids[None], ids, cache, 2, shapes), cache)
            model.greedy(states)
            forward(model, joint, Batch.prefill(ids, start, cache, config.sparse), cache, "last")
            for small in among:
                count = small.policy.max_drafts
                drafts = small.propose(ids, states, ids, cache, count, 2)
                verified = torch.cat((ids[:, None], drafts), dim=1)
                forward(model, joint, Batch.decode(verified, ids, cache, 2 + count, shapes), cache)
    except ProblemError as e:
        raise UsageError(f"no kernel serves the model in {folder}: {e.message}", hint=WAY_ON) from e
