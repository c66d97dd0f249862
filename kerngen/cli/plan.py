"""`kerngen run --plan`: what a model takes on a GPU, and how many sequences of which context fit beside it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kerngen.runtime.footprint import Plan


def print_plan(model: str, draft: str | None, draft_weights: str, num_ranks: int = 1, *, as_json: bool) -> None:
    """For the released model or the folder `model`, with its drafter; of a model that is divided among ranks what the
    first of them has, which is the most. Raises as find_model does, and UsageError for ranks that do not divide it.
    """
    import torch

    from kerngen.runtime.footprint import RESERVE_BYTES, plan
    from kerngen.runtime.world import World
    from kerngen.workload.workload import find_model

    found = find_model(model, draft, draft_weights).divided(World(0, num_ranks))
    plans = {"as released": plan(found.target, found.drafter, torch.bfloat16)}
    if found.target.quant is not None:
        plans["unquantized"] = plan(found.target, found.drafter, torch.bfloat16, dense=True)
    if as_json:
        click.echo(json.dumps({"model": found.name, "tensor_parallel": num_ranks, "reserve_bytes": RESERVE_BYTES}
                              | {what: asdict(p) for what, p in plans.items()}))  # fmt: skip
        return
    for what, p in plans.items():
        _print(f"{found.name}, {what}" + (f", on each of {num_ranks} GPUs" if num_ranks > 1 else ""), p)
    click.echo(f"Sequences of so many tokens that run at once, beside the weights and {RESERVE_BYTES / 1e9:.1f} GB for "
               "CUDA, activations and graphs; - where none does. More wait for their turn. head: what the output heads "
               "take in few bits beside the weights, from which greedy tokens are chosen; - where memory is short."
               )  # fmt: skip


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
