"""What is in the tuning database: `kerngen db ls`, `show` and `explain`."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from kerngen.cli.db.common import (
    ID_CHARS,
    boards_for,
    echo_json,
    interval,
    micros,
    pairs,
    reading,
    reading_options,
    require_known,
)
from kerngen.cli.tables import Table, echo, new_console, say
from kerngen.system.urls import without_password

if TYPE_CHECKING:
    from rich.console import Console

    from kerngen.tuning_db import Build, Observation, Store, Winner


def one_winner(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.argument("subject", metavar="ID|KERNEL"),
        click.option("--problem", "fields", default="", metavar="FIELD=VALUE,...",
                     help="With a KERNEL: the problem; fields not named keep their defaults."),
        click.option("--arch", "arch_name", default=None, help="With a KERNEL: the arch, such as sm90."),
        click.option("--device", "device_name", default=None,
                     help="With a KERNEL: the device profile. Default: the arch's usual one."),
    ):  # fmt: skip
        command = option(command)
    return reading_options(command)


@click.command()
@click.option("--kernel", "kernel_name", default=None, help="Only this kernel.")
@click.option("--arch", "arch_names", default=None, help="Only these arches: sm70,sm90.")
@click.option("--device", "device_name", default=None, help="Only this device.")
@click.option("-v", "--verbose", is_flag=True, help="List every winner, with its id and its configuration.")
@reading_options
def ls(
    kernel_name: str | None, arch_names: str | None, device_name: str | None, verbose: bool, url: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Count the winners by kernel, arch and device, and say what they gain over the defaults; or list them.

    Example: kerngen db ls --kernel attn_prefill --arch sm90
    """
    from kerngen.arch import parse_arches

    arches = None if arch_names is None else {a.name for a in parse_arches(arch_names)}
    if device_name is not None:  # bytes that are no UTF-8 name no board, and no database can be asked for them
        device_name = device_name.encode(errors="backslashreplace").decode()
    with reading(url, boards_for(arch_names, [device_name])) as stores:
        require_known([kernel_name] if kernel_name is not None else [], stores)
        found = [
            (store, w)
            for store in stores
            for w in store.winners(kernel_name, device=device_name)
            if arches is None or w.arch.name in arches
        ]
        if as_json:
            echo_json([_winner_json(store, w) for store, w in found])
            return
        if not found:
            wanted = [f"of {kernel_name}"] if kernel_name else []
            wanted += [f"on {', '.join(sorted(arches))}"] if arches else []
            wanted += [f"for device {device_name}"] if device_name else []
            _say_empty(stores, url, " ".join(["no winners", *wanted]), _filling(kernel_name, arches))
            return
        if verbose:
            _print_winners(found)
        else:
            _print_summary(found)


