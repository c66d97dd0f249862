"""`kerngen bench`: times against this GPU's own limits, measured in the same run, or against each other's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from kerngen.cli.bench_ab import ab
from kerngen.cli.bench_page import RunPage, page_options
from kerngen.cli.bench_serve import serve
from kerngen.cli.keeping_options import density_lines, keeping_options
from kerngen.cli.model_options import draft_option, tensor_parallel_option
from kerngen.cli.soak import bench_soak
from kerngen.cli.step_options import step_of, step_options
from kerngen.cli.tables import Table, fitted, new_console, say
from kerngen.runtime.config import ASSISTANT, Keeping, in_int4
from kerngen.system.cores import usable_cores
from kerngen.system.urls import without_password

if TYPE_CHECKING:
    from kerngen.system.progress import Reporter
    from kerngen.timing.measure import Ceilings
    from kerngen.timing.step_profile import Profile


@click.group()
def bench() -> None:
    """Time kernels or a model's steps against this GPU's limits or another database, or a server under load."""


bench.add_command(ab)
bench.add_command(serve)
bench.add_command(bench_soak)


@bench.command()
@click.argument("names", nargs=-1)
@click.option("--case", "case_filter", default="", help="Only cases whose name contains this.")
@click.option("--problem", "problems", multiple=True, metavar="FIELD=VALUE,...",
              help="Of the one kernel named, in place of its bench cases; may be given several times.")  # fmt: skip
@click.option("--db", "db_url", default=None, help="Tuning database whose winners to time. Default: the user's.")
@click.option("--bundle", default=None, help="File that `kerngen compile -o` made. Default: $KERNGEN_BUNDLE.")
@click.option("--untuned", is_flag=True, help="Time the default configurations.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
@click.option("--device", default=None, help="cuda or cuda:N. Default: the first GPU.")
@page_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def kernel(
    names: tuple[str, ...], case_filter: str, problems: tuple[str, ...], db_url: str | None, bundle: str | None,
    untuned: bool, jobs: int | None, device: str | None, page: Path | None, against: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Time kernels' bench cases, with their baselines. All kernels if none is named. Exit code 1 if a case fails.

    What is not built yet is compiled first, and a line is printed as soon as its case is timed. Peers are among the
    baselines where they are at hand: vLLM's products, if it is installed. --problem n=8192,k=2816,num_tokens=48
    times that one of w4a16_gemm.

    Example: kerngen bench kernel attn_decode w4a16_gemm
    """
    from kerngen.bundles.bundle import sources_for
    from kerngen.compiler.cache import CompileCache
    from kerngen.errors import UsageError
    from kerngen.runtime.backend import use_gpu
    from kerngen.runtime.launcher import Launcher
    from kerngen.system.progress import Reporter
    from kerngen.templates import find_kernel, kernel_names
    from kerngen.timing.measure import bench_row, ceilings, load_peers

    kernels = [find_kernel(n) for n in names or kernel_names()]
    if problems and (len(names) != 1 or case_filter):
        raise UsageError("--problem is of one kernel, in place of its cases",
                         hint="name it, without --case: kerngen bench kernel KERNEL --problem ...")  # fmt: skip
    load_peers()
    if untuned and (db_url or bundle):
        raise UsageError("--untuned times the defaults: no database is asked", hint="leave out --db and --bundle")
    cases = [(k, c) for k in kernels for c in k.bench_cases(case_filter, problems)]
    if not cases:
        raise UsageError(f"no bench case contains {case_filter!r}")
    made = RunPage("kernel", page, against)
    index = use_gpu(device)
    sources, cache, shipped = ([], CompileCache(), None) if untuned else sources_for(db_url, bundle)
    launcher = Launcher(sources, cache, index=index)
    if shipped is not None:
        shipped.require(launcher.target.arch)
    with Reporter("bench", quiet=as_json) as bar:
        launcher.build([[(k, case.problem) for k, case in cases]], jobs or usable_cores(), bar.update)
        limit, rows = ceilings(), []
        if not as_json:
            _print_head(limit, bar)
        for i, (k, case) in enumerate(cases):
            bar.update(i, len(cases), f"{k.name} {case.name}")
            rows.append(bench_row(launcher, k, case))
            if not as_json:
                bar.print(_row_lines(rows[-1], is_first=i == 0 or cases[i - 1][0] is not k))
    run = made.of({"environment": limit.environment, "read_gbps": limit.read_gbps, "copy_gbps": limit.copy_gbps,
                   "matmul_tflops": limit.matmul_tflops, "rows": rows})  # fmt: skip
    if as_json:
        click.echo(json.dumps(run))
    for line in () if as_json else _beside_baselines(rows):
        say(line)
    made.draw(run)
    if failed := [r for r in rows if "error" in r]:
        click.echo(f"{len(failed)} of {len(rows)} cases failed", err=True)
        raise click.exceptions.Exit(1)


