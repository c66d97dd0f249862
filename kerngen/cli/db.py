"""`kerngen db`: look into the tuning database."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from kerngen.cli.db_keys import keygen, trust
from kerngen.cli.db_report import report
from kerngen.cli.db_studies import studies

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kerngen.tuning_db import Build, Observation, ProblemKey, Store, Winner

ID_CHARS = 12
_PIPED_WIDTH = 200  # where there is no terminal to measure


@click.group()
def db() -> None:
    """Look into the tuning database: what won, with what resources, and why.

    \b
    Example:
      kerngen db ls --arch sm90
    """


db.add_command(keygen)
db.add_command(trust)
db.add_command(report)
db.add_command(studies)


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)
    help = "The database to read. Default: all that a run looks in (override, user's, prebuilt)."
    return click.option("--db", "url", default=None, metavar="FILE|URL", help=help)(command)


def _one_winner(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.argument("subject", metavar="ID|KERNEL"),
        click.option("--problem", "fields", default="", metavar="FIELD=VALUE,...",
                     help="With a KERNEL: the problem; fields not named keep their defaults."),
        click.option("--arch", "arch_name", default=None, help="With a KERNEL: the arch, such as sm90."),
        click.option("--device", "device_name", default=None,
                     help="With a KERNEL: the device profile. Default: the arch's usual one."),
    ):  # fmt: skip
        command = option(command)
    return _options(command)


@db.command()
@click.option("--kernel", "kernel_name", default=None, help="Only this kernel.")
@click.option("--arch", "arch_names", default=None, help="Only these arches: sm70,sm90.")
@click.option("--device", "device_name", default=None, help="Only this device.")
@_options
def ls(
    kernel_name: str | None, arch_names: str | None, device_name: str | None, url: str | None, as_json: bool
) -> None:
    """List the winners by kernel, arch and device.

    Example: kerngen db ls --kernel w4a16_gemm --arch sm90
    """
    from kerngen.arch import parse_arches
    from kerngen.errors import UnknownName

    arches = None if arch_names is None else {a.name for a in parse_arches(arch_names)}
    with _stores(url) as stores:
        known = {w.kernel for store in stores for w in store.winners()}
        if kernel_name is not None and kernel_name not in known:
            from kerngen.templates import kernel_names

            if kernel_name not in kernel_names():
                raise UnknownName("kernel", kernel_name, sorted(known | set(kernel_names())))
        found = [
            (store, w)
            for store in stores
            for w in store.winners(kernel_name, device=device_name)
            if arches is None or w.arch.name in arches
        ]
        if as_json:
            _echo_json([_winner_json(store, w) for store, w in found])
            return
        if not found:
            wanted = [f"of {kernel_name}"] if kernel_name else []
            wanted += [f"on {', '.join(sorted(arches))}"] if arches else []
            wanted += [f"for device {device_name}"] if device_name else []
            _say_empty(stores, url, " ".join(["no winners", *wanted]), _filling(kernel_name, arches))
            return
        _print_winners(found)


@db.command()
@_one_winner
def show(
    subject: str,
    fields: str,
    arch_name: str | None,
    device_name: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Show one winner: configuration, resources, and everything observed of it at that tuned point.

    Example: kerngen db show w4a16_gemm --problem n=5376,k=21504,num_tokens=1 --arch sm90
    """
    with _stores(url) as stores:
        store, winner = _find(stores, subject, fields, arch_name, device_name)
        build = store.build(winner.build_id)
        rows = [o for o in _observed(store, winner) if o.measurement.build_id == build.id]
        if as_json:
            observed = [_observation_json(o) for o in rows]
            _echo_json(_winner_json(store, winner) | {"build": asdict(build), "measurements": observed})
            return
        console = _console()
        _print_head(console, store, winner)
        _print_build(console, store, build)
        table = _table(
            "observed", "outcome", "how", ">p50 us", ">p10-p90", ">min", ">samples", ">error", "when", "reason"
        )
        for o in rows:
            m = o.measurement
            table.add_row(
                m.outcome, _how(o), _us(m.p50_us), _range(m.p10_us, m.p90_us), _us(m.min_us), str(m.samples or ""),
                "" if m.error_abs is None else f"{m.error_abs:.2e}", m.at[:19], m.reason,
            )  # fmt: skip
        console.print(table)


