"""The tuning database: builds are facts, measurements are observations, winners are derived. See docs/tuning-database.md.

    with Store.open(None) as store:                    # $KERNGEN_DB, or the user's tuning.db; a path or a URL
        build_id = store.add_build(cubin, kernel.name, source, config, static)     # configs as dicts: fields_of(...)
        failed_id = store.add_build(None, kernel.name, source, config, static, arch=arch,
                                    status="compile_failed", log=error.log)
        store.add_measurement(Measurement(problem_key(kernel, problem), arch.name, device, config, build_id,
                                          "ok", "predicted", model="roofline 1", p50_us=12.5))
        store.recompute_winners(kernel, problem_key(kernel, problem).static_key, arch, device)
    winner = lookup(default_stores(), kernel, problem, arch, device)               # None: use the default config

Store, in full (store.py):
    Store.open(url_or_path: str | Path | None = None, *, read_only=False, name="", override=False) -> Store
    store.transaction()                              context: all writes within it land together, or none
    store.add_build(image, kernel, source, config, static, *, arch=None, options=DEFAULT_OPTIONS, nvrtc=None,
                    status="ok", log="", keep_image=True) -> build id; the same build again is the same id
    store.keep_image(image)                          store a cubin that add_build was told not to keep
    store.find_build(kernel, source, config, static, arch, *, options=..., nvrtc=...) -> Build | None
    store.build(build_id) -> Build;  store.image(build) -> Cubin | None      (CorruptRecord where the blob is damaged)
    store.add_measurement(m: Measurement) -> id;  store.add_measurements([...]) -> [ids]
    store.measurements(kernel=None, *, static_key=None, problem=None, arch=None, device=None, provenance=None,
                       outcome=None, build_id=None, run=None) -> list[Observation]
    store.recompute_winners(kernel: Kernel | str, static_key, arch, device) -> list[Winner]
    store.winners(kernel=None, *, arch=None, device=None, static_key=None) -> list[Winner]   (cubin not loaded)
    store.winner(winner_id_prefix) -> Winner
    store.revoke(subject_id, reason)                 a build or a measurement that must not count any more

A name is imported when it is first used: `import kerngen.tuning_db` loads no SQLAlchemy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerngen.tuning_db.lookup import default_stores, lookup
    from kerngen.tuning_db.records import (
        Build,
        Measurement,
        Observation,
        ProblemKey,
        Winner,
        problem_key,
        static_key,
    )
    from kerngen.tuning_db.store import Store

_HOME = {
    "Build": "records",
    "Measurement": "records",
    "Observation": "records",
    "ProblemKey": "records",
    "Winner": "records",
    "problem_key": "records",
    "static_key": "records",
    "Store": "store",
    "lookup": "lookup",
    "default_stores": "lookup",
}
__all__ = [
    "Build",
    "Measurement",
    "Observation",
    "ProblemKey",
    "Store",
    "Winner",
    "default_stores",
    "lookup",
    "problem_key",
    "static_key",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
