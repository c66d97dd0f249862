"""`kerngen doctor`: what this machine can compile for, run and measure, and what to install for the rest."""

from __future__ import annotations

import json
import os
import platform
import runpy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.util import find_spec
from pathlib import Path

import click

from kerngen.arch import ARCHES, borrowed
from kerngen.boards import DEVICES, NEAR, Device, distance, is_slice, nearest
from kerngen.cli.doctor_model import examine, print_model, target_of
from kerngen.cli.keeping_options import keeping_options
from kerngen.cli.model_options import draft_option, tensor_parallel_option
from kerngen.errors import KerngenError, UsageError
from kerngen.runtime.config import AS_STORED, KEEPING_OPTIONS, Keeping
from kerngen.system.gpus import has_driver


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. fix: the command that mends it, empty where nothing is wrong."""

    subject: str
    ok: bool
    text: str
    fix: str = ""


def _python() -> Finding:
    packages = []
    for name in ("torch", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "optuna", "sqlalchemy"):
        try:
            packages.append(f"{name} {installed(name)}")
        except PackageNotFoundError:
            continue
    return Finding("python", True, f"{platform.python_version()}; {', '.join(packages)}")


def _compile() -> Finding:
    from kerngen.compiler.compile import nvrtc_version, supported_targets

    try:
        major, minor = nvrtc_version()
        targets = supported_targets()
    except KerngenError as e:
        return Finding("compile", False, e.message, e.hint or "")
    can = [a.name for a in ARCHES.values() if a.number in targets]
    cannot = [a.name for a in ARCHES.values() if a.number not in targets]
    text = f"NVRTC {major}.{minor} compiles for {', '.join(can)}"
    if cannot:
        return Finding("compile", False, f"{text}; not for {', '.join(cannot)}", "pip install 'kerngen[cuda12]'")
    return Finding("compile", True, text)


def _kernels() -> Finding:
    from kerngen.templates import broken_kernels, kernel_names

    count = len(kernel_names())
    if broken := broken_kernels():
        return Finding("kernels", False, "; ".join(e.message for e in broken), f"the other {count} work")
    return Finding("kernels", True, str(count))


def _gpu() -> Finding:
    try:
        version, cuda = _torch_build()
        if cuda is None or not _sees_gpu():
            build = "a CPU build" if cuda is None else f"built for CUDA {cuda}"
            return Finding("gpu", False, f"none that torch {version} ({build}) can use: kernels are compiled "
                           "and predicted for, not run; models run with --backend torch",
                           "on a machine with a GPU: pip install a CUDA build of torch")  # fmt: skip
        from kerngen.runtime.launcher import probe_target

        here = probe_target()
    except KerngenError as e:
        return Finding("gpu", False, e.message, e.hint or "")
    except ImportError as e:
        return Finding("gpu", False, str(e), "pip install kerngen")
    d = here.device
    figures = f"{d.name} ({d.arch}), {d.num_sms} SMs, {d.mem_gib:g} GiB{_kin(d)}"
    words = borrowed(here.arch)
    return Finding("gpu", True, f"{figures}: runs and measures{f'; {words}' if words else ''}")


def _torch_build() -> tuple[str, str | None]:
    """torch's version, and that of the CUDA that it is built for. It is not imported, which takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError("torch is not installed")
    about = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
    return about["__version__"], about["cuda"]


def _sees_gpu() -> bool:
    """Whether torch has a GPU to use. Only where there is a driver is it imported to say so."""
    if not has_driver():
        return False
    import torch

    return torch.cuda.is_available()


def _kin(device: Device) -> str:
    """What a board without a profile is near to, for the report: nothing for one that has one."""
    if device.name in DEVICES:
        return ""
    if is_slice(device.name):
        return ", a slice, tuned for by itself"
    if (kin := nearest(device)) is None:
        return ", a board without a profile"
    how = "near to" if distance(device, kin) <= NEAR else "far from"
    return f", a board without a profile, {how} {kin}"


