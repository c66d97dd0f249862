"""Values to rows and back: ids, digests and JSON columns.

Rows hold problems and configurations as filed (canonical_fields.py), and what a row must match is the digest of that:
whether a row is sound does not depend on which kernels are installed. Values are filled again once their row is sound.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import Row, Select, Table, select

from kerngen.arch import Arch, Device, find_arch
from kerngen.compiler.compile import DEFAULT_OPTIONS, Cubin, Ptx, Resources, cache_key, nvrtc_version, source_key
from kerngen.errors import CorruptRecord, DatabaseError, UsageError, printable
from kerngen.templates.kernel import filled, trimmed
from kerngen.tuning_db.read.canonical_fields import (
    canonical_fields_of,
    device_from,
    filed_device,
    filed_kernel,
    named_kernel,
)
from kerngen.tuning_db.read.checks import (
    require_build,
    require_device,
    require_fields,
    require_measurement,
    require_winner,
)
from kerngen.tuning_db.read.freshness import source_sha
from kerngen.tuning_db.read.ids import (
    ID_VERSION,
    MEASUREMENT_VERSION,
    ProblemKey,
    digest,
    ids_as_filed,
    seal_of,
    static_key,
)
from kerngen.tuning_db.read.values import Build, Measurement, Observation, StepKey, Winner
from kerngen.tuning_db.store import schema as t

log = logging.getLogger(__name__)

ZSTD_LEVEL = 12

WINNERS: Select[Any] = (  # with all that `read_winner` asks of a row, also where what it rests on is lost
    select(t.winner, t.problem.c.static, t.problem.c.runtime, t.problem.c.dynamic,
           t.device.c.props.label("device_props"), t.build.c.config, t.measurement.c.fields)
    .outerjoin(t.problem, t.winner.c.problem_id == t.problem.c.id)
    .outerjoin(t.device, t.winner.c.device_id == t.device.c.id)
    .outerjoin(t.build, t.winner.c.build_id == t.build.c.id)
    .outerjoin(t.measurement, t.winner.c.measurement_id == t.measurement.c.id)
)  # fmt: skip


def describe_build(
    image: Cubin | Ptx | None,
    kernel: str,
    source: str,
    config: dict[str, Any],
    static: dict[str, Any],
    arch: Arch | None,
    options: tuple[str, ...],
    nvrtc: tuple[int, int] | None,
    status: str,
    log: str,
) -> Build:
    if (image is None) == (status == "ok"):
        raise UsageError(f"a build with status {status} {'needs' if image is None else 'has no'} image")
    if image is not None:
        arch, nvrtc = find_arch(image.arch), image.nvrtc
    elif arch is None:
        raise UsageError("a failed build must name its arch")
    version = nvrtc or nvrtc_version()
    target = arch.ptx_target if isinstance(image, Ptx) else arch.nvrtc_target
    key = source_key(source, target, options) if isinstance(image, Ptx) else cache_key(source, target, options, version)
    if image is not None and image.key != key:
        raise DatabaseError(f"the {kernel} image {image.key[:16]} was not made from this source with these options")
    entries = image.entries if isinstance(image, Cubin) else {}
    sha = source_sha(source)
    return Build(
        build_id_of(kernel, target, version, options, config, static, sha), kernel, arch.name, target, version,
        options, config, static, sha, status, key,
        None if image is None else hashlib.sha256(image.image).hexdigest(), entries, log,
    )  # fmt: skip


def compile_id(
    kernel: str,
    source: str,
    config: dict[str, Any],
    static: dict[str, Any],
    arch: Arch,
    options: tuple[str, ...] = DEFAULT_OPTIONS,
    nvrtc: tuple[int, int] | None = None,
) -> str:
    """The id of the cubin build of exactly this, by this machine's NVRTC unless `nvrtc` is given."""
    version = nvrtc or nvrtc_version()
    return build_id_of(kernel, arch.nvrtc_target, version, options, config, static, source_sha(source))


