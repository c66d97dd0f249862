"""`kerngen soak`: minutes of random requests to a model in this process or to a server, and what is wrong with it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import click
from click.core import ParameterSource

from kerngen.cli import soak_server
from kerngen.cli.bench_serve import URL
from kerngen.cli.keeping_options import keeping_options
from kerngen.cli.model_options import BACKEND_OPTIONS, tensor_parallel_option
from kerngen.cli.option_groups import Decorator, with_options
from kerngen.runtime.config import Keeping, require_reproducible

MAX_PROMPT = 32_768
MAX_GROWTH = 256.0  # MB
SHOWN_DIFFERENCES = 10
REPRODUCIBLE_DRAFTS = 3

_BOTH: Sequence[Decorator] = (
    click.option("--minutes", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True,
                 help="How long requests come."),
    click.option("--max-growth", type=click.FloatRange(0), default=None,
                 help="MB that memory may grow by in the second half. Default: 256; of a server 64."),
    click.option("--seed", default=0, show_default=True, help="Of requests and when they come; of generated weights."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)  # fmt: skip
_OF_A_MODEL: Sequence[Decorator] = (
    click.option("--check-minutes", type=click.FloatRange(0), default=5.0, show_default=True,
                 help="How long answers are then asked for again, one by one. 0 for none."),
    click.option("--max-batch", type=click.IntRange(1), default=64, show_default=True, help="Sequences at once."),
    click.option("--max-prompt", type=click.IntRange(1), default=None,
                 help="Tokens of the longest prompt. Default: 32768, or what the model takes."),
    click.option("--max-new-tokens", type=click.IntRange(1), default=300, show_default=True,
                 help="Of the longest answer."),
    click.option("--drafting", type=click.Choice(["off", "on", "both"]), default="both", show_default=True,
                 help="both: half of the time each."),
    click.option("--draft", default=None, help="The drafter's folder. Default: the one that goes with MODEL."),
    keeping_options,
    click.option("--num-draft-tokens", type=click.IntRange(1, 15), default=None,
                 help="Tokens drafted a step. Default: as many as pay; with --reproducible 3."),
    click.option("--cancel", type=click.FloatRange(0, 1), default=0.1, show_default=True,
                 help="Share of requests that are cancelled at a random step, if they run so long."),
    click.option("--kv-memory", type=click.FloatRange(0, min_open=True), default=None,
                 help="GB for the cache. Default: at times too little, so that some is preempted."),
    click.option("--page-size", type=click.IntRange(1), default=64, show_default=True, help="Tokens of a page."),
    click.option("--prefill-chunk", type=click.IntRange(1), default=2048, show_default=True,
                 help="Prompt tokens a step."),
    click.option("--reproducible", is_flag=True,
                 help="Run steps of one shape, so that 16-bit answers must be equal, too."),
    click.option("--generated", is_flag=True, help="Random weights, though MODEL have its own."),
    *BACKEND_OPTIONS,
    tensor_parallel_option,
)  # fmt: skip


def _names(options: Sequence[Decorator]) -> set[str]:
    """Of the parameters that they make."""

    def none() -> None: ...

    made: Any = with_options(options)(none)
    return {p.name for p in made.__click_params__}


@click.command()
@click.argument("target", metavar="MODEL|URL")
@with_options(_BOTH, _OF_A_MODEL, soak_server.OPTIONS)
@click.pass_context
def soak(context: click.Context, target: str, **options: Any) -> None:
    """Load MODEL, or the server at URL, with random requests for minutes, and check what comes of it.

    MODEL is a released model, whose weights are generated, a folder with a checkpoint or a GGUF file. Requests come in
    bursts, share beginnings, are greedy or sampled, stop, are cancelled, and wait or are preempted for want of pages.
    Then each answer is compared with the one that its request gets alone. Exit code 1 on an error, on pages that were
    not given back, on memory that grows after the warm-up, and, in fp32 or with --reproducible, on a greedy answer that
    differs from the one alone. Ctrl-C prints the report so far.

    URL is a server of OpenAI's API: clients read answers to their end, leave, read slowly, break off and ask for
    nonsense. Exit code 1 on an error that no client caused, an answer that does not come or differs from the one that
    its request got alone, memory that grows, work or pages that are left when nobody waits.

    Example: kerngen soak gemma-4-31b --minutes 10 --reproducible
    """
    is_server = target.startswith(("http://", "https://"))
    _require_of(context, *(("a model", _OF_A_MODEL) if is_server else ("a server", soak_server.OPTIONS)))
    of_both, of_servers = _names(_BOTH), _names(soak_server.OPTIONS)
    if is_server:
        soak_server.soak_server(target, **{n: value for n, value in options.items() if n in of_both | of_servers})
    else:
        _soak_model(target, **{n: value for n, value in options.items() if n not in of_servers})


def _require_of(context: click.Context, whose: str, options: Sequence[Decorator]) -> None:
    """Raises UsageError where one of these, which are of another kind of target, was given."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is ParameterSource.COMMANDLINE and parameter.name in _names(options):
            raise click.UsageError(f"{parameter.opts[0]} is of {whose}: {context.params['target']} is none")