def _print_head(limit: Ceilings, bar: Reporter) -> None:
    bar.print(_limits_line(limit))
    bar.print(f"{'case':34} {'us':>9} {'+-%':>5} {'GB/s':>6} {'read%':>6} {'TF/s':>6} {'mm%':>6}")


def _row_lines(r: dict[str, Any], *, is_first: bool) -> str:
    """A case's, with its kernel before the first of its cases, and what was timed beside it. +-: half of p10 to p90."""
    lines = [r["kernel"]] if is_first else []
    name = f"  {r['case']}"
    if "error" in r:
        return "\n".join([*lines, name, fitted(f"    {r['error']}")])
    if len(name) > 34:
        lines.append(name)
        name = ""
    spread = 50 * (r["p90_us"] - r["p10_us"]) / r["p50_us"]
    lines.append(f"{name:34} {r['p50_us']:9.2f} {spread:5.1f} {r['gbps']:6.0f} {100 * r['share_read']:6.1f} "
                 f"{r['tflops']:6.1f} {100 * r['share_matmul']:6.1f}")  # fmt: skip
    if beside := [f"{name} {us:.1f} us" if isinstance(us, float) else f"{name} -" for name, us in _baselines(r)]:
        lines.append(fitted(f"    beside it: {', '.join(beside)}"))
    return "\n".join(lines)


def _baselines(row: dict[str, Any]) -> Iterator[tuple[str, float | str]]:
    """(name, us or why there is none)"""
    return ((key[9:-3], us) for key, us in row.items() if key.startswith("baseline_"))


