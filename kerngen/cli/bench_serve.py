"""`kerngen bench serve`: a server under load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import click

from kerngen.cli.tables import Table, fitted, new_console, say

URL = "http://127.0.0.1:8000"
_TIMES = ("ttft_ms", "itl_ms", "tpot_ms", "e2el_ms")


@click.command()
@click.argument("url", default=URL)
@click.option("--prompt-tokens", type=click.IntRange(1), default=1024, show_default=True, help="Of each prompt.")
@click.option("--answer-tokens", type=click.IntRange(1), default=1024, show_default=True,
              help="Of each answer, whatever ends it otherwise.")  # fmt: skip
@click.option("--spread", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="Both lengths are drawn from so much below to so much above.")  # fmt: skip
@click.option("--as", "way", type=click.Choice(["ids", "text", "chat"]), default="ids", show_default=True,
              help="Send prompts as random tokens, as their text, or as what a user says.")  # fmt: skip
@click.option("--image", "image_size", default=None, metavar="WIDTHxHEIGHT",
              help="With --as chat: show a random picture of so many pixels in each prompt.")  # fmt: skip
@click.option("--same-image", is_flag=True, help="The same picture in all prompts, the warm-up's included.")
@click.option("--vocab", "vocab_size", type=click.IntRange(2), default=32_000, show_default=True,
              help="Random tokens are below it.")  # fmt: skip
@click.option("--concurrency", type=click.IntRange(1), default=None,
              help="Requests at work at once; further ones wait for their turn. Default: any number.")  # fmt: skip
@click.option("--rate", "rates", default="inf", show_default=True,
              help="Requests that come a second, on average; several with commas. inf: all at once.")  # fmt: skip
@click.option("--sweep", type=click.IntRange(1), default=None,
              help="All at once, then so many rates, evenly below what that came to.")  # fmt: skip
@click.option("--requests", type=click.IntRange(1), default=200, show_default=True, help="Of a run, at most.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True,
              help="Requests of a rate come for so long.")  # fmt: skip
@click.option("--warmup", type=click.IntRange(0), default=None,
              help="Requests that are not timed, before all. Default: as many as --concurrency, else 8.")  # fmt: skip
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True,
              help="Seconds that an answer may take.")  # fmt: skip
@click.option("--model", default=None, help="What to ask for. Default: what the server calls itself.")
@click.option("--api-key", default=None, envvar="KERNGEN_API_KEY", help="Default: $KERNGEN_API_KEY.")
@click.option("--seed", default=0, show_default=True, help="Of prompts and of when they come.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def serve(
    url: str, prompt_tokens: int, answer_tokens: int, spread: float, way: str, image_size: str | None,
    same_image: bool, vocab_size: int, concurrency: int | None, rates: str, sweep: int | None, requests: int,
    seconds: float, warmup: int | None, temperature: float, timeout_s: float, model: str | None,
    api_key: str | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Put the server at URL under load, and print its throughput and latencies: any server of OpenAI's API.

    Requests stream, of random tokens; those of a rate come as a Poisson process. Throughput, TTFT, ITL, TPOT and E2EL
    are what vLLM's `bench serve` calls so. Exit code 1 if a request failed.

    Example: kerngen bench serve http://127.0.0.1:8000 --concurrency 80 --sweep 4
    """
    from kerngen.errors import UsageError
    from kerngen.loadgen.arrivals import Plan, runs
    from kerngen.loadgen.asking import Shape
    from kerngen.loadgen.http import Server
    from kerngen.system.progress import Reporter

    wanted = _rates(rates)
    if sweep and rates != "inf":
        raise UsageError("--sweep finds its rates, and --rate names them: one of the two")
    server = Server.at(url, api_key)
    image = _image(image_size)
    if (image or same_image) and (way != "chat" or image is None):
        raise UsageError("pictures are shown in chats: --as chat --image WIDTHxHEIGHT")
    shape = Shape(prompt_tokens, answer_tokens, spread, way, vocab_size, temperature, seed, image, same_image)
    plan = Plan(
        shape, concurrency, requests, seconds, (concurrency or 8) if warmup is None else warmup, timeout_s, model
    )
    rows: list[dict[str, Any]] = []

    async def collect(bar: Reporter) -> None:
        async for row in runs(
            server, plan, wanted, sweep or 0, lambda done, total, text: bar.update(done, total, text)
        ):
            rows.append(row)

    def report() -> None:
        if sweep:
            rows.sort(key=lambda r: float("inf") if r["rate"] is None else r["rate"])
        if as_json:
            click.echo(json.dumps({"server": str(server), "prompt_tokens": prompt_tokens,
                                   "answer_tokens": answer_tokens, "spread": spread, "as": way,
                                   "temperature": temperature, "seed": seed, "warmup": plan.warmup,
                                   "runs": rows}))  # fmt: skip
        else:
            say(f"{server}: prompts of {prompt_tokens:,} tokens, answers of {answer_tokens:,}, spread {spread:g}, "
                f"as {way}, {plan.warmup} to warm up, seed {seed}")  # fmt: skip
            print_runs(rows)

    try:
        with Reporter("bench serve", quiet=as_json) as bar:
            asyncio.run(collect(bar))
    finally:
        if rows:  # also those that ended before Ctrl-C, or before the server did
            report()
    if any(r["failed"] for r in rows):
        raise click.exceptions.Exit(1)


