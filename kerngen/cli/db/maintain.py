"""Databases that are kept in order: `kerngen db diff`, `stats`, `revoke`, `rm` and `gc`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kerngen.cli.db.common import (
    ID_CHARS,
    boards_for,
    changing,
    echo_json,
    known_kernels,
    micros,
    pairs,
    reading,
    require_known,
)
from kerngen.cli.db.inspect import find, one_winner
from kerngen.cli.tables import Table, echo, new_console, say
from kerngen.cli.utf8 import require_utf8
from kerngen.errors import UsageError

if TYPE_CHECKING:
    from kerngen.tuning_db.dist.diff import Change
    from kerngen.tuning_db.store.prune import Pruned


def _own(command: Callable[..., Any]) -> Callable[..., Any]:
    """Of commands that change a database."""
    command = click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")(command)
    command = click.option("--dry-run", is_flag=True, help="Say what that would do, and do nothing.")(command)
    help = "The database to change. Default: the user's. What is sealed or shipped is never changed."
    return click.option("--db", "url", default=None, metavar="FILE|URL", help=help)(command)


@click.command()
@click.argument("before", metavar="OLD")
@click.argument("after", metavar="NEW")
@click.option("--arch", "arch_names", default=None, help="Only these arches: sm70,sm90.")
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel's; may be given several times.")
@click.option("--allow-unsigned", is_flag=True, help="Read sealed files that nobody signed who is trusted here.")
@click.option("--json", "as_json", is_flag=True, help="Print all changes as JSON.")
def diff(
    before: str, after: str, arch_names: str | None, kernels: tuple[str, ...], allow_unsigned: bool, as_json: bool
) -> None:
    """Say at which points two databases (files, or URLs) have other winners: configuration, time, provenance.

    A time is compared with another only if both were measured, or both predicted.

    Example: kerngen db diff old.kgdb sm90.kgdb
    """
    from kerngen.arch import parse_arches
    from kerngen.errors import UnknownName
    from kerngen.tuning_db.dist.diff import diff as compare
    from kerngen.tuning_db.store.bundles import open_any

    arches = None if arch_names is None else {a.name for a in parse_arches(arch_names)}
    names = {n for k in kernels for n in k.split(",")}
    sides, known = [], set[str]()
    for url in (before, after):
        with open_any(url, allow_unsigned=allow_unsigned) as store:
            known |= known_kernels([store])
            sides.append([w for w in store.winners() if (arches is None or w.arch.name in arches)
                          and (not names or w.kernel in names)])  # fmt: skip
    for name in sorted(names - known):
        raise UnknownName("kernel", name, sorted(known))
    changes, same = compare(*sides)
    if as_json:
        echo_json({"same": same, "changes": [_change_json(c) for c in changes]})
        return
    groups: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        groups.setdefault((change.here.kernel, change.here.device.name), []).append(change)
    console = new_console()
    for (kernel, board), members in groups.items():
        table = Table(f"{kernel} on {board}", "", "problem", ">old us", ">new us", ">%", "provenance", "configuration")
        for c in members:
            a, b = c.before, c.after
            configs = [pairs(w.config) for w in (a, b) if w is not None]
            table.add_row(
                c.kind, pairs(c.here.problem.flat), "" if a is None else micros(a.latency_us),
                "" if b is None else micros(b.latency_us), "" if c.percent is None else f"{c.percent:+.1f}",
                c.provenance, " -> ".join(dict.fromkeys(configs)),
            )  # fmt: skip
        console.print(table)
    kinds = {kind: sum(c.kind == kind for c in changes) for kind in ("new", "gone", "config", "time")}
    told = {"new": "new", "gone": "gone", "config": "with another configuration", "time": "with another time"}
    counts = ", ".join(f"{count} {told[kind]}" for kind, count in kinds.items() if count)
    say(f"{same} points are the same" + (f"; {counts}" if counts else ""))


def _change_json(c: Change) -> dict[str, Any]:
    sides = {
        name: None if w is None else {"id": w.id, "config": w.config, "latency_us": w.latency_us,
                                      "provenance": w.provenance, "stale": w.stale}
        for name, w in (("before", c.before), ("after", c.after))
    }  # fmt: skip
    w = c.here
    return {"kind": c.kind, "kernel": w.kernel, "arch": w.arch.name, "device": w.device.name,
            "problem": w.problem.flat, "percent": c.percent, **sides}  # fmt: skip


@click.command()
@click.option("--db", "url", default=None, metavar="FILE|URL",
              help="The database to read. Default: all that a run looks in.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(url: str | None, as_json: bool) -> None:
    """Say how much databases hold: trials by kernel and board, their outcomes, winners, machine code.

    Example: kerngen db stats
    """
    from kerngen.tuning_db.store.stats import stats as count

    with reading(url) as stores:
        found = [count(store) for store in stores]
    if as_json:
        echo_json(found)
        return
    console = new_console()
    for told in found:
        rows = told["rows"]
        columns = ("kernel", "arch", "device", "provenance", ">winners", ">ok", "other outcomes")
        table = Table(f"{told['store']}: schema {told['schema']}", *columns)
        for t in told["trials"]:
            others = ", ".join(f"{n} {outcome}" for outcome, n in t["outcomes"].items() if outcome != "ok")
            table.add_row(t["kernel"], t["arch"], t["device"], t["provenance"], str(t["winners"]),
                          str(t["outcomes"].get("ok", 0)), others)  # fmt: skip
        console.print(table)
        last = f", the last on {told['last'][:10]}" if told["last"] else ""
        say(f"{rows['winner']:,} winners, {rows['measurement']:,} trials of {rows['build']:,} builds in "
            f"{told['runs']} measured runs{last}; {rows['revocation']:,} revocations, "
            f"{rows['artifact']:,} images ({told['image_bytes'] / 1e6:.2f} MB)")  # fmt: skip
    if not found:
        echo("no database: kerngen tune fills one")


@click.command()
@click.option("--reason", required=True, help="Why, for whoever asks `db explain`.")
@one_winner
def revoke(
    subject: str, fields: str, arch_name: str | None, device_name: str | None, url: str | None, as_json: bool,
    reason: str,
) -> None:  # fmt: skip
    """Say that a winner's build, or the build or trial with an ID, must not count any more, wherever it came from.

    It is noted in the user's database (--db: in another), where every run looks. Nothing is deleted, and it goes along
    when databases are merged.

    Example: kerngen db revoke rmsnorm --problem num_tokens=64,hidden=5376 --arch sm90 --reason "wrong on driver 580"
    """
    from kerngen.tuning_db import Store, default_path
    from kerngen.tuning_db.store.rederive import choose_everywhere, static_keys_of

    require_utf8("the reason", reason)
    what, id = _subject(subject, fields, arch_name, device_name)
    with Store.open(url or default_path()) as store:
        where = store.where
        store.revoke(id, reason)
        changed = choose_everywhere(store, static_keys_of(store, [id]))
    if as_json:
        echo_json({"revoked": id, "what": what, "reason": reason, "store": where, "winners": changed})
        return
    echo(f"{what} {id[:ID_CHARS]} is revoked: {reason}")
    echo(f"noted in {where}; {changed} tuned points there have another winner now")


def _subject(subject: str, fields: str, arch_name: str | None, device_name: str | None) -> tuple[str, str]:
    """(what it is, its whole id) of what is to be revoked. Raises UsageError, TuningMiss."""
    with reading(None, boards_for(arch_name, [device_name])) as stores:
        if re.fullmatch(r"[0-9a-f]{8,64}", subject):
            found = {(kind, id) for store in stores for kind, id in store.named(subject)}
            if len(found) > 1:
                raise UsageError(f"{len(found)} builds and trials begin with {subject}", hint="give more of the id")
            if found:
                return found.pop()
        _, winner = find(stores, subject, fields, arch_name, device_name)
        return "build", winner.build_id


@click.command()
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel's; may be given several times.")
@click.option("--arch", "arch_names", default=None, help="Only these arches': sm70,sm90.")
@click.option("--device", "devices", multiple=True, help="Only this board's; may be given several times.")
@_own
def rm(
    kernels: tuple[str, ...], arch_names: str | None, devices: tuple[str, ...], url: str | None, dry_run: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Forget what was tuned, in a database of your own. To have a result not count, and say why: kerngen db revoke.

    Example: kerngen db rm --kernel rmsnorm --arch sm90 --dry-run
    """
    from kerngen.arch import parse_arches
    from kerngen.boards import DEVICES
    from kerngen.errors import UnknownName
    from kerngen.tuning_db.store.prune import rm as forget

    arches = [a.name for a in parse_arches(arch_names)] if arch_names is not None else []
    names = [n for k in kernels for n in k.split(",")]
    if not (names or arches or devices):
        raise UsageError("name what to forget: --kernel, --arch or --device", hint="everything: delete the file")
    with changing(url) as store:
        require_known(names, [store])
        if unknown := set(devices) - set(DEVICES):
            boards = {o.measurement.device.name for o in store.measurements()}
            for device in sorted(unknown - boards):
                raise UnknownName("device", device, [*DEVICES, *sorted(boards - set(DEVICES))])
        done = forget(store, kernels=names, arches=arches, devices=devices, dry_run=dry_run)
        _tell(done, store.where, dry_run, as_json)


@click.command()
@_own
def gc(url: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove machine code that is no winner's, in a database of your own: no observation goes.

    Example: kerngen db gc
    """
    from kerngen.tuning_db.store.prune import gc as collect

    with changing(url) as store:
        _tell(collect(store, dry_run=dry_run), store.where, dry_run, as_json)


def _tell(done: Pruned, where: str, dry_run: bool, as_json: bool) -> None:
    if as_json:
        echo_json({"store": where, "dry_run": dry_run, "removed": dict(done.removed), "image_bytes": done.image_bytes})
        return
    what = ", ".join(f"{count:,} of {table}" for table, count in done.removed.items()) or "nothing"
    size = f" ({done.image_bytes / 1e6:.2f} MB of machine code)" if done.image_bytes else ""
    echo(f"{where} {'would lose' if dry_run else 'lost'} {what}{size}")
