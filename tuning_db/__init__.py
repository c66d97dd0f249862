"""The tuning database: builds are facts, measurements are observations, winners are derived.

docs/tuning-database.md has the picture. In use:

    with Store.open(None) as store:             # $KERNGEN_DB, or the user's tuning.db; or a path, or a URL
        build_id = store.add_build(cubin, kernel.name, source, fields_of(config), static_fields(problem))
        failed_id = store.add_build(None, kernel.name, source, fields_of(config), static_fields(problem),
                                    arch=arch, status="compile_failed", log=error.log)
        key = problem_key(kernel, problem)
        store.add_measurement(Measurement(key, arch.name, device, fields_of(config), build_id,
                                          "ok", "predicted", model="roofline-1", p50_us=12.5))
        store.recompute_winners(kernel, key.static_key, target)
    winner = lookup(default_sources(), kernel, problem, target)   # None: use the default config

Store, in full:
    Store.open(url_or_path: str | Path | None = None, *, read_only=False, sealed=False, name="",
               override=False) -> Store
    store.transaction()             a context: all writes within it land together, or none of them
    store.add_build(image, kernel, source, config, static, *, arch=None, options=DEFAULT_OPTIONS, nvrtc=None,
                    status="ok", log="", keep_image=True, notes=()) -> build id; the same build again, the same id
    store.note_rendered(build_ids, note)              what gives these builds' sources: read/freshness.py
    store.rendered(static_key, closure) -> {build id}
    store.keep_image(image)         store a cubin that add_build was told not to keep (for winners)
    store.find_build(kernel, source, config, static, arch, *, options=DEFAULT_OPTIONS, nvrtc=None)
                    -> Build | None
    store.build(build_id) -> Build
    store.image(build) -> Cubin | Ptx | None          raises CorruptRecord where the blob is damaged
    store.add_measurement(m: Measurement) -> id       store.add_measurements([m, ...]) -> [id, ...]
    store.measurements(kernel=None, *, static_key=None, problem: ProblemKey=None, arch=None, device=None,
                       provenance=None, outcome=None, build_id=None, run=None) -> list[Observation]
    store.recompute_winners(kernel: Kernel | str, static_key, target, *, judge=None) -> list[Winner]
    store.winners(kernel=None, *, arch=None, device=None, static_key=None, every=False) -> list[Winner]
                    without cubins; every: those for other versions of the kernel's code too
    store.line(kernel, static_key, arch) -> Line | None           what a run reads of one static problem
    store.rewrite_lines()           where rows came in by another way than recompute_winners
    store.winner(id_or_prefix) -> Winner
    store.close_search(search, problem: ProblemKey, summary)      a search that need not be done again
    store.closed_searches(search) -> {problem id: summary}
    store.revoke(subject_id, reason)                  a build or a measurement that must not count any more
Lookup (sources.py, read/winner_table.py, read/lookup.py, read/places.py):
    default_path() -> str                             $KERNGEN_DB, or the user's tuning.db
    default_sources() -> list[Source | PerBoard]      override, user, bundles, and what is shipped for the board that is
                                                      at hand: what a run asks, read with sqlite3 alone
    open_source(path_or_url) -> Source                one of them; a Store is a Source too
    sources_for(url)                                  the one that --db names, or default_sources()
    default_stores(), stores_for(url)                 the same as Stores, to look at all that they hold
    WinnerTable(sources, kernel, problem, target)     the tuned points of one static problem, read once;
                                                      .answer(problem) -> Winner | None touches no database
    lookup(sources, kernel, problem, target, *, strict=False) -> Winner | None; strict raises TuningMiss
    miss_report(sources, kernel, problem, target) -> str    the nearest entries and where they differ

Fields (config, static, a problem's) are given and read in full; what has its default is left out of rows and ids.
A name is imported when it is first used: `import kerngen.tuning_db` loads no SQLAlchemy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerngen.tuning_db.read.ids import ProblemKey, problem_key, static_key
    from kerngen.tuning_db.read.lookup import lookup, miss_report
    from kerngen.tuning_db.read.places import default_path
    from kerngen.tuning_db.read.source import Source
    from kerngen.tuning_db.read.values import Build, Measurement, Observation, Winner
    from kerngen.tuning_db.read.winner_table import WinnerTable
    from kerngen.tuning_db.sources import default_sources, open_source, sources_for
    from kerngen.tuning_db.store.store import Store
    from kerngen.tuning_db.stores import default_stores, stores_for

_HOME = {
    "Build": "read.values",
    "Measurement": "read.values",
    "Observation": "read.values",
    "ProblemKey": "read.ids",
    "Winner": "read.values",
    "WinnerTable": "read.winner_table",
    "problem_key": "read.ids",
    "static_key": "read.ids",
    "Source": "read.source",
    "Store": "store.store",
    "default_sources": "sources",
    "open_source": "sources",
    "sources_for": "sources",
    "default_path": "read.places",
    "lookup": "read.lookup",
    "default_stores": "stores",
    "miss_report": "read.lookup",
    "stores_for": "stores",
}
__all__ = [
    "Build",
    "Measurement",
    "Observation",
    "ProblemKey",
    "Source",
    "Store",
    "Winner",
    "WinnerTable",
    "default_path",
    "default_sources",
    "default_stores",
    "lookup",
    "miss_report",
    "open_source",
    "problem_key",
    "sources_for",
    "static_key",
    "stores_for",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