def print_runs(rows: Sequence[dict[str, Any]]) -> None:
    """Runs beside each other, and what went wrong. rows: as `loadgen.arrivals.runs` gives them."""
    heads = (f">{name[:-3].upper()} p50/p90/p99 ms" for name in _TIMES)
    table = Table("", ">rate", ">at once", ">done", ">failed", ">req/s", ">out tok/s", ">tok/s", *heads, "drafts")
    for r in rows:
        drafted = r["drafting"]
        table.add_row(
            _rate(r), str(r["concurrency"] or "any"), str(r["completed"]), str(r["failed"]),
            f"{r['requests_per_s']:.2f}", f"{r['answer_tokens_per_s']:.1f}", f"{r['tokens_per_s']:.1f}",
            *(_spread(r[name]) for name in _TIMES),
            f"{drafted['acceptance_rate']:.0%}, {drafted['acceptance_length']:.2f} a step" if drafted else "-",
        )  # fmt: skip
    new_console().print(table)
    for r in rows:
        for error, count in r["errors"].items():
            click.echo(fitted(f"at rate {_rate(r)}: {count} times {error}"))


def _rate(row: dict[str, Any]) -> str:
    return "inf" if row["rate"] is None else f"{row['rate']:.3g}/s"


def _spread(ms: dict[str, float] | None) -> str:
    if ms is None:
        return "-"
    digits = 1 if ms["p99"] < 1000 else 0
    return "/".join(f"{value:.{digits}f}" for name, value in ms.items() if name.startswith("p"))


def _image(text: str | None) -> tuple[int, int] | None:
    from kerngen.errors import UsageError
    from kerngen.runtime.media.limits import MAX_PIXELS

    if text is None:
        return None
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) > 0 and int(height) > 0):
        raise UsageError(f"--image {text!r} is no size of a picture", hint="--image 1920x1080")
    if int(width) * int(height) > MAX_PIXELS:
        raise UsageError(f"--image {text}: servers take images of at most {MAX_PIXELS:,} pixels",
                         hint="--image 1920x1080")  # fmt: skip
    return int(width), int(height)


def _rates(text: str) -> list[float | None]:
    from kerngen.errors import UsageError

    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(rate > 0 for rate in found):
        raise UsageError(f"--rate {text!r} is no list of rates", hint="--rate 1,2.5,inf")
    return [None if rate == float("inf") else rate for rate in found]
