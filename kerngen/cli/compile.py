"""`kerngen compile`: the machine code of a whole workload, or of kernels' test cases, in one folder."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerngen.arch import Arch, Target, parse_arches
from kerngen.errors import CacheError, CompileError, KerngenError, UsageError

if TYPE_CHECKING:
    from kerngen.cache import CompileCache
    from kerngen.compile import Cubin, Ptx
    from kerngen.templates.kernel import Kernel
    from kerngen.tuning_db import Store


@dataclass(slots=True)
class _Unit:
    """One source to compile, and what it serves: problems of a workload or names of cases."""

    kernel: str
    arch: Arch
    config: dict[str, Any]
    static: dict[str, Any]
    source: str
    origin: str  # where the configuration came from
    serves: list[Any] = field(default_factory=list)
    stored: Cubin | None = None  # its machine code, where the database that answered keeps it


@click.command("compile")
@click.option("--arch", "arch_names", required=True, help="One or more, separated by commas, or all.")
@click.option("--model", default=None, help="A model's name or folder: compile what its workload needs.")
@click.option("--draft", default=None, help="Folder of the assistant, where --model is a folder.")
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel; may be given several times.")
@click.option("--cases", is_flag=True, help="Compile the kernels' test cases instead of a model's workload.")
@click.option("--ptx", is_flag=True, help="Write PTX, which newer GPUs run through the driver, instead of cubins.")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), default=None,
              help="Folder for the files and manifest.json. Without it only the compile cache is filled.")  # fmt: skip
@click.option("--db", "db_url", default=None, help="Tuning database whose winners to compile. Default: the user's.")
@click.option("--untuned", is_flag=True, help="Compile the default configurations.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
def compile(
    arch_names: str,
    model: str | None,
    draft: str | None,
    kernels: tuple[str, ...],
    cases: bool,
    ptx: bool,
    output: Path | None,
    db_url: str | None,
    untuned: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Write every cubin of a model's workload, with a manifest. No GPU is needed.

    Uses the tuning database's winners, and default configurations where it has none.

    \b
    Example:
      kerngen compile --arch sm70,sm90 --model gemma-4-31b -o cubins
    """
    from kerngen.cache import CompileCache
    from kerngen.compile import nvrtc_version, require_target

    if model is not None and cases:
        raise UsageError("--model and --cases are two things to compile", hint="give one of them")
    if model is None and not cases:
        raise UsageError("name what to compile: --model NAME for a workload, or --cases for the test cases")
    arches = parse_arches(arch_names)
    names = [n for k in kernels for n in k.split(",")]
    for arch in arches:
        require_target(arch)
    notes: list[str] = []
    if cases:
        units = list(_case_units(arches, names, notes))
    else:
        from kerngen.tuning_db import stores_for

        stores = [] if untuned else stores_for(db_url or None)
        units = list(_workload_units(str(model), draft, arches, names, stores, notes))
    cache = CompileCache()
    files, failures = _build(units, ptx, jobs or os.cpu_count() or 1, cache, output, as_json)
    manifest = {
        "manifest": 1, "nvrtc": list(nvrtc_version()), "kind": "ptx" if ptx else "cubin", "model": model,
        "arches": [a.name for a in arches], "files": files, "notes": notes, "failures": failures,
    }  # fmt: skip
    if output is None and cache.failed:
        raise CacheError(f"nothing was kept: the compile cache {cache.dir} does not take files",
                         hint="name a folder with -o, or another cache with KERNGEN_CACHE_DIR")  # fmt: skip
    if output is not None:
        _write(output / "manifest.json", json.dumps(manifest, indent=1).encode())
    if as_json:
        click.echo(json.dumps(manifest))
    else:
        _print(manifest, output)
    if failures:
        raise click.exceptions.Exit(1)


def _case_units(arches: Iterable[Arch], names: list[str], notes: list[str]) -> Iterator[_Unit]:
    """The default configuration of every test case on every arch that supports it, each source once."""
    from kerngen.templates import find_kernel, kernel_names

    unsupported: Counter[str] = Counter()
    for arch in arches:
        for kernel in map(find_kernel, names or kernel_names()):
            units: dict[str, _Unit] = {}
            for case in kernel.cases.CASES:
                if (why := kernel.why_unsupported(case.problem, Target.of(arch))) is not None:
                    unsupported[f"{kernel.name} on {arch}: {why}"] += 1
                    continue
                config = kernel.default_config(case.problem, Target.of(arch))
                _unit(units, kernel, case.problem, config, arch, "default configuration").serves.append(case.name)
            yield from units.values()
    notes += [f"{text} ({count} cases)" for text, count in unsupported.items()]