@db.command()
@click.option(
    "--top", type=click.IntRange(min=1), default=8, show_default=True, help="How many of the configurations to list."
)
@_one_winner
def explain(
    subject: str,
    fields: str,
    arch_name: str | None,
    device_name: str | None,
    url: str | None,
    as_json: bool,
    top: int,
) -> None:
    """Say why a configuration won, what else was near, and what was refused, and how often.

    Example: kerngen db explain w4a16_gemm --problem n=5376,k=8192 --arch sm90
    """
    from kerngen.tuning_db.keep.winners import rank

    with _stores(url) as stores:
        store, winner = _find(stores, subject, fields, arch_name, device_name)
        rows = _observed(store, winner)
        key = winner.problem.static_key
        builds, wrong, revoked = store.builds(key), store.wrong_sources(key), store.revoked()
        ranked = rank(rows, builds, wrong_sources=wrong, revoked=revoked.keys())
        default_us = winner.why.get("default_us")
        near: list[dict[str, Any]] = [
            {
                "config": c.build.config,
                "us": c.p50_us,
                "relative": c.p50_us / winner.latency_us,
                "registers": c.build.registers,
                "spill_bytes": c.build.spill_bytes,
                "static_smem_bytes": c.build.static_smem_bytes,
                "is_winner": c.build.id == winner.build_id,
            }
            for c in ranked[:top]
        ]
        refused = list(_refused(rows, wrong, revoked, builds))
        if as_json:
            _echo_json(_winner_json(store, winner) | {"near": near, "refused": refused})
            return
        console = _console()
        _print_head(console, store, winner)
        names = sorted({n for c in near for n in c["config"] if c["config"].get(n) != winner.config.get(n)})
        resources = (">registers", ">spills", ">static smem", "")
        table = _table("what else was near", ">us", ">of the winner", *names, *resources)
        for c in near:
            mark = "winner" if c["is_winner"] else "default" if c["us"] == default_us else ""
            table.add_row(
                _us(c["us"]), f"{c['relative']:.3f}", *(str(c["config"].get(n, "")) for n in names),
                str(c["registers"]), str(c["spill_bytes"] or ""), f"{c['static_smem_bytes']:,}", mark,
            )  # fmt: skip
        console.print(table)
        if len(ranked) > top:
            console.print(f"and {len(ranked) - top} slower")
        if refused:
            table = _table("what was refused", ">times", "outcome", "for example")
            for r in refused:
                table.add_row(str(r["times"]), r["outcome"], r["example"])
            console.print(table)


# ---- finding


@contextmanager
def _stores(url: str | None) -> Iterator[list[Store]]:
    """What `--db` names, or all that a run looks in. Read-only."""
    from kerngen.tuning_db import stores_for

    with ExitStack() as stack:
        stores = stores_for(url)
        for store in stores:
            stack.enter_context(store)
        yield stores


def _filling(kernel_name: str | None, arches: set[str] | None) -> str:
    """The command that would have found something."""
    command = f"kerngen tune --arch {min(arches) if arches else 'ARCH'} --model NAME"
    return command + (f" --kernel {kernel_name}" if kernel_name else "")


def _say_empty(stores: Sequence[Store], url: str | None, what: str, fix: str) -> None:
    from kerngen.tuning_db import default_path

    place = url or default_path()
    is_there = "://" in place or os.path.exists(place)
    where = ", ".join(s.where for s in stores) or (place if is_there else f"{place} (not there yet)")
    click.echo(f"{what} in {where}\n  fill it: {fix}", err=True)


