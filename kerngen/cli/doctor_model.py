"""`kerngen doctor --model`: what a model's kernels would run on a GPU, what is missing, and what memory it takes."""

from __future__ import annotations

from typing import Any

import click

from kerngen.arch import Target, find_arch, find_device
from kerngen.errors import DeviceError, UsageError
from kerngen.runtime.config import Keeping


def target_of(arch_name: str | None, device_name: str | None) -> Target:
    """The board that is named, the arch's usual one, or the GPU that is here. Raises UsageError, UnknownName."""
    if device_name is not None:
        device = find_device(device_name)
        if arch_name is not None and find_arch(arch_name).name != device.arch:
            raise UsageError(f"device {device} is {device.arch}, not {arch_name}")
        return Target.of(device)
    if arch_name is not None:
        return Target.of(find_arch(arch_name))
    if (here := gpu_here()) is None:
        raise UsageError("this machine has no GPU: say for which one", hint="--arch sm90, or --device H200")
    return here


def gpu_here() -> Target | None:
    from kerngen.runtime.launcher import probe_target

    try:
        return probe_target()
    except DeviceError:
        return None


def examine(
    model: str, draft: str | None, kept: Keeping, target: Target, db_url: str | None, bundle: str | None,
    context: int, device_name: str | None = None, *, tensor_parallel: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """What `print_model` prints; `works`: whether every kernel is there, or can be made. device_name: as asked. Of a
    model that is divided among ranks, the problems of all of them, and the memory of the first, which is the most.
    """
    from kerngen.bundles.bundle import sources_for
    from kerngen.bundles.preflight import KINDS, advice, preflight
    from kerngen.runtime.fallbacks import FALLBACKS
    from kerngen.runtime.footprint import footprint
    from kerngen.runtime.selection import Selector
    from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE
    from kerngen.workload.workload import find_model, joined, workload

    ranks = find_model(model, draft, kept).ranks(tensor_parallel)
    found = ranks[0]
    load = joined([workload(rank, target.arch) for rank in ranks])
    sources, cache, shipped = sources_for(db_url, bundle)
    if shipped is not None:
        shipped.require(target.arch)
    ready = preflight(load, Selector(sources, target), cache)
    named = [model, *(("--draft", draft) if draft else ()), *kept.options]
    named += ("--tensor-parallel", str(tensor_parallel)) if tensor_parallel > 1 else ()
    dtype = TORCH_DTYPE[target.arch.dtype]
    sizes = {"as released": footprint(found.target, found.drafter, dtype, context)}
    if found.target.quant is not None:
        sizes["unquantized"] = footprint(found.target, found.drafter, dtype, context, dense=True)
    return {
        "model": load.model, "arch": target.arch.name, "device": target.device.name, "works": ready.works,
        "kernels": {name: {k: counts[k] for k in KINDS} for name, counts in ready.kinds.items()},
        "builds": ready.builds, "in_database": ready.stored, "missing": [str(b) for b in ready.missing],
        "blocked": ready.blocked, "unsupported": ready.unsupported,
        "outside": {name: FALLBACKS[name] for name in load.missing},
        "commands": advice(ready, " ".join(named), gpu_here(), bundle=shipped is not None, named=device_name),
        "memory": {"context": context, "device_gib": target.device.mem_gib} | {
            what: {"weights": s.weight_bytes, "drafter": s.drafter_bytes, "cache": s.cache_bytes}
            for what, s in sizes.items()
        },
    }  # fmt: skip


def print_model(about: dict[str, Any]) -> None:
    kinds = list(next(iter(about["kernels"].values()), {}))
    problems = sum(sum(row.values()) for row in about["kernels"].values())
    click.echo(f"\n{about['model']} on {about['arch']} ({about['device']}): how the configurations of its {problems} "
               "problems were chosen")  # fmt: skip
    click.echo(f"{'':15}{'measured on':>13}{'measured on':>13}\n{'kernel':15}" + "".join(f"{k:>13}" for k in kinds))
    totals = {k: sum(row[k] for row in about["kernels"].values()) for k in kinds}
    for name, row in [*about["kernels"].items(), ("all", totals)]:
        click.echo(f"{name:15}" + "".join(f"{row[k] or '-':>13}" for k in kinds))
    missing = about["missing"]
    held = about["builds"] - about["in_database"] - len(missing)
    click.echo(f"{about['builds']} builds: {about['in_database']} in the database, {held} in the cache, {len(missing)} "
               "not built yet")  # fmt: skip
    if missing and about["blocked"]:
        click.echo(f"-- cannot run: {about['blocked']}; {len(missing)} builds are missing:")
        for build in missing[:3]:
            click.echo(f"     {build}")
        if len(missing) > 3:
            click.echo(f"     and {len(missing) - 3} more (--json lists all)")
    for text in about["unsupported"]:
        click.echo(f"-- cannot run: {text}")
    for name, why in about["outside"].items():
        click.echo(f"outside our kernels: {name} ({why})")
    memory = about["memory"]
    for what, part in memory.items():
        if isinstance(part, dict):
            total = sum(part.values())
            pieces = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in part.items() if size)
            click.echo(f"memory, {what}: {total / 1e9:.1f} GB at {memory['context']:,} tokens ({pieces}); "
                       f"{about['device']} has {memory['device_gib']:g} GiB")  # fmt: skip
    for command, does in about["commands"].items():
        click.echo(f"{does}:\n  {command}")
