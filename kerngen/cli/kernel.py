"""`kerngen kernel`: list the kernels and what a model asks of them, show what one becomes, check one on the GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from kerngen.arch import ARCHES, Arch, Target, find_arch
from kerngen.cli.kernel_new import new
from kerngen.cli.kernel_show import example, show
from kerngen.errors import KerngenError, UsageError

if TYPE_CHECKING:
    from kerngen.templates.kernel import Kernel


@click.group()
def kernel() -> None:
    """List, show, check and begin kernels."""


kernel.add_command(show)
kernel.add_command(new)


@kernel.command()
@click.option("--model", default=None, help="A model's name, folder or GGUF file: list the problems that it needs.")
@click.option("--arch", "arch_name", default="sm90", show_default=True, help="With --model: the arch it runs on.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(model: str | None, arch_name: str, as_json: bool) -> None:
    """All kernels, and what may vary in each; or all problems of a model, with how to look at each.

    \b
    Example:
      kerngen kernel ls --model gemma-4-31b --arch sm90
    """
    rows = _kernels() if model is None else _problems(model, find_arch(arch_name))
    if as_json:
        click.echo(json.dumps(rows))
    elif model is None:
        for row in rows:
            tunables = dict.fromkeys(f for body in row["bodies"] if body["proven"] for f in body["space"])
            click.echo(f"{row['kernel']:16} {row['about']}; varies {', '.join(tunables)}")
    else:
        _print_problems(rows)


def _kernels() -> list[dict[str, Any]]:
    from kerngen.templates import find_kernel, kernel_names

    rows: list[dict[str, Any]] = []
    for k in map(find_kernel, kernel_names()):
        bodies = [
            {"template": b.template, "entries": list(b.args), "when": dict(b.when), "proven": b.proven,
             "space": {f: "derived" if callable(v) else list(v) for f, v in b.space.items()}}
            for b in k.spec.BODIES
        ]  # fmt: skip
        rows.append({"kernel": k.name, "about": k.about, "folder": str(k.folder), "bodies": bodies})
    return rows


def _problems(model: str, arch: Arch) -> list[dict[str, Any]]:
    """A row for each set of compiled-in fields that `model` needs of a kernel on `arch`, with its tuned points."""
    from kerngen.templates import find_kernel
    from kerngen.templates.kernel import static_fields
    from kerngen.workload.workload import find_model, workload

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for item in workload(find_model(model), arch).items:
        k, static = find_kernel(item.kernel), static_fields(item.problem)
        row = rows.setdefault((k.name, json.dumps(static)), {
            "kernel": k.name, "static": static, "points": [], "where": [], "show": example(k, item.problem, arch),
        })  # fmt: skip
        row["points"].append({n: getattr(item.problem, n) for n in item.problem.RUNTIME})
        row["where"] = list(dict.fromkeys([*row["where"], *(u.where for u in item.uses)]))
    return sorted(rows.values(), key=lambda row: row["kernel"])


def _print_problems(rows: list[dict[str, Any]]) -> None:
    by_kernel: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_kernel.setdefault(row["kernel"], []).append(row)
    for name, shapes in by_kernel.items():
        problems = sum(len(row["points"]) for row in shapes)
        click.echo(f"{name}: {problems} problems, {len(shapes)} to compile for each configuration")
        for row in shapes:
            click.echo(f"  {len(row['points']):3} x {', '.join(row['where'])}\n        {row['show']}")
    total = sum(len(row["points"]) for row in rows)
    click.echo(f"{total} problems of {len(by_kernel)} kernels")


@kernel.command()
@click.argument("names", nargs=-1)
@click.option("--arch", "arch_name", default=None, help="The GPU that must be here. Default: the one that is.")
@click.option("--body-arch", default=None, help="Check this older arch's body, as PTX through the driver.")
@click.option("--case", "case_filter", default="", help="Only cases whose name contains this.")
@click.option("--device", default=None, help="cuda or cuda:N. Default: the first GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(
    names: tuple[str, ...],
    arch_name: str | None,
    body_arch: str | None,
    case_filter: str,
    device: str | None,
    as_json: bool,
) -> None:
    """Run kernels' test cases on this machine's GPU and compare with the fp32 reference. Exit code 1 if one differs.

    \b
    Example:
      kerngen kernel check attn_decode --body-arch sm70
    """
    from kerngen.errors import DeviceError
    from kerngen.templates import find_kernel, kernel_names

    kernels = [find_kernel(n) for n in names or kernel_names()]
    wanted = find_arch(arch_name) if arch_name else None
    body = find_arch(body_arch) if body_arch else None
    from kerngen.runtime.launcher import probe_device

    if device is not None:
        from kerngen.runtime.backend import use_gpu

        use_gpu(device)
    here = ARCHES[probe_device().arch]
    if wanted is not None and wanted != here:
        raise DeviceError(f"this machine's GPU is {here}, not {wanted}")
    body = body or here
    if body.number > here.number:
        raise UsageError(
            f"{body} code does not run on {here}", hint="--body-arch names this GPU's arch or an older one"
        )
    rows = [row for k in kernels for row in _check(k, body, case_filter, quiet=as_json)]
    if not rows:
        raise UsageError(f"no case contains {case_filter!r}")
    bad = [r for r in rows if r["outcome"] in ("wrong", "failed")]
    if as_json:
        click.echo(json.dumps({"gpu": here.name, "body": body.name, "cases": rows}))
    else:
        skipped = sum(r["outcome"] == "unsupported" for r in rows)
        click.echo(f"{len(rows) - len(bad) - skipped} right, {len(bad)} wrong, {skipped} unsupported on {body}")
    if bad:
        raise click.exceptions.Exit(1)


def _check(k: Kernel, body: Arch, case_filter: str, *, quiet: bool) -> list[dict[str, Any]]:
    from kerngen.timing.measure import check_case

    rows, said = [], set[str]()
    for case in k.cases.CASES:
        if case_filter not in case.name:
            continue
        row: dict[str, Any] = {"kernel": k.name, "case": case.name}
        if (why := k.why_unsupported(case.problem, Target.of(body))) is not None:
            row |= {"outcome": "unsupported", "message": why}
        else:
            try:
                r = check_case(k, case, arch=body)
                row |= {"outcome": "right" if r.ok else "wrong", "message": r.message, "error_abs": r.error_abs,
                        "error_rel": r.error_rel}  # fmt: skip
            except KerngenError as e:
                row |= {"outcome": "failed", "message": e.message}
        rows.append(row)
        if not quiet:
            size = f"largest error {row['error_abs']:.3g}" if "error_abs" in row else ""
            message = "as above" if row["outcome"] == "failed" and row["message"] in said else row["message"]
            said.add(row["message"])
            click.echo(f"{row['outcome']:11} {k.name:16} {case.name:36} {size} {message}".rstrip())
    return rows