def _beside_baselines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Of each baseline that was timed on several cases: its time over ours, in the worst case and the median."""
    ratios: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        for name, us in _baselines(row):
            if isinstance(us, float):
                ratios.setdefault(name, []).append((us / row["p50_us"], f"{row['kernel']} {row['case']}"))
    for name, found in ratios.items():
        if len(found) > 1:
            least, case = min(found)
            middle = median(ratio for ratio, _ in found)
            yield f"{name} over ours: {least:.2f} at least ({case}), {middle:.2f} in the median of {len(found)}"


def _limits_line(limit: Ceilings) -> str:
    env = limit.environment
    return fitted(
        f"{env['gpu']}, driver {env['driver']}, torch {env['torch']}; measured limits of this run: "
        f"read {limit.read_gbps:.0f} GB/s, copy {limit.copy_gbps:.0f} GB/s, matmul {limit.matmul_tflops:.0f} TFLOP/s"
    )


@bench.command()
@click.argument("name")
@click.option("--context", "contexts", default="512", show_default=True, help="Prompt lengths, comma-separated.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences that decode together.")
@click.option("--tokens", default=128, show_default=True, help="Tokens to generate at each context.")
@click.option(
    "--draft",
    is_flag=False,
    flag_value=ASSISTANT,
    default=None,
    metavar="[DRAFTER]",
    help="Draft, with generated weights too: with the model's assistant, dflash, or the drafter in a folder.",
)
@keeping_options
@click.option(
    "--num-draft-tokens",
    type=click.IntRange(1),
    default=None,
    help="Verified a step. Default: 3, of dflash all of a block.",
)
@click.option(
    "--assume-acceptance",
    type=click.FloatRange(0, 1),
    default=None,
    metavar="P",
    help="Accept each draft behind accepted ones with this chance, in place of comparing tokens.",
)
@click.option("--prefill-chunk", default=8192, show_default=True, help="Prompt tokens a prefill pass.")
@click.option("--backend", type=click.Choice(["torch", "cuda", "auto"]), default="auto", show_default=True)
@click.option("--device", default=None, help="cpu, cuda or cuda:N. Default: the first GPU, else the CPU.")
@click.option("--db", "db_url", default=None, help="Tuning database. Default: the user's.")
@click.option("--bundle", default=None, help="File that `kerngen compile -o` made. Default: $KERNGEN_BUNDLE.")
@click.option("--seed", default=0, show_default=True)
@tensor_parallel_option
@click.option("-v", "--verbose", is_flag=True, help="List the configuration that each kernel ran, too.")
@page_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def model(
    name: str, contexts: str, batch: int, tokens: int, draft: str | None, kept: Keeping, num_draft_tokens: int | None,
    assume_acceptance: float | None, prefill_chunk: int, backend: str, device: str | None, db_url: str | None,
    bundle: str | None, seed: int, tensor_parallel: int, verbose: bool, page: Path | None, against: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Time prefill and decode of a model, with generated weights of its shapes.

    NAME is a released model (gemma-4-31b), a folder with a config.json or a GGUF file. No checkpoint is read. Of a
    --batch, prefill is what passes until all of it decode. Drafts of generated weights are hardly ever accepted:
    --assume-acceptance shows what a text would be worth whose drafts are.

    Example: kerngen bench model gemma-4-31b --context 512,8192
    """
    from kerngen.errors import UsageError
    from kerngen.timing.model_bench import time_model
    from kerngen.workload.workload import find_model

    try:
        lengths = [int(c) for c in contexts.split(",")]
    except ValueError:
        raise UsageError(f"--context {contexts!r} is not a list of numbers", hint="--context 512,8192") from None
    if tokens < 2 or min(lengths) < 1:
        raise UsageError("time at least 2 tokens after a context of at least 1")
    if not draft:
        stored = None if kept.drafts_as_stored else kept.draft_weights
        for option, given in (("--draft-weights", stored), ("--num-draft-tokens", num_draft_tokens),
                              ("--assume-acceptance", assume_acceptance)):  # fmt: skip
            if given is not None:
                raise UsageError(f"{option} {given} goes with --draft")
    if assume_acceptance is not None and tensor_parallel > 1:
        raise UsageError("--assume-acceptance is for one GPU: ranks would accept each its own drafts")
    found = find_model(name, None if draft == ASSISTANT else draft, kept)
    if draft and found.drafter is None:
        raise UsageError(f"no drafter goes with {name} by itself", hint="name it: --draft FOLDER")
    made = RunPage("model", page, against, {"model": found.name})
    report = time_model(
        found.name, found.target, found.drafter if draft else None, lengths, batch=batch, tokens=tokens,
        num_draft_tokens=num_draft_tokens, assumed_acceptance=assume_acceptance, prefill_chunk=prefill_chunk,
        backend=backend, device=device, db_url=db_url, bundle=bundle, seed=seed, tensor_parallel=tensor_parallel,
    )  # fmt: skip
    run = made.of(report)
    if as_json:
        click.echo(json.dumps(run))
    else:
        _print_model(report, has_drafts=draft is not None, verbose=verbose)
    made.draw(run)


def _print_model(report: dict[str, Any], *, has_drafts: bool, verbose: bool) -> None:
    """What ran, then the times."""
    from kerngen.cli.run import chosen_lines

    weights = in_int4(report["draft_weights"])
    drafter = f", the drafter's{weights}" if weights else ""
    among = f" divided among {report['tensor_parallel']} ranks" if report["tensor_parallel"] > 1 else ""
    say(f"{report['model']}{among} on {report['device']} ({report['backend']}, {report['dtype']}), generated weights"
        f"{drafter}, {report['weight_gb']:.2f} GB read a step; built in {report['build_s']:.1f} s")  # fmt: skip
    if report["read_gbps"]:
        say(f"measured read limit of this run: {report['read_gbps']:.0f} GB/s")
    for line in chosen_lines(report["configurations"], report["outside"]):
        say(line)
    if verbose:
        for row in report["rows"]:
            for line in density_lines(row["density"]):
                say(f"context {row['context']}: {line}")
        for line in report["kernels"]:
            say(f"  {line}")
    elif report["kernels"]:
        say(f"--verbose lists the {len(report['kernels'])} configurations that ran")
    new_console().print(_model_table(report["rows"], has_drafts=has_drafts))


