"""`kerngen bench soak`: a server under load by clients that do all that clients do."""

from __future__ import annotations

import asyncio
import json

import click

from kerngen.cli.bench_serve import URL


@click.command()
@click.argument("url", default=URL)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True)
@click.option("--concurrency", type=click.IntRange(1), default=32, show_default=True, help="Clients at once.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--answer-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--spread", type=click.FloatRange(0, 1), default=0.9, show_default=True,
              help="Both lengths are drawn from so much below to so much above.")  # fmt: skip
@click.option("--vocab", "vocab_size", type=click.IntRange(2), default=32_000, show_default=True,
              help="Random tokens are below it.")  # fmt: skip
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True,
              help="Of requests that are not compared.")  # fmt: skip
@click.option("--reference", type=click.IntRange(0), default=8, show_default=True,
              help="Requests that are asked alone first, and compared with when asked again.")  # fmt: skip
@click.option("--different", type=click.Choice(["fails", "counts"]), default="fails", show_default=True,
              help="A greedy answer other than alone. counts: for 16 bits, where rounding may tell.")  # fmt: skip
@click.option("--max-growth", type=click.FloatRange(0), default=64.0, show_default=True,
              help="MB that a process, or the GPU's memory, may grow by in the second half.")  # fmt: skip
@click.option("--memory/--no-memory", default=True, show_default=True,
              help="Watch the server's processes, which are on this machine.")  # fmt: skip
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=120.0, show_default=True,
              help="Seconds that an answer may take.")  # fmt: skip
@click.option("--model", default=None, help="What to ask for. Default: what the server calls itself.")
@click.option("--api-key", default=None, envvar="KERNGEN_API_KEY", help="Default: $KERNGEN_API_KEY.")
@click.option("--seed", default=0, show_default=True, help="Of prompts, and of what clients do.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def soak(
    url: str, minutes: float, concurrency: int, prompt_tokens: int, answer_tokens: int, spread: float, vocab_size: int,
    temperature: float, reference: int, different: str, max_growth: float, memory: bool, timeout_s: float,
    model: str | None, api_key: str | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Load the server at URL for minutes as clients do that leave, read slowly, break off and ask for nonsense.

    Exit code 1 on any fault: an error that no client caused, an answer that does not come or differs from the one that
    its request got alone, memory that grows, work or pages that are left when nobody waits.

    Example: kerngen bench soak http://127.0.0.1:8000 --minutes 10 --concurrency 80
    """
    from kerngen.loadgen.asking import Shape
    from kerngen.loadgen.http import Server
    from kerngen.loadgen.soak import Settings
    from kerngen.loadgen.soak import soak as run
    from kerngen.system.progress import Reporter

    shape = Shape(prompt_tokens, answer_tokens, spread, "ids", vocab_size, temperature, seed)
    settings = Settings(60 * minutes, shape, concurrency, reference, different == "fails", max_growth, timeout_s,
                        memory, model)  # fmt: skip
    with Reporter("bench soak, s", quiet=as_json) as bar:
        total = int(settings.seconds)
        found = asyncio.run(
            run(Server.at(url, api_key), settings, lambda done, text: bar.update(min(int(done), total), total, text))
        )
    said = found.as_dict()
    if as_json:
        click.echo(json.dumps({"server": url, "concurrency": concurrency, **said}))
    else:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(said["counts"].items()))
        click.echo(f"{minutes:g} minutes, {concurrency} clients: {counts}; {said['tokens']:,} tokens read to the end")
        click.echo(f"greedy answers as alone: {said['equal']} equal, {said['different']} different")
        if parted := said["parted_after"]:
            least, middle, most = (f"{parted[name]:.1%}" for name in ("least", "median", "most"))
            click.echo(f"different after {middle} of the answer in the median, {least} to {most}")
        if said["memory"]:
            grown = ", ".join(f"{name} {mb:+.1f}" for name, mb in said["growth_mb"].items())
            held, count = said["memory"][-1]["host_mb"], len(said["processes"])
            click.echo(f"memory, MB: {held:.0f} in {count} processes at the end; most of the second half against the "
                       f"first: {grown or 'too short to say'}")  # fmt: skip
        for fault in said["faults"]:
            click.echo(f"FAULT {fault}")
        click.echo(f"{said['num_faults']} faults" if said["num_faults"] else "no faults")
    if said["num_faults"]:
        raise click.exceptions.Exit(1)