def _workload_units(
    model: str, draft: str | None, arches: Iterable[Arch], names: list[str], stores: list[Store], notes: list[str]
) -> Iterator[_Unit]:
    from kerngen.runtime.binding import Bindings
    from kerngen.templates import find_kernel
    from kerngen.templates.kernel import fields_of
    from kerngen.workload import find_model, workload

    found = find_model(model, draft)
    for arch in arches:
        load, target = workload(found, arch), Target.of(arch)
        if names:
            load = load.only(names)
        notes += [f"{arch}: no kernel yet for {name}" for name in load.missing]
        units: dict[str, _Unit] = {}
        bindings = Bindings(stores, target)
        for item in load.items:
            kernel = find_kernel(item.kernel)
            if (why := kernel.why_unsupported(item.problem, target)) is not None:
                notes.append(f"{kernel.name} for {item.where} on {arch}: {why}")
                continue
            choice = bindings.choice(kernel, item.problem)
            unit = _unit(units, kernel, item.problem, choice.config, arch, choice.source)
            unit.stored = unit.stored or choice.cubin
            runtime = {k: v for k, v in fields_of(item.problem).items() if k in item.problem.RUNTIME}
            unit.serves.append(runtime)
        yield from units.values()


def _unit(units: dict[str, _Unit], kernel: Kernel, problem: Any, config: Any, arch: Arch, origin: str) -> _Unit:
    from kerngen.render import render
    from kerngen.templates.kernel import fields_of, static_fields

    source = render(kernel, problem, config, Target.of(arch))
    fresh = _Unit(kernel.name, arch, fields_of(config), static_fields(problem), source, origin)
    return units.setdefault(source, fresh)


def _build(
    units: list[_Unit], ptx: bool, jobs: int, cache: CompileCache, output: Path | None, quiet: bool
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Compile all units through the cache; the manifest's rows, and what failed."""
    from kerngen.cache import CachedCompiler
    from kerngen.progress import Reporter

    files: list[dict[str, Any]] = []
    failures: list[dict[str, str]] = []
    with (
        CachedCompiler(jobs, cache) as compiler,
        ThreadPoolExecutor(jobs) as threads,
        Reporter("compile", quiet=quiet) as bar,
    ):
        futures: list[Future[Any]] = []
        for unit in units:
            if ptx:
                futures.append(threads.submit(cache.get_or_compile_ptx, unit.source, unit.arch))
            elif unit.stored is not None:
                futures.append(Future())
                futures[-1].set_result(unit.stored)
            else:
                futures.append(compiler.submit(unit.source, unit.arch))
        try:
            for i, (unit, future) in enumerate(zip(units, futures, strict=True)):
                bar.update(i, len(units), f"{unit.kernel} on {unit.arch}")
                try:
                    image = future.result()
                except CompileError as e:
                    failures.append({"kernel": unit.kernel, "arch": unit.arch.name, "reason": e.message})
                    continue
                files.append(_row(unit, image, output))
        finally:
            threads.shutdown(cancel_futures=True)
    return files, failures


def _row(unit: _Unit, image: Cubin | Ptx, output: Path | None) -> dict[str, Any]:
    """The image's row in the manifest; its file is written if there is a folder."""
    from kerngen.compile import Cubin, source_key

    kind, target = ("cubin", unit.arch.nvrtc_target) if isinstance(image, Cubin) else ("ptx", unit.arch.ptx_target)
    name = f"{unit.arch}/{unit.kernel}-{image.key[:16]}.{kind}"
    if output is not None:
        _write(output / name, image.image)
    row = {
        "file": name, "key": image.key, "source_key": source_key(unit.source, target), "kernel": unit.kernel,
        "arch": unit.arch.name, "bytes": len(image.image), "config": unit.config, "static": unit.static,
        "serves": unit.serves, "origin": unit.origin,
    }  # fmt: skip
    if isinstance(image, Cubin):
        row["entries"] = {entry: asdict(r) for entry, r in image.entries.items()}
    return row


def _write(path: Path, data: bytes) -> None:
    from kerngen.files import publish

    try:
        publish(data, path)
    except OSError as e:
        raise KerngenError(f"cannot write {path}: {e.strerror or e}", hint="name another folder with -o") from e


def _print(manifest: dict[str, Any], output: Path | None) -> None:
    counts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in manifest["files"]:
        counts.setdefault((row["arch"], row["kernel"]), []).append(row)
    for (arch, kernel), rows in sorted(counts.items()):
        tuned = sum(r["origin"] != "default configuration" for r in rows)
        spills = sum(any(e["spill_store_bytes"] for e in r.get("entries", {}).values()) for r in rows)
        text = f"{arch:6} {kernel:16} {len(rows):4} files, {sum(r['bytes'] for r in rows) / 1e6:6.2f} MB, {tuned} tuned"
        click.echo(f"{text}, {spills} with spills" if spills else text)
    for note in dict.fromkeys(manifest["notes"]):
        click.echo(f"note: {note}")
    failures: dict[tuple[str, str], list[str]] = {}  # one fault fails many sources, on every arch: it is said once
    for failure in manifest["failures"]:
        reason = re.sub(r"^NVRTC rejected the source for \w+: ", "", failure["reason"])
        failures.setdefault((failure["kernel"], reason), []).append(failure["arch"])
    for (kernel, reason), arches in failures.items():
        sources = f"{len(arches)} source{'s' * (len(arches) > 1)}"
        click.echo(f"failed: {kernel} on {', '.join(dict.fromkeys(arches))} ({sources}): {reason}")
    where = "in the compile cache only (name a folder with -o)" if output is None else f"in {output}"
    click.echo(f"{len(manifest['files'])} files {where}")
