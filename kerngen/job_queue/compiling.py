"""Machine code on its way from workers that compile to workers that measure: through the tuning database.

A database keeps the images of winners. While a job waits to be measured, those of its likely candidates are there too;
whoever measures takes them into its compile cache first, and clears them away once it has its winners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, select

from kerngen.arch import Arch
from kerngen.compiler.render import render
from kerngen.compiler.source_digest import source_digest_of
from kerngen.errors import CacheError, CompileError, ConfigRefused, CorruptRecord
from kerngen.templates import find_kernel
from kerngen.templates.kernel import fields_of, static_fields
from kerngen.tuning.plan import rank_space
from kerngen.tuning.space import candidates
from kerngen.tuning_db.read.freshness import notes_of
from kerngen.tuning_db.read.ids import problem_key
from kerngen.tuning_db.store import kernel_index
from kerngen.tuning_db.store import schema as t

if TYPE_CHECKING:
    from kerngen.compiler.cache import CachedCompiler, CompileCache
    from kerngen.job_queue.job import Job
    from kerngen.system.progress import Progress
    from kerngen.tuning_db import Store


def likely(job: Job) -> dict[str, tuple[Any, Any]]:
    """Source -> (problem, configuration) of what the job's searches try first: the defaults, then the best by model."""
    kernel, target = find_kernel(job.kernel), job.target()
    found: dict[str, tuple[Any, Any]] = {}
    each = []
    for item in job.items():
        try:
            space = candidates(kernel, item.problem, target)
        except ConfigRefused:
            continue
        found.setdefault(render(kernel, item.problem, space.default, target), (item.problem, space.default))
        each.append((item.problem, space))
    for problem, space in each:
        for _, config in rank_space(space)[: job.trials]:
            found.setdefault(render(kernel, problem, config, target), (problem, config))
    return found


def compile_ahead(store: Store, compiler: CachedCompiler, job: Job, progress: Progress) -> int:
    """Compile what is likely to be tried, and leave the machine code in `store`. Returns how many builds are new."""
    kernel, arch = find_kernel(job.kernel), job.target().arch
    source_digest = source_digest_of(kernel)
    sources = likely(job)
    futures = {}
    for source, (problem, config) in sources.items():
        known = store.find_build(kernel.name, source, fields_of(config), static_fields(problem), arch)
        if known is None or (known.status == "ok" and store.image(known) is None):
            futures[source] = compiler.submit(source, arch)
    for at, (source, future) in enumerate(futures.items()):
        progress.update(at, len(futures), f"compiling {kernel.name}")
        problem, config = sources[source]
        fields, static = fields_of(config), static_fields(problem)
        try:
            store.add_build(future.result(), kernel.name, source, fields, static,
                            notes=notes_of(source_digest, kernel, fields, arch.name))  # fmt: skip
        except CompileError as e:
            store.add_build(None, kernel.name, source, fields, static, arch=arch, status="compile_failed",
                            log=f"{e.message}\n{e.log}".strip())  # fmt: skip
    return len(futures)


def fetch_images(store: Store, cache: CompileCache, job: Job, arch: Arch) -> int:
    """Take what others compiled of this job's kernel into the cache. Returns how many."""
    count = 0
    for build in store.builds(_static_key(job)).values():
        if build.status != "ok" or build.arch != arch.name:
            continue
        try:
            image = None if cache.path(build.key).exists() else store.image(build)
        except (CorruptRecord, CacheError):
            continue  # it is compiled here, then
        count += image is not None and cache.put(image)
    return count


def forget_images(store: Store, job: Job) -> int:
    """Delete the images of this job's builds that are no winner's. Returns how many."""
    b, w = t.build.c, t.winner.c
    with store.writing() as connection:
        used = select(b.image_sha).join(t.winner, w.build_id == b.id)
        ours = select(b.image_sha).where(b.static_key == _static_key(job), b.image_sha.is_not(None))
        done = connection.execute(delete(t.artifact).where(t.artifact.c.sha.in_(ours), t.artifact.c.sha.not_in(used)))
        if done.rowcount:
            kernel_index.write(connection, _static_key(job), job.arch, store.where)
        return int(done.rowcount)


def _static_key(job: Job) -> str:
    return problem_key(find_kernel(job.kernel), job.items()[0].problem).static_key
