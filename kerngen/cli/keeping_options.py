"""What commands have in common that have to do with how a model's tensors are kept on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from kerngen.cli.option_groups import with_options
from kerngen.cli.tables import say
from kerngen.runtime.config import DRAFT_WEIGHTS, KV_CACHE_DTYPES, KV_CACHE_LAYOUTS, Keeping

_OPTIONS = (
    click.option(
        "--draft-weights", type=click.Choice(DRAFT_WEIGHTS), default=DRAFT_WEIGHTS[0], show_default=True,
        help="The drafter's matrices: as they are stored, or made int4 as they are loaded. The output is the same; "
        "fewer drafts may be accepted.",
    ),
    click.option(
        "--kv-cache-dtype", type=click.Choice(KV_CACHE_DTYPES), default=KV_CACHE_DTYPES[0], show_default=True,
        help="Keys and values: as they are computed, or int8 with a scale for each 64 of them, in about half of the "
        "memory. int4 and int3, experimental: full-attention layers in 4 or 3 bits, sliding ones in int8. "
        "fp8: in e4m3, by the scales of a checkpoint that has them (kv_cache_scheme).",
    ),
    click.option(
        "--kv-cache-layout", type=click.Choice(KV_CACHE_LAYOUTS), default=KV_CACHE_LAYOUTS[0], show_default=True,
        help="shared: where a layer's K is its V (full-attention layers of 12B, 26B-A4B and 31B) one pool has both, in "
        "5 of 8 bytes.",
    ),
    click.option(
        "--sparse-prefill", type=float, default=None, metavar="ALPHA",
        help="In full-attention layers long prompts read the keys alone that are estimated to weigh ALPHA times the "
        "heaviest, as 0.1. Default: all keys, and so from 1 on.",
    ),
)  # fmt: skip


def density_lines(density: dict[int, float]) -> list[str]:
    """What share of keys prompts read, by layer where they choose; nothing where they read all."""
    if not density:
        return []
    mean = sum(density.values()) / len(density)
    each = ", ".join(f"layer {layer} {share:.1%}" for layer, share in density.items())
    return [f"prompts read {mean:.1%} of the tiles of keys in full-attention layers ({each})"]


def keeping_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives `command` them all, as one argument `kept`."""

    @wraps(command)
    def with_kept(
        *args: Any, draft_weights: str, kv_cache_dtype: str, kv_cache_layout: str, sparse_prefill: float | None,
        **others: Any,
    ) -> Any:  # fmt: skip
        kept = Keeping(draft_weights, kv_cache_dtype, kv_cache_layout, sparse_prefill)
        if sparse_prefill is not None and kept.sparse is None:
            say(f"--sparse-prefill {sparse_prefill:g}: prompts read all keys, as without it; "
                "a number below 1, as 0.1, leaves keys out", err=True)  # fmt: skip
        return command(*args, kept=kept, **others)

    return with_options(_OPTIONS)(with_kept)