def build_id_of(
    kernel: str,
    target: str,
    nvrtc: tuple[int, int],
    options: tuple[str, ...],
    config: dict[str, Any],
    static: dict[str, Any],
    sha: str,
    *,
    is_filed: bool = False,
) -> str:
    """is_filed: kernel, config and static are as a row has them."""
    if not is_filed:
        of = canonical_fields_of(kernel)
        kernel, config, static = filed_kernel(kernel), trimmed(config, of.config), trimmed(static, of.static)
    return digest({
        "v": ID_VERSION, "kernel": kernel, "target": target, "nvrtc": list(nvrtc), "options": list(options),
        "config": config, "static": static, "source": sha,
    })  # fmt: skip


def _seal(b: Build, entries: dict[str, Any]) -> str:
    """The digest of the facts that a build's id does not cover. entries: name -> the fields of its Resources."""
    return digest({"id": b.id, "arch": b.arch, "status": b.status, "key": b.key, "image": b.image_sha,
                   "entries": entries})  # fmt: skip


def build_row(b: Build) -> dict[str, Any]:
    of = canonical_fields_of(b.kernel)
    entries = {name: asdict(r) for name, r in sorted(b.entries.items())}
    return {
        "id": b.id, "kernel": filed_kernel(b.kernel), "arch": b.arch, "target": b.target,
        "nvrtc": f"{b.nvrtc[0]}.{b.nvrtc[1]}", "options": to_json(list(b.options)),
        "config": to_json(trimmed(b.config, of.config)), "static_key": static_key(b.kernel, b.static),
        "static": to_json(trimmed(b.static, of.static)), "source_sha": b.source_sha,
        "status": b.status, "cache_key": b.key, "image_sha": b.image_sha, "entries": to_json(entries),
        "registers": b.registers, "spill_bytes": b.spill_bytes, "static_smem_bytes": b.static_smem_bytes,
        "log": b.log, "seal": _seal(b, entries),
    }  # fmt: skip


def settled(m: Measurement) -> Measurement:
    """`m` as it will be read back: plain floats, no NaN (SQLite keeps none), and the time of writing."""

    def plain(value: float | None) -> float | None:
        return None if value is None or math.isnan(value) else float(value)

    return replace(
        m, p50_us=plain(m.p50_us), p10_us=plain(m.p10_us), p90_us=plain(m.p90_us), min_us=plain(m.min_us),
        samples=int(m.samples), error_abs=plain(m.error_abs), error_rel=plain(m.error_rel), at=m.at or now(),
        step_us=plain(m.step_us), base_step_us=plain(m.base_step_us),
    )  # fmt: skip


def as_filed(m: Measurement) -> Measurement:
    """`m` without the fields that have their default: what its row states."""
    return replace(m, problem=m.problem.filed(), config=trimmed(m.config, canonical_fields_of(m.problem.kernel).config))


def measurement_id_of(m: Measurement, problem_id: str, device: dict[str, Any]) -> str:
    """The id of a measurement as filed. device: the fields of m.device, as its row has them."""
    stated: dict[str, Any] = {
        "v": MEASUREMENT_VERSION, "problem": problem_id, "fields": m.problem.fields, "arch": m.arch, "device": device,
        "config": m.config, "build": m.build_id, "outcome": m.outcome,
        "provenance": m.provenance, "stage": m.stage, "model": m.model, "p50": m.p50_us, "p10": m.p10_us,
        "p90": m.p90_us, "min": m.min_us, "samples": m.samples, "error_abs": m.error_abs,
        "error_rel": m.error_rel,
    }  # fmt: skip
    in_step = {"step": m.step_id, "step_us": m.step_us, "base_step_us": m.base_step_us, "base": m.base_id}
    stated |= {name: value for name, value in in_step.items() if value is not None}
    if m.provenance == "measured":
        stated |= {"environment": m.environment, "run": m.run, "at": m.at}
    return digest(stated)


def measurement_row(given: Measurement, problem_id: str) -> dict[str, Any]:
    """The row of `given`, which is as filed."""
    m, device = given, filed_device(given.device)
    return sealed(t.measurement, {
        "id": measurement_id_of(m, problem_id, device), "build_id": m.build_id, "problem_id": problem_id,
        "device_id": digest(device), "environment_id": digest(m.environment), "arch": m.arch,
        "config": to_json(m.config), "fields": to_json(m.problem.fields), "outcome": m.outcome,
        "reason": m.reason, "provenance": m.provenance, "stage": m.stage, "model": m.model,
        "p50_us": m.p50_us, "p10_us": m.p10_us, "p90_us": m.p90_us, "min_us": m.min_us,
        "samples": m.samples, "error_abs": m.error_abs, "error_rel": m.error_rel, "run": m.run,
        "at": m.at, "tags": to_json(m.tags), "step_id": m.step_id, "step_us": m.step_us,
        "base_step_us": m.base_step_us, "base_id": m.base_id,
    })  # fmt: skip


