"""`kerngen soak URL`: a server under load by clients that do all that clients do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import click

from kerngen.system.urls import without_password

MAX_GROWTH = 64.0  # MB
OPTIONS = (
    click.option("--concurrency", type=click.IntRange(1), default=32, show_default=True, help="Clients at once."),
    click.option("--prompt-tokens", type=click.IntRange(1), default=512, show_default=True),
    click.option("--answer-tokens", type=click.IntRange(1), default=128, show_default=True),
    click.option("--spread", type=click.FloatRange(0, 1), default=0.9, show_default=True,
                 help="Both lengths are drawn from so much below to so much above."),
    click.option("--vocab", "vocab_size", type=click.IntRange(2), default=32_000, show_default=True,
                 help="Random tokens are below it."),
    click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True,
                 help="Of requests that are not compared."),
    click.option("--reference", type=click.IntRange(0), default=8, show_default=True,
                 help="Requests that are asked alone first, and compared with when asked again."),
    click.option("--different", type=click.Choice(["fails", "counts"]), default="fails", show_default=True,
                 help="A greedy answer other than alone. counts: for 16 bits, where rounding may tell."),
    click.option("--memory/--no-memory", default=True, show_default=True,
                 help="Watch the server's processes, which are on this machine."),
    click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=120.0, show_default=True,
                 help="Seconds that an answer may take."),
    click.option("--model", "asked", default=None, help="What to ask for. Default: what the server calls itself."),
    click.option("--api-key", default=None, envvar="KERNGEN_API_KEY", help="Default: $KERNGEN_API_KEY."),
)  # fmt: skip


def soak_server(
    url: str, *, minutes: float, concurrency: int, prompt_tokens: int, answer_tokens: int, spread: float,
    vocab_size: int, temperature: float, reference: int, different: str, max_growth: float | None, memory: bool,
    timeout_s: float, asked: str | None, api_key: str | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Load the server at `url`, and print what came of it. Raises click's Exit on any fault."""
    from kerngen.loadgen.asking import Shape
    from kerngen.loadgen.http import Server
    from kerngen.soak.server import Settings, soak
    from kerngen.system.progress import Reporter

    shape = Shape(prompt_tokens, answer_tokens, spread, "ids", vocab_size, temperature, seed)
    settings = Settings(60 * minutes, shape, concurrency, reference, different == "fails",
                        MAX_GROWTH if max_growth is None else max_growth, timeout_s, memory, asked)  # fmt: skip
    with Reporter("soak, s", quiet=as_json) as bar:
        total = int(settings.seconds)
        found = asyncio.run(
            soak(Server.at(url, api_key), settings, lambda done, text: bar.update(min(int(done), total), total, text))
        )
    said = found.as_dict()
    if as_json:
        click.echo(json.dumps({"server": without_password(url), "concurrency": concurrency, **said}))
    else:
        click.echo("\n".join(_lines(said, minutes, concurrency)))
    if said["num_faults"]:
        raise click.exceptions.Exit(1)


def _lines(said: dict[str, Any], minutes: float, concurrency: int) -> Iterator[str]:
    counts = ", ".join(f"{count} {name}" for name, count in sorted(said["counts"].items()))
    yield f"{minutes:g} minutes, {concurrency} clients: {counts}; {said['tokens']:,} tokens read to the end"
    yield f"greedy answers as alone: {said['equal']} equal, {said['different']} different"
    if parted := said["parted_after"]:
        least, middle, most = (f"{parted[name]:.1%}" for name in ("least", "median", "most"))
        yield f"different after {middle} of the answer in the median, {least} to {most}"
    if said["memory"]:
        grown = ", ".join(f"{name} {mb:+.1f}" for name, mb in said["growth_mb"].items())
        held, count = said["memory"][-1]["host_mb"], len(said["processes"])
        yield (f"memory, MB: {held:.0f} in {count} processes at the end; most of the second half against the "
               f"first: {grown or 'too short to say'}")  # fmt: skip
    yield from (f"FAULT {fault}" for fault in said["faults"])
    yield f"{said['num_faults']} faults" if said["num_faults"] else "no faults"