def _model_table(rows: list[dict[str, Any]], *, has_drafts: bool) -> Table:
    """Columns that all rows have. With drafts the spread of a step's time is left out, so that a terminal has room."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "context": lambda r: str(r["context"]),
        "batch": lambda r: str(r["batch"]),
        "prefill ms": lambda r: f"{r['prefill_ms']:.1f}",
        "step ms": lambda r: f"{r['step_ms']:.3f}",
    }
    if not has_drafts:
        columns["least-most"] = lambda r: f"{r['step_ms_min']:.3f}-{r['step_ms_max']:.3f}"
    if any(r["floor_ms"] for r in rows):
        columns["floor ms"] = lambda r: f"{r['floor_ms']:.2f}"
        columns["share"] = lambda r: f"{r['floor_ms'] / r['step_ms']:.2f}"
    if has_drafts and all("draft_ms" in r for r in rows):
        columns["draft ms"] = lambda r: f"{r['draft_ms']:.3f}"
        columns["verify ms"] = lambda r: f"{r['verify_ms']:.3f}"
    if has_drafts:
        columns["tokens a step"] = lambda r: f"{r['acceptance_length']:.2f}"
        columns["tokens/s"] = lambda r: f"{1e3 * r['batch'] * r['acceptance_length'] / r['step_ms']:.1f}"
    table = Table("", *(f">{name}" for name in columns))
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


@bench.command()
@click.argument("name")
@draft_option
@keeping_options
@click.option("--db", "db_urls", multiple=True, help="Tuning database; several are compared with the first.")
@click.option("--untuned", is_flag=True, help="Compare all with the default configurations.")
@click.option("--all-steps", is_flag=True, help="Some 45 steps: 1 to 128 sequences, 2 to 8 tokens, prefills.")
@click.option("--pairs", type=click.IntRange(4), default=20, show_default=True, help="Runs of each, in turn.")
@click.option("--device", default=None, help="cuda or cuda:N. Default: the first GPU.")
@click.option("--seed", default=0, show_default=True)
@page_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def step(
    name: str, draft: str | None, kept: Keeping, db_urls: tuple[str, ...], untuned: bool, all_steps: bool,
    pairs: int, device: str | None, seed: int, page: Path | None, against: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Compare tuning databases by what the steps of a model take with their winners, run in turn on generated weights.

    NAME is a released model (gemma-4-31b), a folder with a config.json or a GGUF file. One database alone, the
    user's where none is named, is compared with the default configurations.

    Example: kerngen bench step gemma-4-31b --db a.sqlite --db b.sqlite
    """
    from kerngen.runtime.backend import use_gpu
    from kerngen.timing.measure import ceilings
    from kerngen.timing.step_compare import means, side_by_side
    from kerngen.tuning_db import sources_for
    from kerngen.workload.steps import ALL_STEPS, STEPS
    from kerngen.workload.workload import find_model

    model = find_model(name, draft, kept)
    made = RunPage("step", page, against, {"model": model.name})
    contenders = {without_password(url): sources_for(url) for url in db_urls} or {"yours": sources_for(None)}
    if untuned or len(contenders) == 1:
        contenders = {"untuned": [], **contenders}
    use_gpu(device)
    limit = ceilings()
    if not as_json:
        click.echo(_limits_line(limit))
    rows = []
    for row in side_by_side(model, contenders, pairs=pairs, seed=seed, steps=ALL_STEPS if all_steps else STEPS):
        rows.append(row)
        if not as_json:
            say(f"{row.step.name}: {row.base_us / 1e3:.3f} ms with {next(iter(contenders))}")
            for other, ratio in row.ratios.items():
                say(f"  {ratio.median:.4f} of that (+-{ratio.spread:.4f}) with {other}, which tuned "
                    f"{row.num_tuned[other]} of its {row.num_calls} problems")  # fmt: skip
    found = means(rows)
    run = made.of({
        "model": model.name, "environment": limit.environment, "read_gbps": limit.read_gbps,
        "matmul_tflops": limit.matmul_tflops, "contenders": list(contenders), "means": found,
        "steps": [asdict(row) | {"name": row.step.name} for row in rows],
    })  # fmt: skip
    if as_json:
        click.echo(json.dumps(run))
    for other, mean in () if as_json else found.items():
        say(f"all steps, by their weight: {mean:.4f} with {other}")
    made.draw(run)


