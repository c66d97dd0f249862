"""`kerngen kernel show`: what one kernel becomes for one problem, from its source down to the instructions."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Any

import click

from kerngen.arch import Arch, Target, find_arch
from kerngen.errors import ProblemError, UsageError

if TYPE_CHECKING:
    from kerngen.templates.kernel import Kernel
    from kerngen.tuning.space import Candidates
    from kerngen.tuning_db import Winner


@click.command()
@click.argument("name")
@click.option("--arch", "arch_name", required=True, help="What to render for, e.g. sm70.")
@click.option("--problem", "problem_text", default="", help="FIELD=VALUE,...; unnamed fields keep their defaults.")
@click.option("--config", "config_text", default="", help="FIELD=VALUE,...; unnamed fields as the default's.")
@click.option("--source/--no-source", default=True, help="Print the rendered source too.")
@click.option("--ptx", is_flag=True, help="Print the PTX.")
@click.option("--sass", is_flag=True, help="Print the machine instructions; needs nvdisasm.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(
    name: str, arch_name: str, problem_text: str, config_text: str, source: bool, ptx: bool, sass: bool, as_json: bool
) -> None:
    """The rendered source, what the compiled kernel takes, and why other configurations are refused.

    \b
    Example:
      kerngen kernel show attn_decode --arch sm70 --problem head_dim=512,num_kv_heads=4
    """
    from kerngen.compiler.cache import CompileCache
    from kerngen.compiler.disassemble import disassemble
    from kerngen.compiler.render import render
    from kerngen.cost.predict import predict
    from kerngen.templates import find_kernel
    from kerngen.templates.kernel import describe, fields_of
    from kerngen.tuning.space import candidates

    arch, k = find_arch(arch_name), find_kernel(name)
    problem = problem_of(k, problem_text, arch)
    target = Target.of(arch)
    found = candidates(k, problem, target)
    config = _config(k, config_text, found)
    text = render(k, problem, config, target)
    cache = CompileCache()
    cubin = cache.get_or_compile(text, arch)
    assembly = cache.get_or_compile_ptx(text, arch).image.decode().rstrip("\0") if ptx else None
    instructions = disassemble(cubin) if sass else None
    launches = k.launches(problem, config, target)
    guess = predict(k, problem, config, target, cubin.entries)
    winner = _winner(k, problem, target)
    if as_json:
        click.echo(json.dumps({
            "kernel": name, "folder": str(k.folder), "arch": arch.name, "problem": fields_of(problem),
            "config": fields_of(config), "default": fields_of(found.default),
            "tuned": None if winner is None else
            {"config": winner.config, "source": winner.source, "provenance": winner.provenance,
             "latency_us": winner.latency_us, "stale": winner.stale},
            "body": k.body(config, arch).template, "source": text if source else None, "ptx": assembly,
            "sass": instructions,
            "entries": {e: asdict(r) for e, r in cubin.entries.items()}, "launches": [asdict(x) for x in launches],
            "cubin_bytes": len(cubin.image), "workspace_bytes": k.workspace_bytes(problem, config, target),
            "predicted": {"device": target.device.name, "latency_us": guess.latency_us, "why": guess.explain(),
                          "launches": [asdict(x) for x in guess.launches]},
            "space_size": found.space_size, "num_valid": len(found.valid),
            "refused": [{"count": r.count, "reason": r.reason, "config": fields_of(r.config)} for r in found.refusals],
        }))  # fmt: skip
        return
    for part in (text if source else None, assembly, instructions):
        if part is not None:
            click.echo(part)
    click.echo(f"{name}{describe(problem)}\non {arch}, {k.body(config, arch).template}")
    for line in _configurations(config, found.default, winner):
        click.echo(f"  {line}")
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
    whole = f"{found.space_size:,} configurations"
    sample = f"a sample of {len(found.valid) + found.points.num_refused:,} of {whole}, too irregular to be known whole,"
    click.echo(f"{len(found.valid):,} of {whole if found.complete else sample} can run{refused}")
    for refusal in found.refusals:
        click.echo(f"  {refusal.count:7,}  {refusal.reason}")


def example(k: Kernel, problem: Any, arch: Arch) -> str:
    """The `kernel show` that shows `problem`, to be pasted."""
    needed = {f.name: f.default for f in fields(problem)}
    given = ",".join(f"{n}={getattr(problem, n)}" for n, default in needed.items() if getattr(problem, n) != default)
    return f"kerngen kernel show {k.name} --arch {arch}" + (f" --problem {given}" if given else "")


def problem_of(k: Kernel, text: str, arch: Arch) -> Any:
    """The problem, with the dtypes of `arch` where they are not named.

    Raises ProblemError, with an example from the kernel's cases, where a field that has no default is not named.
    """
    from kerngen.templates.kernel import parse_problem

    named = {part.partition("=")[0].strip() for part in text.split(",")}
    known = fields(k.problem_type)
    needed = [f.name for f in known if f.default is MISSING and f.name not in named]
    if needed and named <= {"", *(f.name for f in known)}:
        target = Target.of(arch)
        served = (c.problem for c in k.cases.CASES if k.why_unsupported(c.problem, target) is None)
        hint = next((f"for example: {example(k, p, arch)}" for p in served), None)
        raise ProblemError(f"{k.name} needs {', '.join(needed)}: there is no default", hint=hint)
    return parse_problem(k.problem_type, text, arch)


def _config(k: Kernel, text: str, found: Candidates) -> Any:
    """The default configuration with the fields that `text` names."""
    from kerngen.templates.kernel import fields_of, parse_over

    default = found.default
    config = parse_over(default, text)
    for name, value in fields_of(config).items():  # why_invalid answers for the space, and promises nothing beyond
        known = dict.fromkeys(v for part in found.space for v in part.get(name, ()))
        if value not in (*known, getattr(default, name)):
            raise UsageError(f"{name}={value} is not in {k.name}'s space",
                             hint=f"{name}: {', '.join(map(str, known)) or getattr(default, name)}")  # fmt: skip
    return config


def _winner(k: Kernel, problem: Any, target: Target) -> Winner | None:
    """What a run would take from the tuning databases that it looks in."""
    from kerngen.tuning_db import lookup, sources_for

    return lookup(sources_for(None), k, problem, target)


def _configurations(config: Any, default: Any, winner: Winner | None) -> list[str]:
    """The configuration that is shown, and how to get at the default and the tuned one where it is another."""
    from kerngen.templates.kernel import describe, fields_of

    tuned = None
    if winner is not None:
        stale = ", of an older source" if winner.stale else ""
        us = "" if winner.latency_us is None else f"{winner.latency_us:.1f} us "
        figures = f"{winner.source}: {us}{winner.provenance} for {winner.device}{stale}"
        tuned = type(config)(**winner.config)
    roles = [role for role, it in (("the default", default), ("the tuned one", tuned)) if it == config]
    lines = [f"configuration {describe(config)}" + (f": {' and '.join(roles)}" if roles else "")]
    if default != config:
        lines.append(f"the default is {describe(default)}")
    if tuned is None:
        return [*lines, "nothing tuned serves this problem here: a run takes the default"]
    if tuned == config:
        return [*lines, f"  {figures}"]
    changed = ",".join(f"{n}={v}" for n, v in fields_of(tuned).items() if v != getattr(default, n))
    return [*lines, f"tuned: --config {changed or '(the default)'}", f"  {figures}"]
