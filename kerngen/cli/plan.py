"""`kerngen run --plan`: what a model takes on a GPU, how many sequences of which context fit beside it, and what its
steps are predicted to take on a board.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kerngen.errors import UsageError
from kerngen.runtime.config import Keeping

if TYPE_CHECKING:
    from kerngen.arch import Device
    from kerngen.runtime.footprint import Plan
    from kerngen.runtime.media.config import Part
    from kerngen.workload.workload import Model


def print_plan(
    model: str, draft: str | None, kept: Keeping, num_ranks: int = 1, board: str | None = None, *, as_json: bool,
    which: Collection[Part] = (),
) -> None:  # fmt: skip
    """For the released model or the folder `model`, with its drafter; of a model that is divided among ranks what the
    first of them has, which is the most. board: the name of a board (`kerngen arch ls`), whose steps are predicted.
    which: what is loaded to embed images and sound, on every rank. Raises as find_model does, UsageError for ranks that
    do not divide it and for a board that is none.
    """
    import torch

    from kerngen.runtime.dflash_config import DflashConfig
    from kerngen.runtime.footprint import RESERVE_BYTES, plan, tower_bytes
    from kerngen.runtime.media.options import WORDS
    from kerngen.runtime.world import World
    from kerngen.workload.workload import find_model

    device = None if board is None else _board(board)
    found = find_model(model, draft, kept).divided(World(0, num_ranks))
    takes = found.media
    media = takes.only(which) if takes else None
    plans = {"as released": plan(found.target, found.drafter, torch.bfloat16, media=media)}
    if found.target.quant is not None:
        plans["unquantized"] = plan(found.target, found.drafter, torch.bfloat16, dense=True, media=media)
    parts = takes.parts if takes else ()
    towers = {part: tower_bytes(only, torch.bfloat16) for part in parts if takes and (only := takes.only([part]))}
    block = found.drafter if isinstance(found.drafter, DflashConfig) else None
    steps = {} if device is None else dict(_predicted(found, device))
    if as_json:
        predicted = {} if device is None else {"predicted": {"board": device.name, "step_ms": steps}}
        click.echo(json.dumps({"model": found.name, "tensor_parallel": num_ranks, "reserve_bytes": RESERVE_BYTES,
                               "media_bytes": towers}
                              | ({} if block is None else {"drafter": block.words})
                              | {what: asdict(p) for what, p in plans.items()} | predicted))  # fmt: skip
        return
    for what, p in plans.items():
        _print(f"{found.name}, {what}" + (f", on each of {num_ranks} GPUs" if num_ranks > 1 else ""), p)
    click.echo(f"Sequences of so many tokens that run at once, beside the weights and {RESERVE_BYTES / 1e9:.1f} GB for "
               "CUDA, activations and graphs; - where none does. More wait for their turn. head: what the output heads "
               "take in few bits beside the weights, from which greedy tokens are chosen; - where memory is short."
               )  # fmt: skip
    if block is not None:
        click.echo(f"The drafter: {block.words}. What it keeps of each token is counted above.")
    for part, size in towers.items():
        counted = "which are counted above" if part in which else "not counted above, where it is loaded"
        click.echo(f"What embeds {WORDS[part]} takes {size / 1e6:,.0f} MB more, {counted}.")
    if found.target.has_kv_scales and kept.kv_cache_dtype == "auto":
        click.echo("The checkpoint has scales of an fp8 cache: with --kv-cache-dtype fp8 keys and values take 33 of 64 "
                   "bytes.")  # fmt: skip
    if cached := plans["as released"].media_cache_bytes:
        click.echo(f"Embeddings that are kept take up to {cached / 1e6:,.0f} MB, which are counted above.")
    if device is not None:
        links = ", nor what the links between GPUs take" if num_ranks > 1 else ""
        boards = device.name if num_ranks == 1 else f"{num_ranks} {device.name}s"
        click.echo(f"\nPredicted on {boards} of {device.mem_gib:g} GiB, ms a step: kernels alone, not the host{links}")
        for name, ms in steps.items():
            click.echo(f"  {name:42} {ms:9.2f}")


def _board(name: str) -> Device:
    from kerngen.arch import find_device
    from kerngen.errors import UnknownName

    try:
        return find_device(name)
    except UnknownName as e:
        raise UsageError(
            f"--plan --device {name}: {e.message}", hint=e.hint or "kerngen arch ls lists boards"
        ) from None


def _predicted(model: Model, device: Device) -> Iterator[tuple[str, float]]:
    """(step, milliseconds) of steps of the released weights, by the configurations that a run would choose there."""
    from kerngen.arch import Target
    from kerngen.cost.choose import ranked
    from kerngen.runtime.selection import Selector
    from kerngen.templates import find_kernel
    from kerngen.tuning_db import sources_for
    from kerngen.workload.steps import Step, sequence

    target = Target.of(device)
    selector = Selector(sources_for(None), target)
    of_drafter: tuple[Step, ...] = ()
    if model.drafter is not None:
        usual = [1 + n for n in model.drafter.policy.lengths] or [4]
        of_drafter = *(Step.verify(1, q_len, 512) for q_len in usual), Step.draft(1, 512)
    decode = (Step.decode(1, 512), Step.decode(1, 8192), Step.decode(8, 2048), Step.decode(32, 2048))
    for step in (*decode, *of_drafter, Step.prefill(2048, 2048), Step.prefill(8192, 8192)):
        if step.context > model.target.max_positions:
            continue
        launched = sequence(model, step, target.arch, selector.fuses)
        us = 0.0
        for (name, problem), times in Counter((each.kernel, each.problem) for each in launched).items():
            kernel = find_kernel(name)
            chosen = selector.choice(kernel, problem).config
            us += times * ranked(kernel, problem, target, [chosen])[0][0]
        yield step.name, us / 1e3


def _print(title: str, plan: Plan) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    click.echo(f"{title}: weights {plan.weight_bytes / 1e9:.1f} GB, drafter {plan.drafter_bytes / 1e9:.1f} GB; a "
               f"sequence {plan.window_bytes / 1e6:.0f} MB and {plan.token_bytes / 1e3:.1f} KB a token")  # fmt: skip
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("GPU, GB", justify="right")
    contexts = next(iter(plan.sequences.values()))
    for context in contexts:
        table.add_column(f"{context:,}", justify="right")
    table.add_column("longest", justify="right")
    table.add_column("head, GB", justify="right")
    for gb, row in plan.sequences.items():
        longest = plan.longest[gb]
        head = f"{plan.screen_bytes[gb] / 1e9:.1f}" if plan.screen_bytes[gb] else "-"
        table.add_row(
            str(gb), *(f"{n:,}" if n else "-" for n in row.values()), f"{longest:,}" if longest else "-", head
        )
    Console(soft_wrap=True).print(table)