def _find(
    stores: Sequence[Store], subject: str, fields: str, arch_name: str | None, device_name: str | None
) -> tuple[Store, Winner]:
    """The winner that `subject` means: an id's beginning, or a kernel whose problem is looked up as a run would.

    Raises UsageError or UnknownName where it means nothing, TuningMiss where nothing serves the problem.
    """
    from kerngen.arch import Target, find_arch, find_device
    from kerngen.errors import TuningMiss, UsageError
    from kerngen.templates import find_kernel, kernel_names
    from kerngen.templates.kernel import describe, fields_of, parse_fields
    from kerngen.tuning_db import lookup

    if subject not in kernel_names():
        if not re.fullmatch(r"[0-9a-f]{4,64}", subject):
            find_kernel(subject)  # raises, naming the known ones
        errors = []
        for store in stores:
            try:
                return store, store.winner(subject)
            except UsageError as e:
                errors.append(e)
        if errors:
            raise errors[0]
        raise UsageError(f"no winner with id {subject}", hint="list them: kerngen db ls")
    kernel = find_kernel(subject)
    if arch_name is None:
        tuned = sorted({w.arch.name for s in stores for w in s.winners(subject)})
        if len(tuned) != 1:
            raise UsageError(f"--arch is needed: {subject} has winners for {', '.join(tuned) or 'no arch'}")
        arch_name = tuned[0]
    arch = find_arch(arch_name)
    target = Target.of(find_device(device_name) if device_name is not None else arch)
    problem = parse_fields(kernel.problem_type, fields)
    try:
        winner = lookup(stores, kernel, problem, target, strict=True)
    except TuningMiss:
        # Perhaps what was named is enough to mean one winner, and only the other fields' defaults miss it.
        named = {n: getattr(problem, n) for n in (p.partition("=")[0].strip() for p in fields.split(",")) if n}
        meant = [
            (s, w)
            for s in stores
            for w in s.winners(subject, arch=arch, device=device_name)
            if named.items() <= _fields(w.problem).items()
        ]
        if len(meant) == 1:
            return meant[0]
        if meant and len(named) < len(fields_of(problem)):
            differing = {
                n for _, w in meant for n, v in _fields(w.problem).items() if v != _fields(meant[0][1].problem)[n]
            }
            raise UsageError(
                f"{len(meant)} winners of {subject} on {arch} fit, and none serves {describe(problem)}",
                hint=f"name more of {', '.join(sorted(differing))} with --problem, or take an id from: kerngen db ls",
            ) from None
        raise
    if winner is None:
        raise UsageError(f"no winner serves {subject}")
    return next(s for s in stores if winner.source.startswith(f"{s.name}: ")), winner


def _observed(store: Store, winner: Winner) -> list[Observation]:
    return store.measurements(winner.kernel, problem=winner.problem, arch=winner.arch, device=winner.device)


def _refused(
    rows: Iterable[Observation], wrong: set[str], revoked: dict[str, str], builds: dict[str, Build]
) -> Iterator[dict[str, Any]]:
    """Kinds of refusal, the commonest first. Reasons that differ in their numbers alone are one kind."""
    kinds: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for o in rows:
        m = o.measurement
        build = builds.get(m.build_id or "")
        outcome, reason = m.outcome, m.reason
        if outcome == "ok" and (why := revoked.get(o.id) or revoked.get(m.build_id or "")):
            outcome, reason = "revoked", why
        elif outcome == "ok" and build is not None and build.source_sha in wrong:
            outcome, reason = "wrong_result", "the same source gave a wrong result at another point or device"
        if outcome == "ok":
            continue
        first = reason.splitlines()[0] if reason else ""
        kind = (outcome, re.sub(r"\d[\d,.]*", "#", first))
        kinds[kind] += 1
        examples.setdefault(kind, first)
    for kind, times in kinds.most_common():
        yield {"outcome": kind[0], "times": times, "example": examples[kind]}


# ---- printing


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=_PIPED_WIDTH)
    return console


