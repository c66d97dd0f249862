"""The steps of a model as calls that can be repeated: steps.py listens to them, step_graph.py times them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.dflash import DflashDrafter
from kerngen.runtime.drafters import AnyDrafter, forward
from kerngen.runtime.model import Gemma4

if TYPE_CHECKING:
    from kerngen.workload.steps import Step

Forward = Callable[[], Tensor]
Beside = Callable[[], object]


class Forwards:
    """Greedy steps of one model, on whatever its `ops` run on.

    cache_of: the cache of a step, whose sequences have room for step.context keys, all of them written already but for
    the step's own.
    """

    def __init__(self, model: Gemma4, drafter: AnyDrafter | None, cache_of: Callable[[Step], KVCache]) -> None:
        self.model, self.drafter, self._cache_of = model, drafter, cache_of

    def prepare(self, step: Step) -> tuple[Forward, Beside | None]:
        """The step, with all that it reads made: the same every time, since no sequence goes on. And what sampling
        asks in place of the step's choice, which may be called after it; None where there is no choice to make.
        """
        if step.phase == "prefill":
            return self._prefill(step), None
        return self._draft(step) if step.phase == "draft" else self._decode(step)

    def _new(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.model.ops.device)

    def _ids(self, *shape: int) -> Tensor:
        ids = self._new(*shape)
        return ids if ids.is_meta else ids.random_(0, self.model.config.vocab_size)

    def _lengths(self, step: Step, ahead: int) -> Tensor:
        """[batch] int64: keys of each sequence before the last `ahead` tokens of its context."""
        lengths = self._new(step.batch)
        return lengths if lengths.is_meta else lengths.fill_(step.context - ahead)

    def _decode(self, step: Step) -> tuple[Forward, Beside]:
        """A single token of each sequence, or the verification of drafts."""
        model, ops, cache = self.model, self.model.ops, self._cache_of(step)
        ids, drafts = self._ids(step.batch, step.q_len), self._ids(step.batch, step.q_len - 1)
        lengths, limits = self._lengths(step, step.q_len), self._lengths(step, step.q_len)  # beyond which none grows
        token, hidden = self._ids(step.batch), self._new(step.batch, model.config.hidden_size, dtype=ops.dtype)
        states: list[Tensor] = []

        def run() -> Tensor:
            states[:] = [forward(model, self.drafter, Batch.decode(ids, lengths, cache, step.context, ops), cache)]
            tokens = model.greedy(states[0]).view(step.batch, step.q_len)
            return ops.decode_advance(tokens, drafts, states[0], token, lengths, limits, hidden)

        def choose() -> None:
            model.logits(states[0])
            ops.greedy(states[0], model.weights.head, model.config.logit_cap)  # where there is no room for a screen

        return run, choose

    def _prefill(self, step: Step) -> Forward:
        """A chunk of one sequence: a whole prompt, or what follows keys that are in the cache already."""
        cache = self._cache_of(step)
        batch = Batch.prefill(self._ids(step.chunk), step.context - step.chunk, cache, self.model.config.sparse)
        return lambda: forward(self.model, self.drafter, batch, cache, "last")

    def _draft(self, step: Step) -> tuple[Forward, Beside | None]:
        drafter = self.drafter
        if drafter is None:
            raise TypeError(f"{step.name}: the model has no drafter")
        if isinstance(drafter, DflashDrafter):
            return self._block(step, drafter)
        ops, cache = drafter.ops, self._cache_of(step)
        ids, lengths = self._ids(step.batch), self._lengths(step, 1)
        hidden = self._new(step.batch, self.model.config.hidden_size, dtype=ops.dtype)
        if not hidden.is_meta:
            hidden.normal_()
        states: list[Tensor] = []

        def run() -> Tensor:
            states[:] = [drafter.step(ids, hidden, lengths, cache, step.context)]
            tokens = drafter.greedy(states[0])
            drafter.carried(states[0])  # behind all drafts of a step but its last
            return tokens

        return run, None if drafter.weights.centroids is not None else lambda: ops.greedy(
            states[0], drafter.weights.head, 0.0
        )

    def _block(self, step: Step, drafter: DflashDrafter) -> tuple[Forward, Beside]:
        """A block, and what its first step.q_len drafts are; all where that is 1."""
        count = step.q_len if step.q_len > 1 else drafter.policy.max_drafts
        model, block, cache = self.model, drafter.policy.block, self._cache_of(step)
        ids, lengths = self._ids(step.batch), self._lengths(step, block)
        states: list[Tensor] = []

        def run() -> Tensor:
            states[:] = [drafter.block(ids, lengths, cache, step.context - block)[:, 1 : count + 1].flatten(0, 1)]
            return drafter.greedy(states[0])

        return run, lambda: model.ops.greedy(states[0], model.weights.head, model.config.logit_cap)
