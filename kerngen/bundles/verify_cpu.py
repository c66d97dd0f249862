"""Verifies a bundle without a GPU: it has all that a model needs, and its sources compile to its machine code.

Two levels of `kerngen db verify`; tuning_db/dist/verify.py has those before, verify_gpu.py those after.
"""

from __future__ import annotations

import hashlib
import tempfile
from concurrent.futures import Future
from typing import Any

from kerngen.arch import Arch, Target, find_arch
from kerngen.bundles.bundle import Bundle
from kerngen.bundles.preflight import preflight
from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.compiler.compile import DEFAULT_OPTIONS, Cubin, nvrtc_version
from kerngen.compiler.render import source_of
from kerngen.errors import CompileError, KerngenError
from kerngen.runtime.config import Keeping
from kerngen.runtime.selection import Selector
from kerngen.system.progress import Reporter
from kerngen.templates import find_kernel, kernel_names
from kerngen.tuning_db.dist.verify import Verdict
from kerngen.tuning_db.read.freshness import is_filed_by
from kerngen.tuning_db.read.values import Build
from kerngen.tuning_db.store.bundles import open_bundle
from kerngen.tuning_db.store.store import Store
from kerngen.workload.workload import find_model, workload

_NAMED = 20  # faults of one kind that are named one by one


class _Nothing(CompileCache):
    """What stands behind a bundle that is to be complete."""

    def find(self, source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> Cubin | None:
        return None


def complete(
    bundle: Bundle, model: str, draft: str | None, kept: Keeping, targets: list[Target], names: list[str]
) -> Verdict:
    """Whether every problem of the model's workload is launched with machine code that the bundle holds."""
    faults: list[str] = []
    builds = 0
    kinds: dict[str, int] = {}
    for target in targets:
        load = workload(find_model(model, draft, kept), target.arch)
        found = preflight(load.only(names) if names else load, Selector(bundle.sources(), target), _Nothing())
        builds += found.builds
        faults += [f"lacks {b}" for b in found.missing[:_NAMED]]
        if len(found.missing) > _NAMED:
            faults.append(f"and {len(found.missing) - _NAMED} more for {target}")
        for counts in found.kinds.values():
            for kind, count in counts.items():
                kinds[kind] = kinds.get(kind, 0) + count
    what = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    where = ", ".join(map(str, targets))
    return Verdict("complete", not faults, f"{model} on {where}: {builds} builds; problems: {what}", faults)


def rebuilt(bundle: Bundle, jobs: int, bar: Reporter) -> Verdict:
    """Whether today's kernel code and this machine's NVRTC give the very machine code that the bundle holds.

    Builds of another NVRTC cannot be compared here, and are counted as not proved.
    """
    here = nvrtc_version()
    with open_bundle(bundle.path, allow_unsigned=True) as store:  # nothing of it is run
        return _rebuilt(store, here, jobs, bar)


def _rebuilt(store: Store, here: tuple[int, int], jobs: int, bar: Reporter) -> Verdict:
    fields = {w.build_id: w.problem.fields for w in store.winners()}
    kept = [b for b in store.kept_builds() if b.kernel in kernel_names()]
    faults, others, same = [], 0, 0
    with tempfile.TemporaryDirectory(prefix="kerngen-prove-") as scratch, \
            CachedCompiler(jobs, CompileCache(scratch)) as compiler:  # fmt: skip
        waiting: list[tuple[Build, Future[Cubin]]] = []
        for build in kept:
            if build.nvrtc != here:
                others += 1
            elif (source := source_today(build, fields.get(build.id))) is None:
                faults.append(f"{_named(build)}: today's kernel renders another source")
            else:
                waiting.append((build, compiler.submit(source, find_arch(build.arch), build.options)))
        for i, (build, future) in enumerate(waiting):
            bar.update(i, len(waiting), build.kernel)
            try:
                sha = hashlib.sha256(future.result().image).hexdigest()
            except CompileError as e:
                faults.append(f"{_named(build)}: {e.message}")
                continue
            same += sha == build.image_sha
            if sha != build.image_sha:
                faults.append(f"{_named(build)}: other machine code (perhaps by another patch release of NVRTC)")
    if others:
        faults.append(f"{others} builds are of another NVRTC than {here[0]}.{here[1]}: they cannot be compared here")
    return Verdict("rebuilt", not faults, f"{same} of {len(kept)} builds are the same, byte by byte", faults)


def source_today(build: Build, fields: dict[str, Any] | None) -> str | None:
    """What is rendered today for a build, None unless that is what was built."""
    kernel = find_kernel(build.kernel)
    try:
        problem = kernel.problem_type(**(fields or build.static))
        source = source_of(kernel, problem, kernel.config_type(**build.config), find_arch(build.arch))
    except (KerngenError, TypeError):
        return None
    return source if is_filed_by(source, build.source_sha) else None


def _named(build: Build) -> str:
    return f"{build.kernel} {build.id[:12]}"
