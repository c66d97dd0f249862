"""Databases that leave, and those that come: `kerngen db export`, `dump`, `build`, `import` and `merge`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerngen.cli.db.common import boards_for, echo_json, reading
from kerngen.cli.signing import signers, signing_options
from kerngen.cli.tables import echo
from kerngen.errors import DatabaseError, UsageError
from kerngen.system.cores import usable_cores
from kerngen.system.urls import without_password

if TYPE_CHECKING:
    from kerngen.tuning_db.dist.export import Selection
    from kerngen.tuning_db.store.merge import Merged

_LISTED = 20  # damaged rows and conflicts that are told one by one


def _selecting(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--arch", "arch_names", default=None, help="Only these arches: sm70,sm90."),
        click.option("--device", "devices", multiple=True, help="Only this board's; may be given several times."),
        click.option("--model", "models", multiple=True, help="Only what it needs; may be given several times."),
        click.option("--kernel", "kernels", multiple=True, help="Only this kernel's; may be given several times."),
        click.option("--db", "url", default=None, metavar="FILE|URL", help="The database to take it from. Default: all "
                     "that a run looks in (override, user's, installed, prebuilt)."),
    ):  # fmt: skip
        command = option(command)
    return command


def _selection(
    arch_names: str | None, devices: Sequence[str], models: Sequence[str], kernels: Sequence[str]
) -> Selection:
    from kerngen.arch import find_device, parse_arches
    from kerngen.templates import find_kernel
    from kerngen.tuning_db.dist.export import Selection

    arches = parse_arches(arch_names if arch_names is not None else "all")
    names = [find_kernel(n).name for k in kernels for n in k.split(",")]
    boards = [find_device(n).name for d in devices for n in d.split(",")]
    cells = {cell for model in models for arch in arches for cell in cells_of(model, arch)} if models else None
    return Selection(names or None, [a.name for a in arches] if arch_names else None, boards or None, cells)


@click.command()
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.kgdb",
              help="The file to write.")  # fmt: skip
@_selecting
@click.option("--history", is_flag=True, help="All that was observed, and not only what decided.")
@click.option("--no-images", is_flag=True, help="Without machine code: whoever runs it compiles.")
@signing_options
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def export(
    output: Path, arch_names: str | None, devices: tuple[str, ...], models: tuple[str, ...], kernels: tuple[str, ...],
    history: bool, no_images: bool, key_files: tuple[Path, ...], unsigned: bool, as_json: bool, url: str | None,
) -> None:  # fmt: skip
    """Write winners, with what they rest on and their machine code, as one sealed, signed file.

    It has no default configurations: `kerngen compile --model NAME -o FILE` adds those, so that nothing is compiled.

    Example: kerngen db export --arch sm90 --model gemma-4-31b -o sm90.kgdb
    """
    from kerngen.bundles.build import require_free
    from kerngen.tuning_db.dist.export import export as write

    selection = _selection(arch_names, devices, models, kernels)
    require_free(output)
    keys = signers(key_files, unsigned)
    with reading(url, boards_for(arch_names, devices), own=not no_images) as stores:
        done = write(stores, selection, output, history=history, images=not no_images, keys=keys, models=models)
    if as_json:
        echo_json({"file": str(output), "digest": done.digest, "bytes": done.size, "contents": done.contents,
                   "without_image": done.lacking, "signed_by": [k.public.id for k in keys],
                   "damaged": done.merged.damaged, "conflicts": done.merged.conflicts})  # fmt: skip
        return
    winners = ", ".join(f"{count} {how}" for how, count in done.contents["winners"].items())
    echo(f"{output}: {winners} winners of {len(done.contents['kernels'])} kernels for "
               f"{', '.join(board for _, board, _ in done.contents['boards'])}, {done.size / 1e6:.2f} MB")  # fmt: skip
    if done.lacking and not no_images:
        echo(f"of {done.lacking} the machine code was not kept: it is compiled where it is run")
    _tell(done.merged)
    echo(f"digest {done.digest}\n" + ("\n".join(f"signed by {k.public}" for k in keys) or "not signed"))


@click.command()
@click.option("-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Where BOARD/KERNEL.txt go; what is there by these names is replaced.")  # fmt: skip
@_selecting
@click.option("--json", "as_json", is_flag=True, help="Print the files and their sizes as JSON.")
def dump(
    output: Path, arch_names: str | None, devices: tuple[str, ...], models: tuple[str, ...], kernels: tuple[str, ...],
    url: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write winners and their rivals as text, to be read and diffed. `kerngen db build` makes a database of it.

    Example: kerngen db dump --arch sm90 --kernel rmsnorm -o text
    """
    from kerngen.system.files import publish_texts, require_place
    from kerngen.tuning_db.dist.results_folder import dump as write

    selection = _selection(arch_names, devices, models, kernels)
    require_place(output / "BOARD")
    with reading(url, boards_for(arch_names, devices)) as stores:
        files = write(stores, selection)
    if not files:
        raise UsageError("no winners to write", hint="what there is: kerngen db ls")
    sizes = {str(path): n for path, n in publish_texts({output / name: text for name, text in files.items()}).items()}
    if as_json:
        echo_json({"files": sizes})
        return
    for path, size in sizes.items():
        echo(f"{path}  {size / 1e3:.1f} kB")
    echo(f"{len(sizes)} files, {sum(sizes.values()) / 1e3:.1f} kB")


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="FILE|FOLDER...", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.kgdb",
              help="The sealed file to write.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compiler processes. Default: one a core.")
