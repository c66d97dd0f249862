"""`kerngen eval`: what approximations that a user may choose cost in a model's own distributions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kerngen.cli.model_options import BACKEND_OPTIONS
from kerngen.cli.option_groups import with_options
from kerngen.errors import UsageError
from kerngen.runtime.config import KV_CACHE_DTYPES, KV_CACHE_LAYOUTS, Keeping

if TYPE_CHECKING:
    from kerngen.quality.kv import Distance

MOST_BYTES = 64 << 20  # of a text
SHOWN_DIGITS = 5  # of a perplexity: formats differ from the fourth digit on


@click.group()
def eval() -> None:
    """Say what an approximation costs on a text."""


@eval.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--kv-cache-dtype",
    "dtypes",
    default=",".join(d for d in KV_CACHE_DTYPES[1:] if d != "fp8"),  # which few checkpoints have scales for
    show_default=True,
    help="What to compare with the activations' dtype, with commas.",
)
@click.option(
    "--kv-cache-layout",
    "layout",
    type=click.Choice(KV_CACHE_LAYOUTS),
    default=KV_CACHE_LAYOUTS[0],
    show_default=True,
    help="Theirs; with shared, auto may be compared, too.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="What is read, in UTF-8. Default: an essay of ours, of about a thousand tokens.",
)
@click.option("--tokens", type=click.IntRange(2), default=None, help="Read no more than so many.")
@click.option("--chunk", type=click.IntRange(1), default=256, show_default=True, help="Tokens read at once.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_options(BACKEND_OPTIONS)
def kv(
    model: Path, dtypes: str, layout: str, text: Path | None, tokens: int | None, chunk: int, as_json: bool,
    backend: str, dtype: str | None, device: str | None, db_url: str | None, bundle: str | None,
) -> None:  # fmt: skip
    """What formats of the KV cache change in the next token's distribution: KL divergence, and the likeliest token.

    MODEL is a checkpoint's folder, a GGUF file or a name on the Hugging Face hub. A text like those that you will
    read says most: long ones, since what a cache loses adds up.

    \b
    Example:
      kerngen eval kv ./gemma-4-31b-it --kv-cache-dtype int8 --text book.txt --tokens 16384
    """
    from kerngen.quality.essay import TEXT
    from kerngen.quality.kv import kv_quality
    from kerngen.runtime.session import load
    from kerngen.system.progress import Reporter

    wanted = [name for name in dtypes.split(",") if name]
    if unknown := [name for name in wanted if name not in KV_CACHE_DTYPES]:
        raise UsageError(f"--kv-cache-dtype {unknown[0]!r} is not known", hint=f"known: {', '.join(KV_CACHE_DTYPES)}")
    if not wanted:
        raise UsageError("--kv-cache-dtype names no format", hint=f"known: {', '.join(KV_CACHE_DTYPES)}")
    kept = [Keeping(kv_cache_dtype=name, kv_cache_layout=layout) for name in wanted]
    said = TEXT if text is None else _read(text)
    with Reporter("weights", quiet=as_json) as bar:
        session = load(model, draft=False, backend=backend, dtype=dtype, device=device, db=db_url, bundle=bundle,
                       media="none", advance=bar.update_bytes)  # fmt: skip
    ids = session.encode(said, chat=False)[:tokens]
    with Reporter("tokens", quiet=as_json) as bar:
        found = kv_quality(session.model, ids, kept, chunk=chunk,
                           advance=lambda done, of: bar.update(done, of, ""))  # fmt: skip
    if as_json:
        about = {"model": str(model), "tokens": len(ids) - 1, "where": session.where}
        click.echo(json.dumps(about | {"formats": [one.as_dict() for one in found]}))
        return
    click.echo(f"{len(ids) - 1:,} tokens, {session.where}; KL divergence in nats against a cache in that dtype")
    for one in found:
        heads = ("positions", 17), ("KL mean", 9), ("p99", 9), ("most", 9), ("same token", 11), ("perplexity", 21)
        click.echo(
            f"\n{one.kv_cache_dtype}, {one.kv_cache_layout}\n" + " ".join(f"{head:>{width}}" for head, width in heads)
        )
        for d in (*one.buckets, one.whole):
            where = f"{d.first:,} to {d.end - 1:,}" if d is not one.whole else "all"
            click.echo(f"{where:>17} {d.kl_mean:#9.2g} {d.kl_p99:#9.2g} {d.kl_max:#9.2g} {d.top1:11.2%} "
                       f"{_perplexities(d):>21}")  # fmt: skip


def _perplexities(quality: Distance) -> str:
    """With the format and without, to as many decimals as make SHOWN_DIGITS of the latter."""
    digits = len(f"{quality.reference_perplexity:.0f}")
    return " / ".join(f"{p:,.{max(SHOWN_DIGITS - digits, 0)}f}"
                      for p in (quality.perplexity, quality.reference_perplexity))  # fmt: skip


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as e:
        raise UsageError(f"--text {path}: {e.strerror or e}") from e
    if len(data) > MOST_BYTES:
        raise UsageError(f"--text {path} has more than {MOST_BYTES >> 20} MB", hint="a part of it says as much")
    hint = "name a text file; iconv -f latin1 -t utf-8 FILE converts one of another encoding"
    if (zero := data.find(0)) >= 0:
        raise UsageError(f"--text {path} is binary, no text: byte {zero:,} is 0", hint=hint)
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise UsageError(f"--text {path} is not UTF-8: byte {e.start:,} is 0x{data[e.start]:02x}", hint=hint) from e