@click.command()
@one_winner
def show(
    subject: str,
    fields: str,
    arch_name: str | None,
    device_name: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Show one winner: configuration, resources, and everything observed of it at that tuned point.

    Example: kerngen db show add_norm --problem has_scalar=true,num_tokens=32 --arch sm90
    """
    with reading(url, boards_for(arch_name, [device_name])) as stores:
        store, winner = find(stores, subject, fields, arch_name, device_name)
        build = store.build(winner.build_id)
        code = build.config, build.target, build.image_sha
        alike = store.builds(winner.problem.static_key).values()  # what was measured of one holds for all
        same = {b.id for b in alike if (b.config, b.target, b.image_sha) == code}
        rows = [o for o in _observed(store, winner) if o.measurement.build_id in same]
        if as_json:
            observed = [_observation_json(o) for o in rows]
            echo_json(_winner_json(store, winner) | {"build": asdict(build), "measurements": observed})
            return
        console = new_console()
        _print_head(console, store, winner)
        _print_build(console, store, build)
        table = Table(
            "observed", "outcome", "how", ">p50 us", ">p10-p90", ">min", ">samples", ">error", "when", "reason"
        )
        for o in rows:
            m = o.measurement
            table.add_row(
                m.outcome, _how(o), micros(m.p50_us), interval(m.p10_us, m.p90_us), micros(m.min_us),
                str(m.samples or ""), "" if m.error_abs is None else f"{m.error_abs:.2e}", m.at[:19], m.reason,
            )  # fmt: skip
        console.print(table)


@click.command()
@click.option(
    "--top", type=click.IntRange(min=1), default=8, show_default=True, help="How many of the configurations to list."
)
@one_winner
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

    Example: kerngen db explain add_norm --problem has_scalar=true,num_tokens=8 --arch sm90
    """
    from kerngen.tuning_db.store.winners import rank

    with reading(url, boards_for(arch_name, [device_name])) as stores:
        store, winner = find(stores, subject, fields, arch_name, device_name)
        rows = _observed(store, winner)
        key = winner.problem.static_key
        builds, wrong, revoked = store.builds(key), store.wrong_sources(key), store.revoked()
        steps = store.steps()
        weights = {id: step.weight for id, step in steps.items()}
        ranked = rank(rows, builds, wrong_sources=wrong, revoked=revoked.keys(), weights=weights)
        default_us = winner.why.get("default_us")
        near: list[dict[str, Any]] = [
            {
                "config": c.build.config,
                "us": c.p50_us,
                "relative": None if c.p50_us is None or winner.latency_us is None else c.p50_us / winner.latency_us,
                "step": c.step,
                "lost_in_step": c.has_lost,
                "registers": c.build.registers,
                "spill_bytes": c.build.spill_bytes,
                "static_smem_bytes": c.build.static_smem_bytes,
                "is_winner": any(b.id == winner.build_id for b in c.builds),
            }
            for c in ranked[:top]
        ]
        refused = list(_refused(rows, wrong, revoked, builds))
        if as_json:
            in_step = [
                {
                    "step": steps[m.step_id].name,
                    "config": m.config,
                    "step_us": m.step_us,
                    "base_step_us": m.base_step_us,
                }
                for m in (o.measurement for o in rows)
                if m.stage == "step" and m.step_id in steps
            ]
            echo_json(_winner_json(store, winner) | {"near": near, "in_step": in_step, "refused": refused})
            return
        console = new_console()
        _print_head(console, store, winner)
        names = sorted({n for c in near for n in c["config"] if c["config"].get(n) != winner.config.get(n)})
        resources = (">registers", ">spills", ">static smem", "")
        both = [">us alone", ">the steps"] if any(c["step"] for c in near) else [">us"]
        table = Table("what else was near", *both, ">of the winner", *names, *resources)
        for c in near:
            is_default = c["us"] is not None and c["us"] == default_us
            mark = "winner" if c["is_winner"] else "default" if is_default else ""
            step = [] if len(both) == 1 else ["not tried" if c["step"] is None else f"{c['step'] - 1:+.2%}"]
            table.add_row(
                micros(c["us"]), *step, "" if c["relative"] is None else f"{c['relative']:.3f}",
                *(str(c["config"].get(n, "")) for n in names),
                str(c["registers"]), str(c["spill_bytes"] or ""), f"{c['static_smem_bytes']:,}", mark,
            )  # fmt: skip
        console.print(table)
        if len(ranked) > top:
            console.print(f"and {len(ranked) - top} slower")
        if refused:
            table = Table("what was refused", ">times", "outcome", "for example")
            for r in refused:
                table.add_row(str(r["times"]), r["outcome"], r["example"])
            console.print(table)


# ---- finding


def _filling(kernel_name: str | None, arches: set[str] | None) -> str:
    """The command that would have found something."""
    command = f"kerngen tune --arch {min(arches) if arches else 'ARCH'} --model NAME"
    return command + (f" --kernel {kernel_name}" if kernel_name else "")


def _say_empty(stores: Sequence[Store], url: str | None, what: str, fix: str) -> None:
    from kerngen.tuning_db import default_path

    place = without_password(url or default_path())
    is_there = "://" in place or os.path.exists(place)
    where = ", ".join(s.where for s in stores) or (place if is_there else f"{place} (not there yet)")
    echo(f"{what} in {where}\n  fill it: {fix}", err=True)


def find(
    stores: Sequence[Store], subject: str, fields: str, arch_name: str | None, device_name: str | None
) -> tuple[Store, Winner]:
    """The winner that `subject` means: an id's beginning, or a kernel whose problem is looked up as a run would.

    Raises UsageError or UnknownName where it means nothing, TuningMiss where nothing serves the problem.
    """
    from kerngen.arch import Target, find_arch, find_device
    from kerngen.errors import TuningMiss, UsageError
    from kerngen.runtime.selection import Selector
    from kerngen.templates import find_kernel, kernel_names
    from kerngen.templates.kernel import describe, fields_of, parse_fields, parse_problem
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
        raise UsageError(f"no winner with id {subject}", hint="list them: kerngen db ls -v")
    kernel = find_kernel(subject)
    if arch_name is None:
        tuned = sorted({w.arch.name for s in stores for w in s.winners(subject)})
        if len(tuned) != 1:
            parse_fields(kernel.problem_type, fields)  # what is wrong on any arch is the clearer complaint
            raise UsageError(f"--arch is needed: {subject} has winners for {', '.join(tuned) or 'no arch'}")
        arch_name = tuned[0]
    arch = find_arch(arch_name)
    problem = parse_problem(kernel.problem_type, fields, arch)
    target = Target.of(find_device(device_name) if device_name is not None else arch)
    try:
        winner = lookup(stores, kernel, problem, target, strict=True)
    except TuningMiss as e:
        # Perhaps what was named is enough to mean one winner, and only the other fields' defaults miss it.
        named = {n: getattr(problem, n) for n in (p.partition("=")[0].strip() for p in fields.split(",")) if n}
        meant = [
            (s, w)
            for s in stores
            for w in s.winners(subject, arch=arch, device=device_name)
            if named.items() <= w.problem.flat.items()
        ]
        if len(meant) == 1:
            return meant[0]
        if meant and len(named) < len(fields_of(problem)):
            first, *others = [w.problem.flat for _, w in meant]
            differing = {n for other in others for n, v in other.items() if v != first[n]}
            raise UsageError(
                f"{len(meant)} winners of {subject} on {arch} fit, and none serves {describe(problem)}",
                hint=f"name more of {', '.join(sorted(differing))} with --problem, or an id: kerngen db ls -v",
            ) from None
        if kernel.why_unsupported(problem, target) is not None:
            raise
        runs = Selector(stores, target).choice(kernel, problem)
        raise TuningMiss(f"{e.message}\n  runs: {runs.source}: {describe(runs.config)}", hint=e.hint) from None
    if winner is None:
        raise UsageError(f"no winner serves {subject}")
    store = next(s for s in stores if winner.source.startswith(f"{s.name}: "))
    winner = replace(winner, why=store.winner(winner.id).why)
    runs = Selector(stores, target).choice(kernel, problem)
    if runs.winner is None and problem.DYNAMIC:
        reason = f"{winner.reason}; at {problem.DYNAMIC}={getattr(problem, problem.DYNAMIC)} the cost model prefers: "
        winner = replace(winner, reason=f"{reason}{runs.source}, {describe(runs.config)}")
    return store, winner


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


def _print_summary(found: list[tuple[Store, Winner]]) -> None:
    """A table for each database, a row for each kernel on each device; at most 80 columns of kerngen's own names."""
    from kerngen.report.figure import geometric_mean
    from kerngen.tuning_db.read.values import PROVENANCES

    console = new_console()

    def group(row: tuple[Store, Winner]) -> tuple[str, str, str]:
        return (row[1].kernel, row[1].arch.name, row[1].device.name)

    for where, here in groupby(found, key=lambda row: (row[0].name, row[0].where)):
        rows = sorted(here, key=group)
        table = Table(f"{': '.join(dict.fromkeys(where))} ({len(rows):,} winners)", "kernel", "arch", "device",
                      *(f">{how}" for how in PROVENANCES), ">changed", ">gain", ">stale")  # fmt: skip
        for (kernel, arch, device), members in groupby(rows, key=group):
            winners = [w for _, w in members]
            known = Counter(w.provenance for w in winners)
            gains = [us / w.latency_us for w in winners if w.latency_us and (us := w.why.get("default_us"))]
            table.add_row(
                kernel, arch, device, *(str(known[how] or "") for how in PROVENANCES),
                str(sum(w.why.get("is_default") is False for w in winners) or ""),
                f"{geometric_mean(gains):.2f}x" if gains else "", str(sum(w.stale for w in winners) or ""),
            )  # fmt: skip
        console.print(table)
    say("changed: winners that are not the default configuration; gain: the default's time over the winner's, the "
        "geometric mean where both are known. kerngen db ls -v lists every winner.", 0)  # fmt: skip


def _print_winners(found: list[tuple[Store, Winner]]) -> None:
    """One table for each kernel, arch and device: what all its rows share is in the title."""
    console = new_console()

    def group(row: tuple[Store, Winner]) -> tuple[str, str, str, str]:
        return (row[1].kernel, row[1].arch.name, row[1].device.name, row[0].name)

    for (kernel, arch, device, name), members in groupby(sorted(found, key=group), key=group):
        winners = [w for _, w in members]
        flat = [w.problem.flat for w in winners]
        shared = {n: v for n, v in flat[0].items() if all(f.get(n, _ABSENT) == v for f in flat)}
        varying = [n for n in dict.fromkeys(n for f in flat for n in f) if n not in shared]
        title = f"{kernel} on {arch} ({device}) in {name}" + (f": {pairs(shared)}" if shared else "")
        table = Table(title, "id", *varying, "configuration", ">us", "provenance", ">ahead by")
        for w, f in zip(winners, flat, strict=True):
            table.add_row(
                w.id[:ID_CHARS], *(str(f.get(n, "")) for n in varying), pairs(w.config), micros(w.latency_us),
                w.provenance + (" (stale)" if w.stale else ""), "" if w.margin is None else f"{w.margin:.1%}",
            )  # fmt: skip
        console.print(table)


_ABSENT = object()


def _print_head(console: Console, store: Store, w: Winner) -> None:
    console.print(f"{w.kernel}[{pairs(w.problem.flat)}] on {w.arch} ({w.device})", style="bold")
    console.print(f"  winner      {w.id[:ID_CHARS]} in {store.where}")
    if w.source != store.where:
        console.print(f"  answered    {w.source}")
    console.print(f"  config      {pairs(w.config)}")
    where = "for" if w.provenance == "predicted" else "on"
    us = "no time" if w.latency_us is None else f"{w.latency_us:.2f} us"
    console.print(f"  latency     {us}, {w.provenance} {where} {w.device}")
    console.print(f"  why         {w.reason}")


def _print_build(console: Console, store: Store, build: Build) -> None:
    image = store.image(build)
    size = "not kept; compiled when needed" if image is None else f"{len(image.image):,} B"
    by = "NVRTC {}.{}".format(*build.nvrtc) if any(build.nvrtc) else "not compiled"
    options = " ".join(build.options)
    console.print(f"  build       {build.id[:ID_CHARS]}: {by} for {build.target}, {options}")
    console.print(f"  source      sha256 {build.source_sha[:ID_CHARS]}")
    console.print(f"  image       {size}")
    table = Table("resources", "entry", ">registers", ">spill stores", ">spill loads", ">stack", ">static smem")
    for name, r in build.entries.items():
        table.add_row(name, str(r.registers), str(r.spill_store_bytes), str(r.spill_load_bytes), str(r.stack_bytes),
                      f"{r.static_smem_bytes:,}")  # fmt: skip
    console.print(table)


def _how(o: Observation) -> str:
    m = o.measurement
    told = {"measured": f"measured, {m.stage}", "predicted": f"predicted ({m.model})"}
    return told.get(m.provenance, m.provenance)


# ---- JSON


def _winner_json(store: Store, w: Winner) -> dict[str, Any]:
    return {
        "id": w.id,
        "store": store.where,
        "kernel": w.kernel,
        "problem": w.problem.flat,
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
    return {"id": o.id} | asdict(m) | {"problem": m.problem.flat, "device": m.device.name}
