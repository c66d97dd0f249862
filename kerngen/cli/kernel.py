"""`kerngen kernel`: list the kernels, show what one becomes, check one on the GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kerngen.arch import ARCHES, Arch, Target, find_arch
from kerngen.errors import KerngenError, UsageError

if TYPE_CHECKING:
    from kerngen.templates.kernel import Kernel
    from kerngen.tuning.plan import Candidates


@click.group()
def kernel() -> None:
    """List, show and check kernels."""


@kernel.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(as_json: bool) -> None:
    """All kernels, and what may vary in each.

    Example: kerngen kernel ls
    """
    from kerngen.templates import find_kernel, kernel_names

    rows: list[dict[str, Any]] = []
    for name in kernel_names():
        k = find_kernel(name)
        bodies = [
            {"template": b.template, "entries": list(b.args), "when": dict(b.when),
             "space": {f: "derived" if callable(v) else list(v) for f, v in b.space.items()}}
            for b in k.spec.BODIES
        ]  # fmt: skip
        rows.append({"kernel": name, "about": k.about, "bodies": bodies})
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        tunables = dict.fromkeys(f for body in row["bodies"] for f in body["space"])
        click.echo(f"{row['kernel']:16} {row['about']}; varies {', '.join(tunables)}")


@kernel.command()
@click.argument("name")
@click.option("--arch", "arch_name", required=True, help="What to render for, e.g. sm70.")
@click.option("--problem", "problem_text", default="", help="FIELD=VALUE,...; unnamed fields keep their defaults.")
@click.option("--config", "config_text", default="", help="FIELD=VALUE,...; unnamed fields as the default's.")
@click.option("--source/--no-source", default=True, help="Print the rendered source too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(name: str, arch_name: str, problem_text: str, config_text: str, source: bool, as_json: bool) -> None:
    """The rendered source, what the compiled kernel takes, and why other configurations are refused.

    \b
    Example:
      kerngen kernel show attn_decode --arch sm70 --problem head_dim=512,num_kv_heads=4
    """
    from kerngen.cache import CompileCache
    from kerngen.predict import predict
    from kerngen.render import render
    from kerngen.templates import find_kernel
    from kerngen.templates.kernel import describe, fields_of
    from kerngen.tuning.plan import candidates

    arch, k = find_arch(arch_name), find_kernel(name)
    problem = _problem(k, problem_text, arch)
    target = Target.of(arch)
    found = candidates(k, problem, target)
    config = _config(k, config_text, found)
    text = render(k, problem, config, target)
    cubin = CompileCache().get_or_compile(text, arch)
    launches = k.launches(problem, config, target)
    guess = predict(k, problem, config, target, cubin.entries)
    if as_json:
        click.echo(json.dumps({
            "kernel": name, "arch": arch.name, "problem": fields_of(problem), "config": fields_of(config),
            "body": k.body(config, arch).template, "source": text if source else None,
            "entries": {e: asdict(r) for e, r in cubin.entries.items()}, "launches": [asdict(x) for x in launches],
            "cubin_bytes": len(cubin.image), "workspace_bytes": k.workspace_bytes(problem, config, target),
            "predicted": {"device": target.device.name, "latency_us": guess.latency_us, "why": guess.explain(),
                          "launches": [asdict(x) for x in guess.launches]},
            "space_size": found.space_size, "num_valid": len(found.valid),
            "refused": [{"count": r.count, "reason": r.reason, "config": fields_of(r.config)} for r in found.refusals],
        }))  # fmt: skip
        return
    if source:
        click.echo(text)
    click.echo(
        f"{name}{describe(problem)}\non {arch}, configuration {describe(config)}, {k.body(config, arch).template}"
    )
    for x in launches:
        r = cubin.entries[x.entry]
        spills = f", spills {r.spill_store_bytes} + {r.spill_load_bytes} B a thread" if cubin.spills else ""
        click.echo(
            f"  {x.entry}: grid {x.grid}, block {x.block}, {r.registers} registers a thread, "
            f"{r.static_smem_bytes:,} + {x.smem_bytes:,} B of shared memory (static + dynamic, {arch.max_smem_bytes:,} "
            f"allowed){spills}"
        )
    click.echo(f"  cubin {len(cubin.image):,} B, workspace {k.workspace_bytes(problem, config, target):,} B")
    click.echo(f"  predicted for {target.device}: {guess.latency_us:.1f} us; {guess.explain()}")
    refused = "; refused, with one example each:" if found.refusals else ", none is refused"
    click.echo(f"{len(found.valid):,} of {found.space_size:,} configurations can run{refused}")
    for refusal in found.refusals:
        click.echo(f"  {refusal.count:7,}  {refusal.reason}")


def _problem(k: Kernel, text: str, arch: Arch) -> Any:
    """The problem; where its dtypes are not named and the arch has no bf16, they are fp16 (residual stream fp32)."""
    from dataclasses import fields

    from kerngen.templates.kernel import parse_fields

    if not arch.has_bf16:
        named = {part.partition("=")[0].strip() for part in text.split(",")}
        fp16 = {"dtype": "fp16", "logits_dtype": "fp16", "residual_dtype": "fp32"}
        own = [f.name for f in fields(k.problem_type) if f.name in fp16 and f.name not in named]
        text = ",".join([*filter(None, [text]), *(f"{n}={fp16[n]}" for n in own)])
    return parse_fields(k.problem_type, text)


def _config(k: Kernel, text: str, found: Candidates) -> Any:
    """The default configuration with the fields that `text` names."""
    from dataclasses import replace

    from kerngen.templates.kernel import fields_of, parse_fields

    default = found.default
    if not text:
        return default
    named = {part.partition("=")[0].strip() for part in text.split(",")}
    parsed = {n: v for n, v in fields_of(parse_fields(k.config_type, text)).items() if n in named}
    for name, value in parsed.items():  # why_invalid answers for the space, and promises nothing outside of it
        known = dict.fromkeys(v for part in found.space for v in part.get(name, ()))
        if value not in (*known, getattr(default, name)):
            raise UsageError(f"{name}={value} is not in {k.name}'s space",
                             hint=f"{name}: {', '.join(map(str, known)) or getattr(default, name)}")  # fmt: skip
    return replace(default, **parsed)


@kernel.command()
@click.argument("names", nargs=-1)
@click.option("--arch", "arch_name", default=None, help="The GPU that must be here. Default: the one that is.")
@click.option("--body-arch", default=None, help="Check this older arch's body, as PTX through the driver.")
@click.option("--case", "case_filter", default="", help="Only cases whose name contains this.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(
    names: tuple[str, ...], arch_name: str | None, body_arch: str | None, case_filter: str, as_json: bool
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
    from kerngen.measure import check_case

    rows = []
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
            click.echo(f"{row['outcome']:11} {k.name:16} {case.name:36} {size} {row['message']}".rstrip())
    return rows