def sealed(table: Table, row: dict[str, Any], **beside: Any) -> dict[str, Any]:
    """`row` with its seal. beside: what that covers but another table keeps."""
    return row | {"seal": seal_of(table.name, row | beside)}


def is_sealed(table: Table, row: Row[Any], **beside: Any) -> bool:
    """Whether a row is what was written."""
    stated = {c.name: row._mapping[c.name] for c in table.columns}
    try:
        return bool(seal_of(table.name, stated | beside) == row.seal)
    except TypeError:  # SQLite keeps values of any type in any column, and nothing was written that is no JSON
        return False


def step_row(s: StepKey) -> dict[str, Any]:
    """A step's row; its id is the digest of what it states."""
    row: dict[str, Any] = {
        "model": s.model, "arch": s.arch, "phase": s.phase, "batch": s.batch, "q_len": s.q_len, "context": s.context,
        "chunk": s.chunk, "layers": s.layers, "sequence": s.sequence,
        "props": to_json(s.props | {"weight": float(s.weight)}),
    }  # fmt: skip
    return sealed(t.step, {"id": digest({"v": ID_VERSION, "step": row}), **row})


def read_step(row: Row[Any], where: str) -> StepKey | None:
    """None, with a warning that names the row, unless it is what was written."""
    try:
        require_utf8(row)
        if not is_sealed(t.step, row):
            raise ValueError("it does not match its own seal")
        props = json.loads(row.props)
        weight = float(props.pop("weight"))
        if not 0 < weight < math.inf:
            raise ValueError(f"weight={weight!r}")
        return StepKey(row.model, row.arch, row.phase, row.batch, row.q_len, row.context, row.chunk, row.layers,
                       row.sequence, weight, props)  # fmt: skip
    except Exception as e:
        warn_skipped(where, "step", row.id, f"cannot be read ({e})")
        return None


def search_id_of(search: str, problem_id: str) -> str:
    return digest({"v": ID_VERSION, "search": search, "problem": problem_id})


def revocation_id_of(subject_id: str, reason: str) -> str:
    return digest({"v": ID_VERSION, "subject": subject_id, "reason": reason})


def winner_id_of(key: ProblemKey, arch: str, device: Device, closure: str) -> str:
    """closure: of the kernel code that it was chosen for; "" where that is not known."""
    stated = {"v": ID_VERSION, "problem": key.id, "arch": arch, "device": device.name, "num_sms": device.num_sms}
    return digest(stated | ({"closure": closure} if closure else {}))


@lru_cache(maxsize=64)
def device_of(props: str) -> tuple[Device, str]:
    """The device of a row, and the row's id. Many rows have the same few devices."""
    stated = json.loads(props)
    return device_from(stated), digest(stated)


def require_utf8(row: Row[Any]) -> None:
    """Raises ValueError, naming the column, where the database held bytes that are no text (see engine.decode_text)."""
    for name, value in row._mapping.items():
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise ValueError(f"its {name} is not UTF-8")


def warn_skipped(where: str, what: str, id: object, why: str) -> None:
    log.warning("%s: %s %s %s; skipped", where, what, printable(str(id)), printable(why))


