"""Warm-up: runs steps of all batches and chunks of all lengths before the first request.

Otherwise the first request that needs a kernel whose machine code is not stored would wait for its compilation, and all
others with it. Kernels are selected at powers of two and at eighths of them (runtime/selection.py), so these lengths
cover those between. Sampling's kernels are run too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch

from kerngen.runtime.cache import KINDS
from kerngen.runtime.config import Arm
from kerngen.runtime.engine.draft_length import FIRST_LENGTH
from kerngen.runtime.engine.plan import SamplingMode
from kerngen.runtime.engine.prefill_graphs import OUTPUTS
from kerngen.runtime.engine.runner import Runner
from kerngen.runtime.selection import lengths_up_to


def warm_up_captured(runner: Runner, arms: Sequence[Arm], *, mixed: bool = False) -> None:
    """Run the steps that an engine captures as it starts on rows that belong to no request: those of the longest
    sequences, and short prefills. arms: what steps draft. mixed: mixed batches too.
    """
    longest = runner.kv_lens[-1]
    for batch in runner.batches:
        for arm in arms:
            for mode in (SamplingMode(), SamplingMode(sampled=True)):
                runner.step(batch, arm, mode, longest)
    for size in runner.short_sizes:
        for outputs, has_media in product(OUTPUTS, runner.prefill_graphs.kinds):
            runner.prefill_graphs.forward(size, outputs, has_media)
    for shape in runner.mixed_shapes_to_capture([SamplingMode()]) if mixed else ():
        runner.mixed_step_of(shape)


def warm_up(runner: Runner, arms: Sequence[Arm], longest_chunk: int) -> None:
    """Run every other kind of step on such rows. arms: what steps draft; unusual numbers are run for the longest
    sequences alone. longest_chunk: tokens of a prefill at most.
    """
    hidden, kv_lens, page_size = runner.hidden, runner.kv_lens, runner.cache.page_size
    sees_images = runner.model.media is not None and runner.model.media.bidirectional
    for size, keys, count in _chunks(longest_chunk, runner.max_kv_len, len(hidden)):  # which take longest to compile
        tables = torch.zeros(len(KINDS), count, -(-keys // page_size), dtype=torch.int32, device=hidden.device)
        start = keys - size // count
        listed = [] if runner.model.config.sparse is None else [(start, keys)] * count
        forward, cache = runner.chunks([0] * size, [start] * count, [size // count] * count, tables, listed)
        runner.forward(forward, cache, "last")
        if sees_images:  # a kernel of its own in sliding layers
            runner.forward(replace(forward, ends=forward.positions.to(torch.int32)), cache, "last")
    if runner.model.media is not None:
        runner.model.media.warm_up()
    for batch in runner.batches:
        for arm in arms:
            is_usual = arm.length in (0, FIRST_LENGTH) or len(arms) <= 2
            for max_kv_len in kv_lens if is_usual else kv_lens[-1:]:
                runner.step(batch, arm, SamplingMode(), max_kv_len)
            runner.step(batch, arm, SamplingMode(sampled=True), kv_lens[-1])
    for count in lengths_up_to(len(hidden)):  # of sequences whose last chunks end together
        rows = slice(0, count)
        runner.first_tokens(hidden[rows], rows, SamplingMode())


def _chunks(longest: int, max_kv_len: int, most: int) -> Iterator[tuple[int, int, int]]:
    """(tokens, keys of a sequence, sequences) of prefills: of one, at all its lengths, and of several that begin."""
    for size in lengths_up_to(min(longest, max_kv_len)):
        is_power = size & (size - 1) == 0
        longer = [1 << e for e in range(size.bit_length(), max_kv_len.bit_length())] if is_power else []
        for keys in sorted({size, *longer, max_kv_len}):
            yield size, keys, 1
        if is_power:
            yield from ((size, size // count, count) for count in (2, 4, 8, 16) if count <= min(size, most))