@signing_options
@click.option("--json", "as_json", is_flag=True, help="Print what was built as JSON.")
def build(
    paths: tuple[Path, ...], output: Path, jobs: int | None, key_files: tuple[Path, ...], unsigned: bool, as_json: bool
) -> None:
    """Make a sealed file of reviewed text (kerngen db dump): its sources are compiled here, without a GPU.

    Exit 1, and nothing is written, where the text contradicts itself: a point's winner has to be what its trials give.

    Example: kerngen db build text -o built.kgdb
    """
    from kerngen.bundles.build import require_free
    from kerngen.compiler.cache import CachedCompiler, CompileCache
    from kerngen.errors import DatabaseError
    from kerngen.system.progress import Reporter
    from kerngen.tuning_db.dist.export import shipment
    from kerngen.tuning_db.dist.results_folder import build as rebuild
    from kerngen.tuning_db.dist.results_folder import read

    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} is not there", hint=f"kerngen db dump -o {path} writes such a folder")
    files = read(paths)
    require_free(output)
    keys = signers(key_files, unsigned)
    with shipment() as made, Reporter("build", quiet=as_json) as bar:
        with CachedCompiler(jobs or usable_cores(), CompileCache()) as compiler:
            done = rebuild(files, made.store, compiler, bar.update)
        if done.faults:
            more = f"; and {len(done.faults) - 3} more" if len(done.faults) > 3 else ""
            raise DatabaseError("the text contradicts itself: " + "; ".join(done.faults[:3]) + more,
                                hint="write it anew: kerngen db dump")  # fmt: skip
        digest = made.seal(output, {"contents": made.contents() | {"models": []}}, keys)
    size = output.stat().st_size
    if as_json:
        echo_json({"file": str(output), "digest": digest, "bytes": size, "trials": done.trials,
                   "winners": done.winners, "stale": done.stale})  # fmt: skip
        return
    for line in done.stale[:_LISTED]:
        echo(f"left out, as its body has another revision today: {line}", err=True)
    if len(done.stale) > _LISTED:
        click.echo(f"left out: {len(done.stale) - _LISTED:,} more (--json names all)", err=True)
    echo(f"{output}: {done.winners} winners of {done.trials} trials, {size / 1e6:.2f} MB\ndigest {digest}")


def cells_of(model: str, arch: Any) -> set[str]:
    """ProblemKey.cell of all that a model needs on an arch, however its weights and its cache are kept and read, and
    whichever of its drafters drafts.
    """
    from kerngen.runtime.config import DRAFT_WEIGHTS, KV_CACHES, Keeping
    from kerngen.templates import find_kernel
    from kerngen.tuning_db import problem_key
    from kerngen.workload.workload import MODELS, drafters_of, find_model, workload

    found, drafters = find_model(model), drafters_of(model) if model in MODELS else [None]
    kinds = DRAFT_WEIGHTS if found.drafter is not None else DRAFT_WEIGHTS[:1]
    shared = any(layer.v_is_k for layer in found.target.layers)
    caches = [cache for cache in KV_CACHES if shared or cache[1] != "shared"]
    # No problem has an alpha, and what a drafter's weights are changes no prompt.
    ways = [Keeping(kind, *cache) for kind, cache in product(kinds, caches)]
    ways += [Keeping(kinds[0], *cache, sparse_prefill=0.1) for cache in caches]
    each = (find_model(model, drafter, kept) for drafter in drafters for kept in ways)
    items = [item for one in each for item in workload(one, arch).items]
    return {problem_key(find_kernel(item.kernel), item.problem).cell for item in items}