def version_of(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def to_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


# Rows are read in three functions that catch whatever a damaged one raises: there is no telling what parsing bytes that
# nobody wrote does, and each has a way to say which row it was.


def read_build(row: Row[Any], where: str) -> Build:
    """Raises CorruptRecord unless the row is what was written, as far as its digests cover it."""
    try:
        require_utf8(row)
        entries = json.loads(row.entries)
        build = Build(
            row.id, row.kernel, row.arch, row.target, version_of(row.nvrtc), tuple(json.loads(row.options)),
            json.loads(row.config), json.loads(row.static), row.source_sha, row.status, row.cache_key,
            row.image_sha, {k: Resources(**v) for k, v in entries.items()}, row.log,
        )  # fmt: skip
        sound = _seal(build, entries) == row.seal and build.id == build_id_of(
            build.kernel, build.target, build.nvrtc, build.options, build.config, build.static,
            build.source_sha, is_filed=True,
        )  # fmt: skip
        if sound:
            require_build(build)
            of = canonical_fields_of(build.kernel)
            return replace(build, kernel=named_kernel(build.kernel), config=filled(build.config, of.config),
                           static=filled(build.static, of.static))  # fmt: skip
    except Exception as e:
        raise CorruptRecord(f"{where}: build {row.id} cannot be read ({e})") from e
    raise CorruptRecord(f"{where}: build {row.id} does not match its own digest")


def read_measurement(row: Row[Any], where: str) -> Observation | None:
    """None, with a warning that names it, unless the row matches its own digest."""
    try:
        require_utf8(row)
        m = Measurement(
            _key_as_filed(row), row.arch, device_of(row.device_props)[0], json.loads(row.config), row.build_id,
            row.outcome, row.provenance, row.reason, row.stage, row.model, row.p50_us, row.p10_us, row.p90_us,
            row.min_us, row.samples, row.error_abs, row.error_rel, json.loads(row.environment_props), row.run,
            row.at, json.loads(row.tags), row.step_id, row.step_us, row.base_step_us, row.base_id,
        )  # fmt: skip
        problem_id = ids_as_filed(m.problem).problem
        named = measurement_id_of(m, problem_id, json.loads(row.device_props)) == row.id
        if named and is_sealed(t.measurement, row):
            require_measurement(m)
            config = filled(m.config, canonical_fields_of(row.kernel).config)
            return Observation(row.id, replace(m, problem=m.problem.filled(), config=config))
    except Exception as e:
        warn_skipped(where, "measurement", row.id, f"cannot be read ({e})")
        return None
    warn_skipped(where, "measurement", row.id, "does not match its own digest")
    return None


def read_winner(row: Row[Any], where: str) -> Winner | None:
    """None, with a warning that names it, unless it is as it was chosen, and its problem and device as they were named.

    Its configuration is the build's: whoever serves it asks `read_build` first.
    """
    try:
        require_utf8(row)
        rests_on = {"problem": row.static, "device": row.device_props, "build": row.config, "trial": row.fields}
        if lost := [name for name, what in rests_on.items() if what is None]:
            raise ValueError(f"its {lost[0]} is not there")
        if not is_sealed(t.winner, row, fields=row.fields):
            raise ValueError("it does not match its own seal")
        key = _key_as_filed(row)
        ids = ids_as_filed(key)
        if (ids.problem, ids.cell) != (row.problem_id, row.cell):
            raise ValueError("its problem does not match its digest")
        device, device_id = device_of(row.device_props)
        if device_id != row.device_id:
            raise ValueError("its device does not match its digest")
        why, config = json.loads(row.why), filled(json.loads(row.config), canonical_fields_of(row.kernel).config)
        found = Winner(
            row.id, named_kernel(row.kernel), key.filled(), config, find_arch(row.arch), device,
            row.provenance, row.latency_us, row.build_id, None, row.reason, where, row.margin,
            bool(why.get("stale")), why, row.closure,
        )  # fmt: skip
        require_winner(found)
        require_fields("compiled-in fields", key.static)
        require_device(device)
        return found
    except Exception as e:
        warn_skipped(where, "winner", row.id, f"cannot be read ({e})")
        return None


def read_search(row: Row[Any], where: str) -> dict[str, Any] | None:
    """The summary; None, with a warning that names the row, unless it is what was written."""
    try:
        require_utf8(row)
        if not is_sealed(t.search, row):
            raise ValueError("it does not match its own seal")
        return dict(json.loads(row.summary))
    except Exception as e:
        warn_skipped(where, "search", row.id, f"cannot be read ({e})")
        return None


def _key_as_filed(row: Row[Any]) -> ProblemKey:
    return ProblemKey(row.kernel, json.loads(row.static), json.loads(row.runtime), row.dynamic, json.loads(row.fields))
