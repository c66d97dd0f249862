"""Recompiles a database's winners after a change of a kernel's source, and reports which still hold.

Where the machine code is the same (a comment, a name, a branch of another architecture), what was measured of the old
build holds for the new one, and the winner says so. Where it is another, the configuration stays and is served with the
new machine code, but as tuned on an older source, until it is tuned again.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kerngen.arch import Target
from kerngen.compiler.compile import DEFAULT_OPTIONS, Cubin
from kerngen.compiler.render import render
from kerngen.compiler.source_digest import source_digest_of
from kerngen.cost.crossover import judge_of
from kerngen.errors import CompileError, KerngenError, UnknownName
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, fields_of, static_fields
from kerngen.tuning_db.read.freshness import is_filed_by, notes_of

if TYPE_CHECKING:
    from kerngen.compiler.cache import CachedCompiler
    from kerngen.system.progress import Progress
    from kerngen.tuning_db import Build, Store, Winner

CURRENT, ADOPTED, CHANGED, REFUSED, FAILED = "current", "adopted", "changed", "refused", "failed"


@dataclass(slots=True)
class Rebuilt:
    """What became of a winner.

    outcome: CURRENT, the database has a build of today's source; ADOPTED, its new build has the same machine code;
    CHANGED, it has not; REFUSED, the kernel takes this problem or configuration no longer; FAILED, it does not compile.
    reason: in words, "" where the outcome says all. now: what is chosen for its problem since; None where nothing is.
    """

    winner: Winner
    outcome: str
    reason: str = ""
    now: Winner | None = None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A winner's build of today. image: a future of it, None where the database has a build of this source."""

    kernel: Kernel
    problem: Any
    config: Any
    source_digest: str
    source: str
    image: Future[Cubin] | None


def rebuild(store: Store, winners: list[Winner], compiler: CachedCompiler, bar: Progress) -> list[Rebuilt]:
    """Of `winners`, all of `store`. Those of one kernel and its compiled-in fields are chosen anew together.

    Raises DatabaseError, ToolchainError without an NVRTC, TuningMiss where KERNGEN_NO_COMPILE forbids compiling.
    """
    known: dict[str, dict[str, Build]] = {}
    wanted: list[tuple[Rebuilt, _Wanted | None]] = []
    for w in winners:
        key = w.problem.static_key
        if key not in known:
            known[key] = store.builds(key)
        wanted.append(_asked(store, w, known[key], compiler))
    found: list[Rebuilt] = []
    for i, (result, want) in enumerate(wanted):
        bar.update(i, len(wanted), f"{result.winner.kernel} on {result.winner.arch}")
        if want is not None and want.image is not None:
            _add(store, result, want, known[result.winner.problem.static_key])
        found.append(result)
    for kernel, static_key, target in _boards(found):
        now = {w.problem.id: w for w in _chosen(store, kernel, static_key, target)}
        for result in found:
            w = result.winner
            if (w.kernel, w.problem.static_key, w.arch, w.device) == (kernel, static_key, target.arch, target.device):
                result.now = now.get(w.problem.id)
    return found


def _asked(
    store: Store, w: Winner, builds: dict[str, Build], compiler: CachedCompiler
) -> tuple[Rebuilt, _Wanted | None]:
    """What `w` needs, with its compile under way; None where nothing can be built."""
    try:
        kernel = find_kernel(w.kernel)
        problem, config = kernel.problem_type(**w.problem.fields), kernel.config_type(**w.config)
        source_digest = source_digest_of(kernel)
        source = render(kernel, problem, config, Target(w.arch, w.device))
    except UnknownName:
        return Rebuilt(w, REFUSED, f"{w.kernel} is not installed here"), None
    except Exception as e:  # what an older winner's fields and values do to today's spec
        said = str(e) if isinstance(e, KerngenError) else f"{type(e).__name__}: {e}"
        return Rebuilt(w, REFUSED, said.partition("\n")[0]), None
    fields = fields_of(config)
    there = [b for b in builds.values()
             if (b.config, b.options) == (fields, DEFAULT_OPTIONS) and is_filed_by(source, b.source_sha)]  # fmt: skip
    has_code = any(b.target == w.arch.nvrtc_target and store.image(b) is not None for b in there)
    image = None if has_code else compiler.submit(source, w.arch)
    return Rebuilt(w, CURRENT if there else CHANGED), _Wanted(kernel, problem, config, source_digest, source, image)


def _add(store: Store, result: Rebuilt, want: _Wanted, builds: dict[str, Build]) -> None:
    """Write what was compiled, and say what it is to what was there."""
    if want.image is None:
        return
    try:
        cubin = want.image.result()
    except CompileError as e:
        result.outcome, result.reason = FAILED, e.message
        return
    same_code = (
        source_digest_of(want.kernel) == want.source_digest
    )  # else a file changed under us, and nobody knows which has it
    config = fields_of(want.config)
    notes = notes_of(want.source_digest, want.kernel, config, cubin.arch) if same_code else ()
    id = store.add_build(cubin, want.kernel.name, want.source, config, static_fields(want.problem), notes=notes)
    was = builds.get(result.winner.build_id)
    if result.outcome == CHANGED and was is not None and store.build(id).image_sha == was.image_sha:
        result.outcome = ADOPTED


def _chosen(store: Store, kernel: str, static_key: str, target: Target) -> list[Winner]:
    return store.recompute_winners(kernel, static_key, target, judge=judge_of(find_kernel(kernel), target))


def _boards(found: list[Rebuilt]) -> Iterator[tuple[str, str, Target]]:
    """(kernel, static key, board) of each line of winners, once."""
    yield from dict.fromkeys(
        (r.winner.kernel, r.winner.problem.static_key, Target(r.winner.arch, r.winner.device))
        for r in found
        if r.outcome != REFUSED
    )