@click.command("soak", hidden=True)
@click.argument("target", metavar="URL", default=URL)
@with_options(_BOTH, soak_server.OPTIONS)
def bench_soak(target: str, **options: Any) -> None:
    """`kerngen soak URL`, as it was called before."""
    soak_server.soak_server(target, **options)


def _soak_model(
    target: str, *, minutes: float, check_minutes: float, max_batch: int, max_prompt: int | None, max_new_tokens: int,
    drafting: str, draft: str | None, kept: Keeping, num_draft_tokens: int | None, cancel: float,
    kv_memory: float | None, page_size: int, prefill_chunk: int, reproducible: bool, generated: bool,
    max_growth: float | None, backend: str, dtype: str | None, device: str | None, db_url: str | None,
    bundle: str | None, tensor_parallel: int, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Load a model in this process, and print what came of it. Raises click's Exit on any failure."""
    from kerngen.errors import UsageError
    from kerngen.runtime.backend import explaining_memory
    from kerngen.soak.drive import Settings
    from kerngen.soak.models import open_model
    from kerngen.soak.report import soak as run
    from kerngen.system.progress import Reporter

    if drafting == "off" and (draft or num_draft_tokens or not kept.drafts_as_stored):
        raise UsageError("--drafting off contradicts --draft, --draft-weights and --num-draft-tokens")
    if reproducible:
        require_reproducible(kept.sparse)
    with warnings.catch_warnings(record=True, action="always") as caught, Reporter("weights") as bar:
        opened = open_model(
            target, draft=draft, kept=kept, drafting=drafting != "off", generated=generated,
            backend=backend, device=device, dtype=dtype, db_url=db_url, bundle=bundle, seed=seed,
            advance=bar.update_bytes, tensor_parallel=tensor_parallel,
        )  # fmt: skip
    for warning in caught:
        click.echo(f"warning: {warning.message}", err=True)
    if num_draft_tokens is None and reproducible and drafting != "off":
        num_draft_tokens = REPRODUCIBLE_DRAFTS
    if max_prompt is None:
        max_prompt = max(min(MAX_PROMPT, opened.model.config.max_positions - max_new_tokens), 1)
    settings = Settings(
        seconds=60 * minutes, check_seconds=60 * check_minutes, max_batch=max_batch, max_prompt=max_prompt,
        max_new_tokens=max_new_tokens, num_draft_tokens=num_draft_tokens, cancel=cancel,
        cache_bytes=None if kv_memory is None else int(kv_memory * 1e9), page_size=page_size,
        prefill_chunk=prefill_chunk, reproducible=reproducible, seed=seed,
    )  # fmt: skip
    with explaining_memory(opened.ops.device), Reporter("soak, s") as bar:
        report = run(opened, settings, drafting, MAX_GROWTH if max_growth is None else max_growth,
                     lambda done, total, text: bar.update(int(done), int(total), text))  # fmt: skip
    result = report.as_dict()
    click.echo(json.dumps(result) if as_json else "\n".join(lines(result)))
    if report.failures:
        raise click.exceptions.Exit(1)
    if report.stopped:
        raise KeyboardInterrupt


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report, for people: what was found wrong last."""
    from kerngen.cli.run import chosen_lines

    settings, size = report["settings"], report["tensor_parallel"]
    among = f", divided among {size} ranks" if size > 1 else ""
    yield (f"{report['model']} on {report['device']} ({report['backend']}, {report['dtype']}{among}), "
           f"{report['weights']}; up to {settings['max_batch']} sequences, "
           f"prompts of up to {settings['max_prompt']:,} tokens, "
           f"seed {settings['seed']}{', reproducible' if settings['reproducible'] else ''}")  # fmt: skip
    for phase in report["phases"]:
        yield from _phase_lines(phase)
    for check in report["checks"]:
        yield from _check_lines(check)
    if report["between_phases"] is not None:
        equal, different = report["between_phases"]
        yield f"greedy answers with drafts and without: {equal} equal, {different} different"
    yield from chosen_lines(report["configurations"], report["outside"])
    if report["stopped"]:
        yield "stopped before its end"
    yield from (f"FAILED: {failure}" for failure in report["failures"])
    if not report["failures"]:
        yield "no failure"


def _phase_lines(phase: dict[str, Any]) -> Iterator[str]:
    pages = phase["num_pages"]
    yield (f"{phase['name']}: {phase['asked']} requests, {phase['finished']} finished, {phase['cancelled']} cancelled, "
           f"{phase['preempted']} preempted ({phase['preemptions']} times), {phase['sampled']} sampled; "
           f"{phase['tokens']:,} tokens in {phase['steps']:,} steps, longest prompt {phase['longest_prompt']:,}, "
           f"{phase['found_in_cache']:,} tokens of prompts found in the cache")  # fmt: skip
    yield (f"  cache {phase['cache_gb']:.2f} GB: {pages['full']} pages for full-attention layers, "
           f"{pages['sliding']} for sliding ones")  # fmt: skip
    if phase["drafted"]:
        shares = (f"{a / d:.0%}" if d else "-" for a, d in zip(phase["accepted"], phase["drafted"], strict=True))
        yield f"  drafts accepted, by position: {' '.join(shares)}"
    yield ("     s  steps  tokens/s  running        waiting  fewest free pages  preempted  graphs  "
           "allocated  reserved  device   host MB")  # fmt: skip
    for s in phase["samples"]:
        memory, running = s["memory"], f"{s['min_running']}-{s['mean_running']:.1f}-{s['max_running']}"
        free = f"{s['min_free_full']}, {s['min_free_sliding']}"
        yield (f"{s['at_s']:6.0f} {s['num_steps']:6} {s['tokens_per_s']:9.1f}  {running:14} {s['max_waiting']:7}  "
               f"{free:17}  {s['num_preemptions']:9}  {s['num_graphs']:6} {memory['allocated']:10.0f} "
               f"{memory['reserved']:9.0f} {memory['device']:7.0f} {memory['host']:9.0f}")  # fmt: skip
    if phase["growth_mb"]:
        grown = ", ".join(f"{kind} {mb:+.1f}" for kind, mb in phase["growth_mb"].items())
        yield f"  most memory of the second half against the first, MB: {grown}"


def _check_lines(check: dict[str, Any]) -> Iterator[str]:
    different = check["different"]
    yield (f"{check['phase']}, greedy answers asked again alone: {check['equal']} equal ({check['preempted_equal']} of "
           f"them preempted), {len(different)} different, {check['unchecked']} unchecked; sampled: "
           f"{check['sampled_equal']} equal, {len(check['sampled_different'])} different, "
           f"{check['sampled_unchecked']} unchecked; {check['distinct']:.1f} tokens of one answer are distinct"
           )  # fmt: skip
    for d in different[:SHOWN_DIFFERENCES]:
        preempted = f", preempted {d['num_preemptions']} times" if d["num_preemptions"] else ""
        yield (f"  request {d['number']} ({d['num_prompt_tokens']} prompt tokens{preempted}): token {d['index']} of "
               f"{d['num_tokens']} is {d['together']}, alone {d['alone']}")  # fmt: skip
    if len(different) > SHOWN_DIFFERENCES:
        yield f"  and {len(different) - SHOWN_DIFFERENCES} more; --json has all"
