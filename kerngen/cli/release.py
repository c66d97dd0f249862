"""`kerngen release`: for each architecture one sealed file with all machine code of all released models."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerngen.arch import Target
from kerngen.cli.signing import signers, signing_options
from kerngen.cli.tables import echo
from kerngen.errors import UsageError
from kerngen.system.cores import usable_cores

if TYPE_CHECKING:
    from kerngen.compiler.cache import CompileCache
    from kerngen.system.progress import Reporter
    from kerngen.tuning_db.dist.keys import SecretKey
    from kerngen.workload.workload import Model


@click.command()
@click.option("-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Where kerngen-ARCH.kgdb go; what is there by these names is replaced.")  # fmt: skip
@click.option("--arch", "arch_names", default=None, help="Only these arches: sm70,sm90. Default: all.")
@click.option("--device", "devices", multiple=True, help="Only these boards (tuning_db/prebuilt). Default: all.")
@click.option("--model", "models", multiple=True, help="Only these models. Default: all released ones.")
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel; may be given several times.")
@click.option("--db", "db_url", default=None, metavar="FILE|URL",
              help="The database whose winners to take. Default: all that a run looks in.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
@signing_options
@click.option("--json", "as_json", is_flag=True, help="Print what was made as JSON.")
def release(
    output: Path, arch_names: str | None, devices: tuple[str, ...], models: tuple[str, ...],
    kernels: tuple[str, ...], db_url: str | None, jobs: int | None, key_files: tuple[Path, ...], unsigned: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Make a bundle of each architecture, with the machine code of all that the released models run on its boards.

    Each is what `kerngen compile -o` writes, of several models and boards at once, sealed and signed. No GPU is needed.
    Exit code 1 if a build fails, whose bundle is not written.

    \b
    Example:
      kerngen release -o dist --arch sm90 --model gemma-4-31b
    """
    from kerngen.bundles.build import require_free
    from kerngen.compiler.cache import CompileCache
    from kerngen.compiler.compile import require_target
    from kerngen.system.progress import Reporter
    from kerngen.tuning_db.read.sealed import SUFFIX
    from kerngen.workload.workload import MODELS, find_model

    targets = _targets(arch_names, devices)
    by_arch: dict[str, list[Target]] = {}
    for target in targets:
        require_target(target.arch)
        by_arch.setdefault(target.arch.name, []).append(target)
    named = [m for model in models for m in model.split(",")] or list(MODELS)
    only = [k for kernel in kernels for k in kernel.split(",")]
    found = [find_model(model) for model in named]
    keys = signers(key_files, unsigned)
    files = {arch: output / f"kerngen-{arch}{SUFFIX}" for arch in by_arch}
    for file in files.values():
        require_free(file)
    made = []
    with Reporter("release", quiet=as_json) as bar:
        for arch, boards in by_arch.items():
            job = _Job(files[arch], boards, found, only, db_url, jobs or usable_cores(), keys)
            made.append(_release(job, CompileCache(), bar))
            if not as_json:
                _print(made[-1])
    if as_json:
        click.echo(json.dumps({"models": named, "bundles": made}))
    if any(m["failures"] for m in made):
        raise click.exceptions.Exit(1)


def _targets(arch_names: str | None, devices: Sequence[str]) -> list[Target]:
    """The boards that kerngen is shipped with winners of, as far as they are wanted. Raises UsageError, UnknownName."""
    from kerngen.arch import find_device, parse_arches
    from kerngen.tuning_db.read.boards import shipped_boards

    if devices:
        targets = [Target.of(find_device(name)) for named in devices for name in named.split(",")]
    else:  # the profile of each board, whichever the one was that measured
        targets = [Target.of(find_device(b.name)) for b in shipped_boards()]
    wanted = {a.name for a in parse_arches(arch_names or "all")}
    found = [t for t in targets if t.arch.name in wanted]
    if not found:
        named = ", ".join(sorted(wanted))
        raise UsageError(f"no board of {named} is among {', '.join(t.device.name for t in targets) or 'none'}",
                         hint="name boards with --device, as kerngen arch ls has them")  # fmt: skip
    return sorted(found, key=lambda t: (t.arch.cc, t.device.name))


@dataclass(frozen=True, slots=True)
class _Job:
    out: Path
    targets: list[Target]
    models: list[Model]
    kernels: list[str]
    db_url: str | None
    jobs: int
    keys: list[SecretKey]


def _release(job: _Job, cache: CompileCache, bar: Reporter) -> dict[str, Any]:
    from kerngen.bundles.build import is_whole, write_bundle
    from kerngen.compiler.builds import build_all, models_builds, require_allowed
    from kerngen.runtime.selection import Choice
    from kerngen.tuning_db import stores_for
    from kerngen.tuning_db.read.sealed import Sealed

    notes: list[str] = []
    chosen: list[Choice] = []
    stores = stores_for(job.db_url, job.targets, own=True)
    try:
        builds = models_builds(job.models, job.targets, stores, notes, chosen, job.kernels)
        require_allowed(builds, cache)
        built = build_all(builds, cache, job.jobs, bar)
        anew = partial(models_builds, job.models, job.targets, notes=[], chosen=[], kernels=job.kernels)
        built += write_bundle(job.out, [m.name for m in job.models], job.targets, (stores, chosen, built), anew,
                              partial(build_all, cache=cache, jobs=job.jobs, bar=bar), job.keys)  # fmt: skip
    finally:
        for store in stores:
            store.close()
    of_file: dict[str, Any] = {"bytes": 0, "digest": None, "signed_by": [], "winners": {}}
    if is_whole(built):
        sealed = Sealed.open(job.out)
        of_file = {"bytes": job.out.stat().st_size, "digest": sealed.digest, "signed_by": list(sealed.signatures),
                   "winners": sealed.header["contents"]["winners"]}  # fmt: skip
    origins: Counter[str] = sum((b.build.origins for b in built), Counter())
    return {
        "file": str(job.out), **of_file, "arch": job.targets[0].arch.name,
        "boards": [t.device.name for t in job.targets], "builds": sum(b.image is not None for b in built),
        "image_bytes": sum(len(b.image.image) for b in built if b.image is not None),
        "chosen_by": dict(origins.most_common()),
        "notes": list(dict.fromkeys(notes)),
        "failures": [{"kernel": b.build.kernel.name, "reason": b.made} for b in built if b.image is None],
    }  # fmt: skip


def _print(made: dict[str, Any]) -> None:
    for failure in made["failures"]:
        echo(f"failed: {failure['kernel']}: {failure['reason']}", err=True)
    if made["failures"]:
        echo(f"{made['file']} was not written: it would lack what failed", err=True)
        return
    winners = ", ".join(f"{count} {how}" for how, count in made["winners"].items()) or "no"
    echo(f"{made['file']}: {made['bytes'] / 1e6:.1f} MB for {', '.join(made['boards'])}: {made['builds']} builds "
               f"({made['image_bytes'] / 1e6:.1f} MB of machine code), {winners} winners")  # fmt: skip
    signed = f"signed by {', '.join(made['signed_by'])}" if made["signed_by"] else "not signed"
    echo(f"  digest {made['digest']}, {signed}")
