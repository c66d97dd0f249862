"""`kerngen compile`: the machine code of a whole workload, or of kernels' test cases, in the cache or in one folder."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerngen.arch import Target, find_device, parse_arches
from kerngen.cli.keeping_options import keeping_options
from kerngen.cli.model_options import draft_option, engine_option, tensor_parallel_option
from kerngen.cli.signing import signers, signing_options
from kerngen.cli.tables import echo
from kerngen.compiler.compile import Cubin
from kerngen.errors import CacheError, UsageError
from kerngen.runtime.config import AS_STORED, KEEPING_OPTIONS, Keeping
from kerngen.system.cores import usable_cores
from kerngen.system.files import unwritable

if TYPE_CHECKING:
    from kerngen.compiler.builds import Built
    from kerngen.runtime.selection import Choice
    from kerngen.tuning_db import Store
    from kerngen.tuning_db.dist.keys import SecretKey
    from kerngen.workload.workload import Model


@click.command("compile")
@click.option("--arch", "arch_names", default=None, help="One or more, separated by commas, or all.")
@click.option("--device", "device_names", default=None,
              help="Boards to choose for (kerngen arch ls). Default: the usual one of each arch.")  # fmt: skip
@click.option("--model", default=None, help="A model's name, folder or GGUF file: compile what its workload needs.")
@draft_option
@keeping_options
@tensor_parallel_option
@engine_option
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel; may be given several times.")
@click.option("--cases", is_flag=True, help="Compile the kernels' test cases instead of a model's workload.")
@click.option("--ptx", is_flag=True, help="Make PTX, which newer GPUs run through the driver, instead of cubins.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=None,
              help="Of a model: the bundle to write, one sealed file, which run, bench and doctor take with --bundle. "
              "Else: a folder, as a compile cache. Without it only the user's compile cache is filled.")  # fmt: skip
@click.option("--db", "db_url", default=None, help="Tuning database whose winners to compile. Default: the user's.")
@click.option("--untuned", is_flag=True, help="Compile the default configurations.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
@signing_options
@click.option("--json", "as_json", is_flag=True, help="Print what was made as JSON.")
def compile(
    arch_names: str | None,
    device_names: str | None,
    model: str | None,
    draft: str | None,
    kept: Keeping,
    tensor_parallel: int,
    engine: str,
    kernels: tuple[str, ...],
    cases: bool,
    ptx: bool,
    output: Path | None,
    db_url: str | None,
    untuned: bool,
    jobs: int | None,
    key_files: tuple[Path, ...],
    unsigned: bool,
    as_json: bool,
) -> None:
    """Build every kernel of a model's workload, so that nothing is compiled when it runs. No GPU is needed.

    Uses the tuning database's winners, with the machine code that it stores, and default configurations where it has
    none. Exit code 1 if a build fails.

    \b
    Example:
      kerngen compile --arch sm70,sm90 --model gemma-4-31b -o bundle.kgdb
    """
    from kerngen.bundles.build import require_free, write_bundle
    from kerngen.compiler.builds import CASES, build_all, case_builds, models_builds, require_allowed
    from kerngen.compiler.cache import CompileCache
    from kerngen.compiler.compile import nvrtc_version, require_target
    from kerngen.system.progress import Reporter
    from kerngen.tuning_db import stores_for
    from kerngen.workload.workload import find_model

    if model is not None and cases:
        raise UsageError("--model and --cases are two things to compile", hint="give one of them")
    if model is None and not cases:
        raise UsageError("name what to compile: --model NAME for a workload, or --cases for the test cases")
    if cases and (draft is not None or kept != AS_STORED):
        raise UsageError(
            f"{', '.join(('--draft', *KEEPING_OPTIONS))} go with --model NAME: test cases have none of them"
        )
    is_bundle = output is not None and model is not None and not ptx
    if (key_files or unsigned) and not is_bundle:
        raise UsageError("--key and --unsigned go with a bundle: --model NAME -o FILE")
    targets = targets_of(arch_names, device_names)
    names = [n for k in kernels for n in k.split(",")]
    for target in targets:
        require_target(target.arch)
    notes: list[str] = []
    chosen: list[Choice] = []
    cache = CompileCache()
    stores: list[Store] = []
    models: list[Model] = []
    if cases and (tensor_parallel > 1 or engine != "kerngen"):
        raise UsageError("--tensor-parallel and --engine go with --model NAME: test cases are of no model")
    if cases:
        builds = [b for target in targets for b in case_builds(target, names, notes)]
    else:
        stores = [] if untuned else stores_for(db_url or None, targets, own=True)
        models = [rank.on(engine) for rank in find_model(str(model), draft, kept).ranks(tensor_parallel)]
        builds = models_builds(models, targets, stores, notes, chosen, names)
    require_allowed(builds, cache, ptx=ptx, what=CASES if cases else f"--model {model}")
    keys: list[SecretKey] = []
    if output is not None and is_bundle:
        require_free(output)
        keys = signers(key_files, unsigned)
    elif output is not None:
        _make(output)
    with Reporter("compile", quiet=as_json) as bar:
        built = build_all(builds, cache, jobs or usable_cores(), bar, ptx=ptx)
        if output is not None:
            try:
                if not is_bundle:
                    _write_images(output, built)
                else:
                    anew = partial(models_builds, models, targets, notes=[], chosen=[], kernels=names)
                    built += write_bundle(output, [str(model)], targets, (stores, chosen, built), anew,
                                          partial(build_all, cache=cache, jobs=jobs or usable_cores(), bar=bar),
                                          keys)  # fmt: skip
            except OSError as e:
                raise unwritable(output, e) from e
    if output is None and cache.failed:
        raise CacheError(f"nothing was kept: the compile cache {cache.dir} does not take files",
                         hint="name a folder with -o, or another cache with KERNGEN_CACHE_DIR")  # fmt: skip
    report = {
        "nvrtc": list(nvrtc_version()), "kind": "ptx" if ptx else "cubin", "model": model,
        "targets": [[t.arch.name, t.device.name] for t in targets],
        "builds": [_row(b) for b in built if b.image is not None], "notes": list(dict.fromkeys(notes)),
        "failures": [{"kernel": b.build.kernel.name, "arch": b.build.target.arch.name, "reason": b.made}
                     for b in built if b.image is None],
    }  # fmt: skip
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print(report, output, is_bundle=is_bundle)
    if report["failures"]:
        raise click.exceptions.Exit(1)


def targets_of(arch_names: str | None, device_names: str | None) -> list[Target]:
    """The named boards, and the usual one of each arch that has no named one. Raises UsageError, UnknownName."""
    boards = [find_device(n.strip()) for n in (device_names or "").split(",") if n.strip()]
    if arch_names is None:
        if not boards:
            raise UsageError("name what to compile for: --arch sm70 (or all), or --device V100")
        return [Target.of(b) for b in boards]
    arches = parse_arches(arch_names)
    for board in boards:
        if board.arch not in {a.name for a in arches}:
            raise UsageError(f"device {board} is {board.arch}, not {', '.join(a.name for a in arches)}")
    named = {b.arch for b in boards}
    return [Target.of(b) for b in boards] + [Target.of(a) for a in arches if a.name not in named]


def _make(folder: Path) -> None:
    if folder.is_file():
        raise UsageError(f"'{folder}' is a file, and a compile cache is a folder", hint="name another place with -o")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise unwritable(folder, e) from e


def _write_images(folder: Path, built: list[Built]) -> None:
    """What no database keeps into `folder`, as a compile cache. Raises OSError."""
    from kerngen.compiler.cache import CompileCache

    cache = CompileCache(folder)
    for b in built:
        if b.image is not None and b.image is not b.build.stored:
            cache.write(b.image)


def _row(built: Built) -> dict[str, Any]:
    from kerngen.compiler.compile import source_key
    from kerngen.templates.kernel import fields_of, static_fields

    b, image = built.build, built.image
    target = b.target.arch.nvrtc_target if isinstance(image, Cubin) else b.target.arch.ptx_target
    row = {
        "kernel": b.kernel.name, "arch": b.target.arch.name, "device": b.target.device.name,
        "key": image.key if image is not None else None, "source_key": source_key(b.source, target),
        "bytes": len(image.image) if image is not None else 0, "config": fields_of(b.config),
        "static": static_fields(b.problem), "serves": b.serves, "chosen_by": dict(b.origins), "code_from": built.made,
    }  # fmt: skip
    if isinstance(image, Cubin):
        row["entries"] = {entry: asdict(r) for entry, r in image.entries.items()}
    return row


def _print(made: dict[str, Any], output: Path | None, *, is_bundle: bool) -> None:
    from kerngen.runtime.selection import DEFAULT

    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in made["builds"]:
        groups.setdefault((row["arch"], row["device"], row["kernel"]), []).append(row)
    for (_, device, kernel), rows in sorted(groups.items()):
        tuned = sum(set(r["chosen_by"]) != {DEFAULT} for r in rows)
        spills = sum(any(e["spill_store_bytes"] for e in r.get("entries", {}).values()) for r in rows)
        text = (
            f"{device:8} {kernel:16} {len(rows):4} builds, {sum(r['bytes'] for r in rows) / 1e6:6.2f} MB, {tuned} tuned"
        )
        echo(f"{text}, {spills} with spills" if spills else text)
    for source, count in sum((Counter(r["chosen_by"]) for r in made["builds"]), Counter()).most_common():
        echo(f"{count:6} problems run what was chosen by: {source}")
    for note in made["notes"]:
        echo(f"note: {note}")
    failures: dict[tuple[str, str], list[str]] = {}  # one fault fails many sources, on every arch: it is said once
    for failure in made["failures"]:
        reason = re.sub(r"^NVRTC rejected the source for \w+: ", "", failure["reason"])
        failures.setdefault((failure["kernel"], reason), []).append(failure["arch"])
    for (kernel, reason), arches in failures.items():
        sources = f"{len(arches)} source{'s' * (len(arches) > 1)}"
        echo(f"failed: {kernel} on {', '.join(dict.fromkeys(arches))} ({sources}): {reason}")
    code = Counter(r["code_from"] for r in made["builds"])
    if not made["builds"]:
        echo("nothing was built")
        return
    echo(f"{len(made['builds'])} builds: " + ", ".join(f"{n} from: {where}" for where, n in code.most_common()))
    if output is None:
        echo("in the compile cache only (-o FILE makes a bundle to take elsewhere)")
    elif is_bundle and made["failures"]:
        echo(f"{output} was not written: it would lack what failed")
    elif is_bundle:
        echo(f"{output} is a bundle: kerngen run MODEL --bundle {output}, or export KERNGEN_BUNDLE={output}")
    else:
        echo(f"{output} is a compile cache: KERNGEN_CACHE_DIR={output}")
