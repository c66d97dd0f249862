"""`kerngen convert`: a checkpoint in the order that loading takes, so that a start waits for the disk alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def convert(model: Path, out: Path, as_json: bool) -> None:
    """Write MODEL, a GGUF file or any checkpoint that loads, to the folder OUT as safetensors.

    Packed matrices keep their codes, scales and minima, in the order in which kerngen loads them; OUT has
    config.json, tokenizer and chat template as well, and is named where a model is.

    \b
    Example:
      kerngen convert ./gemma-4-31b-it-awq ./gemma-4-31b-it-packed
    """
    from kerngen.runtime.hub import find_checkpoint
    from kerngen.runtime.weights.conversion import convert as written
    from kerngen.system.progress import Reporter

    with Reporter("weights", quiet=as_json) as bar:
        done = written(find_checkpoint(model), out, advance=bar.update_bytes)
    if as_json:
        click.echo(json.dumps({"model": str(model), "out": str(out)} | asdict(done)))
        return
    click.echo(
        f"{out}: {done.num_tensors:,} tensors, {done.num_bytes / 1e9:.2f} GB; {done.packed:,} matrices are packed"
    )
    if done.decoded:
        click.echo(f"{done.decoded:,} that were quantised are bf16 now, which takes {done.decoded_bytes / 1e9:.2f} GB")