def _table(title: str, *columns: str) -> Table:
    """A column whose name begins with ">" is set to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return table


def _print_winners(found: list[tuple[Store, Winner]]) -> None:
    """One table for each kernel, arch and device: what all its rows share is in the title."""
    console = _console()

    def group(row: tuple[Store, Winner]) -> tuple[str, str, str, str]:
        return (row[1].kernel, row[1].arch.name, row[1].device.name, row[0].name)

    for (kernel, arch, device, name), members in groupby(sorted(found, key=group), key=group):
        winners = [w for _, w in members]
        flat = [_fields(w.problem) for w in winners]
        shared = {n: v for n, v in flat[0].items() if all(f.get(n, _ABSENT) == v for f in flat)}
        varying = [n for n in dict.fromkeys(n for f in flat for n in f) if n not in shared]
        title = f"{kernel} on {arch} ({device}) in {name}" + (f": {_pairs(shared)}" if shared else "")
        table = _table(title, "id", *varying, "configuration", ">us", "provenance", ">ahead by")
        for w, f in zip(winners, flat, strict=True):
            table.add_row(
                w.id[:ID_CHARS], *(str(f.get(n, "")) for n in varying), _pairs(w.config), _us(w.latency_us),
                w.provenance + (" (stale)" if w.stale else ""), "" if w.margin is None else f"{w.margin:.1%}",
            )  # fmt: skip
        console.print(table)


_ABSENT = object()


def _print_head(console: Console, store: Store, w: Winner) -> None:
    console.print(f"{w.kernel}[{_pairs(_fields(w.problem))}] on {w.arch} ({w.device})", style="bold")
    console.print(f"  winner      {w.id[:ID_CHARS]} in {store.where}")
    if w.source != store.where:
        console.print(f"  answered    {w.source}")
    console.print(f"  config      {_pairs(w.config)}")
    where = "for" if w.provenance == "predicted" else "on"
    console.print(f"  latency     {w.latency_us:.2f} us, {w.provenance} {where} {w.device}")
    console.print(f"  why         {w.reason}")


def _print_build(console: Console, store: Store, build: Build) -> None:
    image = store.image(build)
    size = "not kept; compiled when needed" if image is None else f"{len(image.image):,} B"
    major, minor = build.nvrtc
    options = " ".join(build.options)
    console.print(f"  build       {build.id[:ID_CHARS]}: NVRTC {major}.{minor} for {build.target}, {options}")
    console.print(f"  source      sha256 {build.source_sha[:ID_CHARS]}")
    console.print(f"  image       {size}")
    table = _table("resources", "entry", ">registers", ">spill stores", ">spill loads", ">stack", ">static smem")
    for name, r in build.entries.items():
        table.add_row(name, str(r.registers), str(r.spill_store_bytes), str(r.spill_load_bytes), str(r.stack_bytes),
                      f"{r.static_smem_bytes:,}")  # fmt: skip
    console.print(table)


def _fields(key: ProblemKey) -> dict[str, Any]:
    """The problem as it is filed: compiled-in fields, bucketed fields, then the dynamic one under its own name."""
    flat = {**key.static, **key.runtime}
    if key.dynamic is not None:
        flat[_dynamic_name(key.kernel)] = key.dynamic
    return flat


def _dynamic_name(kernel: str) -> str:
    from kerngen.templates import find_kernel, kernel_names

    return str(find_kernel(kernel).problem_type.DYNAMIC) if kernel in kernel_names() else "dynamic"


def _pairs(values: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in values.items())


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _range(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.2f}-{high:.2f}"


def _how(o: Observation) -> str:
    m = o.measurement
    return f"{m.provenance} ({m.model})" if m.provenance == "predicted" else f"{m.provenance}, {m.stage}"


# ---- JSON


def _echo_json(value: Any) -> None:
    """JSON has no infinity and no NaN: they become null."""

    def finite(v: Any) -> Any:
        if isinstance(v, float) and not math.isfinite(v):
            return None
        if isinstance(v, dict):
            return {k: finite(x) for k, x in v.items()}
        return [finite(x) for x in v] if isinstance(v, (list, tuple)) else v

    click.echo(json.dumps(finite(value), indent=1))


def _winner_json(store: Store, w: Winner) -> dict[str, Any]:
    return {
        "id": w.id,
        "store": store.where,
        "kernel": w.kernel,
        "problem": _fields(w.problem),
        "arch": w.arch.name,
        "device": w.device.name,
        "config": w.config,
        "latency_us": w.latency_us,
        "provenance": w.provenance,
        "margin": w.margin,
        "stale": w.stale,
        "reason": w.reason,
        "why": w.why,
        "build_id": w.build_id,
    }


def _observation_json(o: Observation) -> dict[str, Any]:
    m = o.measurement
    return {"id": o.id} | asdict(m) | {"problem": _fields(m.problem), "device": m.device.name}