@click.command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE|URL...")
@click.option("--db", "url", default=None, metavar="FILE|URL", help="Into this database. Default: the user's.")
@click.option("--dry-run", is_flag=True, help="Say what would come in, and write nothing.")
@click.option("--allow-unsigned", is_flag=True, help="Take sealed files that nobody signed who is trusted here.")
@click.option("--json", "as_json", is_flag=True, help="Print what came in as JSON.")
def import_(files: tuple[str, ...], url: str | None, dry_run: bool, allow_unsigned: bool, as_json: bool) -> None:
    """Add what databases hold to the user's own, and choose its winners anew.

    To serve a file as it is, without mixing it with what was tuned here: kerngen db install FILE.

    Example: kerngen db import sm90.kgdb
    """
    from kerngen.tuning_db import default_path

    _merge(url or default_path(), files, dry_run, allow_unsigned, as_json)


@click.command()
@click.argument("into", metavar="INTO")
@click.argument("files", nargs=-1, required=True, metavar="FILE|URL...")
@click.option("--dry-run", is_flag=True, help="Say what would come in, and write nothing.")
@click.option("--allow-unsigned", is_flag=True, help="Take sealed files that nobody signed who is trusted here.")
@click.option("--json", "as_json", is_flag=True, help="Print what came in as JSON.")
def merge(into: str, files: tuple[str, ...], dry_run: bool, allow_unsigned: bool, as_json: bool) -> None:
    """Unite databases in INTO, a file (made if need be) or a server: in any order, any number of times.

    A row that does not match its digests is left out and named. The winners are those of all that was observed.

    Example: kerngen db merge all.db sm90.kgdb
    """
    absent = [file for file in files if "://" not in file and not os.path.exists(file)]
    if absent and os.path.exists(into):  # to make a new file of one that is there is asked for the other way round
        raise DatabaseError(f"{absent[0]}: no such file",
                            hint=f"INTO comes first, here {into}, and may be new; what follows is read")  # fmt: skip
    _merge(into, files, dry_run, allow_unsigned, as_json)


def _merge(into: str, files: Sequence[str], dry_run: bool, allow_unsigned: bool, as_json: bool) -> None:
    from kerngen.tuning_db import Store
    from kerngen.tuning_db.read.sealed import is_sealed_file
    from kerngen.tuning_db.store.bundles import open_any
    from kerngen.tuning_db.store.merge import merge as unite

    if "://" not in into and os.path.exists(into) and is_sealed_file(into):
        raise UsageError(f"{into} is sealed: nothing more is written to it", hint="name a database of your own")
    with ExitStack() as stack:
        others = [stack.enter_context(open_any(file, allow_unsigned=allow_unsigned, own=True)) for file in files]
        done = unite(stack.enter_context(Store.open(into)), others, dry_run=dry_run)
    into = without_password(into)
    if as_json:
        echo_json({"into": into, "dry_run": dry_run, "added": dict(done.added), "mended": dict(done.mended),
                   "winners": done.winners, "damaged": done.damaged, "conflicts": done.conflicts})  # fmt: skip
        return
    came = ", ".join(f"{count:,} of {table}" for table, count in done.added.items()) or "nothing that was not there"
    echo(f"{into} {'would get' if dry_run else 'got'} {came}")
    if done.mended:
        echo("put right or replaced: " + ", ".join(f"{n:,} of {table}" for table, n in done.mended.items()))
    echo(f"{done.winners:,} tuned points have another winner, or their first")
    _tell(done)


def _tell(done: Merged) -> None:
    for what, lines in (("damaged, and left out", done.damaged), ("conflict", done.conflicts)):
        for line in lines[:_LISTED]:
            echo(f"{what}: {line}", err=True)
        if len(lines) > _LISTED:
            click.echo(f"{what}: {len(lines) - _LISTED:,} more (--json names all)", err=True)