@bench.command()
@click.argument("name")
@draft_option
@keeping_options
@step_options
@click.option("--db", "db_url", default=None, help="Tuning database whose winners to run. Default: the user's.")
@click.option("--untuned", is_flag=True, help="Run the default configurations.")
@click.option("--device", default=None, help="cuda or cuda:N. Default: the first GPU.")
@tensor_parallel_option
@click.option("--seed", default=0, show_default=True)
@page_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def profile(
    name: str, draft: str | None, kept: Keeping, phase: str, batch: int, context: int, tokens: int | None,
    db_url: str | None, untuned: bool, device: str | None, tensor_parallel: int, seed: int, page: Path | None,
    against: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Show where a step's time is, kernel by kernel, beside what its bytes take at the measured read rate.

    NAME is a released model (gemma-4-31b), a folder with a config.json or a GGUF file. Launches overlap: a kernel's
    time is by how much it moves the step's end. Of a divided model (--tensor-parallel) they are rank 0's; the others
    run along.

    Example: kerngen bench profile gemma-4-31b --batch 32 --context 2048
    """
    from kerngen.errors import UsageError
    from kerngen.runtime.backend import use_gpu
    from kerngen.timing.measure import ceilings
    from kerngen.timing.step_profile import profile_divided, profile_step
    from kerngen.tuning_db import sources_for
    from kerngen.workload.workload import find_model

    if untuned and db_url:
        raise UsageError("--untuned runs the defaults: no database is asked", hint="leave out --db")
    step = step_of(phase, batch, context, tokens)
    whole = find_model(name, draft, kept)
    model = whole.ranks(tensor_parallel)[0]
    made = RunPage("profile", page, against, {"model": model.name, "step": asdict(step)})
    if tensor_parallel == 1:
        use_gpu(device)
        found = profile_step(model, step, [] if untuned else sources_for(db_url), seed=seed)
    else:
        found = profile_divided(whole, step, tensor_parallel, device, db_url=db_url, untuned=untuned, seed=seed)
    limit = ceilings()
    run = made.of(asdict(found) | {"model": model.name, "environment": limit.environment,
                                   "matmul_tflops": limit.matmul_tflops})  # fmt: skip
    if as_json:
        click.echo(json.dumps(run))
    else:
        click.echo(_limits_line(limit))
        say(f"{model.name}, {step.name}: {found.step_us / 1e3:.3f} ms")
        new_console().print(_profile_table(found))
        for line in density_lines(found.density):
            say(line)
    made.draw(run)


def _profile_table(found: Profile) -> Table:
    table = Table("", "kernel", ">launches", ">us", ">of step", ">us each", ">MB", ">floor us")
    for r in found.rows:
        floor = (f"{r.bytes / 1e6:.1f}", f"{r.floor_us:.1f}") if r.bytes else ("", "")
        table.add_row(r.kernel.rpartition("::")[2], f"{r.launches:.1f}", f"{r.moved_us:.1f}",
                      f"{100 * r.moved_us / found.step_us:.1f}%", f"{r.each_us:.2f}", *floor)  # fmt: skip
    table.add_row("all", "", f"{found.step_us:.1f}", "", "", f"{sum(r.bytes for r in found.rows) / 1e6:.1f}",
                  f"{sum(r.floor_us for r in found.rows):.1f}")  # fmt: skip
    return table