def _folder(subject: str, path: Path, fix: str) -> Finding:
    """Whether the folder `path` is there and takes files, or can be made."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if os.path.exists(p))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return Finding(subject, True, str(path))
    why = "cannot be written" if there.is_dir() else f"cannot be made: {there} is no folder"
    return Finding(subject, False, f"{path} {why}", fix)


def _cache() -> Finding:
    from kerngen.system.files import cache_dir

    return _folder("cache", cache_dir(), "export KERNGEN_CACHE_DIR=FOLDER")


def _database() -> Finding:
    from kerngen.tuning_db import default_path

    path = default_path().removeprefix("sqlite:///")
    if "://" not in path and not os.path.exists(path):
        place = _folder("database", Path(path).parent, "export KERNGEN_DB=FILE")
        return replace(place, text=path) if place.ok else place
    from kerngen.tuning_db import Store
    from kerngen.tuning_db.read.reader import require_own

    try:
        if "://" not in path:
            require_own(Path(path))
        with Store.open(path, read_only=True) as store:
            return Finding("database", True, f"{store.where}: {len(store.winners())} winners")
    except KerngenError as e:
        return Finding("database", False, e.message, e.hint or "")


def _bundle(folder: str) -> Finding:
    from kerngen.bundles.bundle import Bundle

    try:
        bundle = Bundle.open(folder)
        with bundle.source as source:
            count = len(source.winners())
    except KerngenError as e:
        return Finding("bundle", False, e.message, e.hint or "")
    boards = ", ".join(f"{board} ({arch})" for arch, board in bundle.targets)
    return Finding("bundle", True, f"{folder}: {bundle.model} on {boards}, {count} winners")


CHECKS: tuple[Callable[[], Finding], ...] = (_python, _compile, _kernels, _gpu, _cache, _database)


@click.command()
@click.option(
    "--model", default=None, help="A model's name, folder or GGUF file: say what its kernels would run, and its memory."
)
@draft_option
@keeping_options
@tensor_parallel_option
@click.option("--arch", "arch_name", default=None, help="With --model: for this arch. Default: the GPU that is here.")
@click.option("--device", "device_name", default=None, help="With --model: for this board (kerngen arch ls).")
@click.option("--db", "db_url", default=None, help="With --model: this tuning database. Default: as a run.")
@click.option("--bundle", default=None, help="File that `kerngen compile -o` made. Default: $KERNGEN_BUNDLE.")
@click.option("--context", type=click.IntRange(1), default=8192, show_default=True,
              help="With --model: tokens of a sequence, for its memory.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    model: str | None, draft: str | None, kept: Keeping, tensor_parallel: int,
    arch_name: str | None, device_name: str | None,
    db_url: str | None, bundle: str | None, context: int, as_json: bool,
) -> None:  # fmt: skip
    """Say what this machine can compile for, run and measure, and what to install for the rest.

    With --model: how well its kernels are prepared for a GPU, and which command improves that. Exit code 1 if something
    that was asked for cannot work: nothing can be compiled, a kernel's folder or a bundle is damaged, a model's kernels
    are missing and may not or cannot be compiled. A missing GPU is not a failure.

    \b
    Example:
      kerngen doctor --model gemma-4-31b --arch sm90
    """
    from kerngen.runtime.fallbacks import FALLBACKS

    alone = arch_name or device_name or db_url or draft or kept != AS_STORED or tensor_parallel > 1
    if model is None and alone:
        names = ("--arch", "--device", "--db", "--draft", "--tensor-parallel", *KEEPING_OPTIONS)
        raise UsageError(f"{', '.join(names)} go with a --model", hint="--model gemma-4-31b")
    shipped = bundle or (None if db_url else os.environ.get("KERNGEN_BUNDLE"))
    findings = [check() for check in CHECKS] + ([_bundle(shipped)] if shipped else [])
    needed = [f for f in findings if f.subject in ("bundle", "kernels") or (f.subject == "compile" and model is None)]
    works = all(f.ok or "compiles for" in f.text for f in needed)
    about = None
    if model is not None and works:
        about = examine(
            model,
            draft,
            kept,
            target_of(arch_name, device_name),
            db_url,
            bundle,
            context,
            device_name,
            tensor_parallel=tensor_parallel,
        )
        works = about.pop("works")
    if as_json:
        click.echo(json.dumps({"findings": [asdict(f) for f in findings], "outside": FALLBACKS, "model": about}))
    else:
        _print(findings)
        if about is not None:
            print_model(about)
        else:
            click.echo("what no kernel of ours serves, and torch computes:")
            for name, why in FALLBACKS.items():
                click.echo(f"    {name}: {why}")
    if not works:
        raise click.exceptions.Exit(1)


def _print(findings: list[Finding]) -> None:
    for f in findings:
        click.echo(f"{'ok ' if f.ok else '-- '} {f.subject:9} {f.text}")
        if f.fix:
            click.echo(f"              {f.fix}")
