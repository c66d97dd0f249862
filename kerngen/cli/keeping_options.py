"""What commands have in common that have to do with how a model's tensors are kept on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from kerngen.cli.option_groups import with_options
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
        "memory.",
    ),
    click.option(
        "--kv-cache-layout", type=click.Choice(KV_CACHE_LAYOUTS), default=KV_CACHE_LAYOUTS[0], show_default=True,
        help="shared: where a layer's K is its V (full-attention layers of 12B, 26B-A4B and 31B) one pool has both, in "
        "5 of 8 bytes.",
    ),
)  # fmt: skip


def keeping_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives `command` them all, as one argument `kept`."""

    @wraps(command)
    def with_kept(*args: Any, draft_weights: str, kv_cache_dtype: str, kv_cache_layout: str, **others: Any) -> Any:
        return command(*args, kept=Keeping(draft_weights, kv_cache_dtype, kv_cache_layout), **others)

    return with_options(_OPTIONS)(with_kept)
