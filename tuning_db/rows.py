"""Values to rows and back: ids, digests and JSON columns."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from typing import Any

import zstandard
from sqlalchemy import Row

from kerngen.arch import Arch, Device, find_arch
from kerngen.compile import Cubin, Ptx, Resources, cache_key, nvrtc_version, source_key
from kerngen.errors import CorruptRecord, DatabaseError, UsageError
from kerngen.tuning_db.freshness import source_sha
from kerngen.tuning_db.records import Build, Measurement, Observation, ProblemKey, Winner, digest, static_key

log = logging.getLogger(__name__)

ZSTD_LEVEL = 12
_IMAGE_BYTES_MOST = 1 << 28


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


def build_id_of(
    kernel: str,
    target: str,
    nvrtc: tuple[int, int],
    options: tuple[str, ...],
    config: dict[str, Any],
    static: dict[str, Any],
    sha: str,
) -> str:
    return digest({
        "v": 1, "kernel": kernel, "target": target, "nvrtc": list(nvrtc), "options": list(options),
        "config": config, "static": static, "source": sha,
    })  # fmt: skip


def build_row(b: Build) -> dict[str, Any]:
    entries = {name: asdict(r) for name, r in sorted(b.entries.items())}
    facts = {
        "id": b.id,
        "arch": b.arch,
        "status": b.status,
        "key": b.key,
        "image": b.image_sha,
        "entries": entries,
    }
    return {
        "id": b.id, "kernel": b.kernel, "arch": b.arch, "target": b.target,
        "nvrtc": f"{b.nvrtc[0]}.{b.nvrtc[1]}", "options": to_json(list(b.options)), "config": to_json(b.config),
        "static_key": static_key(b.kernel, b.static), "static": to_json(b.static), "source_sha": b.source_sha,
        "status": b.status, "cache_key": b.key, "image_sha": b.image_sha, "entries": to_json(entries),
        "registers": b.registers, "spill_bytes": b.spill_bytes, "static_smem_bytes": b.static_smem_bytes,
        "log": b.log, "seal": digest(facts),
    }  # fmt: skip


def settled(m: Measurement) -> Measurement:
    """`m` as it will be read back: plain floats, no NaN (SQLite keeps none), and the time of writing."""

    def plain(value: float | None) -> float | None:
        return None if value is None or math.isnan(value) else float(value)

    return replace(
        m, p50_us=plain(m.p50_us), p10_us=plain(m.p10_us), p90_us=plain(m.p90_us), min_us=plain(m.min_us),
        samples=int(m.samples), error_abs=plain(m.error_abs), error_rel=plain(m.error_rel), at=m.at or now(),
    )  # fmt: skip


def measurement_id_of(m: Measurement) -> str:
    stated: dict[str, Any] = {
        "v": 1, "problem": m.problem.id, "fields": m.problem.fields, "arch": m.arch, "device": asdict(m.device),
        "config": m.config, "build": m.build_id, "outcome": m.outcome, "reason": m.reason,
        "provenance": m.provenance, "stage": m.stage, "model": m.model, "p50": m.p50_us, "p10": m.p10_us,
        "p90": m.p90_us, "min": m.min_us, "samples": m.samples, "error_abs": m.error_abs,
        "error_rel": m.error_rel, "tags": m.tags,
    }  # fmt: skip
    if m.provenance == "measured":
        stated |= {"environment": m.environment, "run": m.run, "at": m.at}
    return digest(stated)


def winner_id_of(key: ProblemKey, arch: str, device: Device) -> str:
    return digest({"v": 1, "problem": key.id, "arch": arch, "device": device.name, "num_sms": device.num_sms})


def decompress(blob: bytes, codec: str, raw_bytes: int) -> bytes | None:
    """None unless `blob` holds exactly `raw_bytes`: a damaged header must not ask for all memory."""
    try:
        if codec != "zstd" or not 0 < raw_bytes < _IMAGE_BYTES_MOST or zstandard.frame_content_size(blob) != raw_bytes:
            return None
        return zstandard.ZstdDecompressor().decompress(blob)
    except (zstandard.ZstdError, TypeError):
        return None


def device_of(props: str) -> Device:
    known = {f.name for f in fields(Device)}
    return Device(**{k: v for k, v in json.loads(props).items() if k in known})


def require_utf8(row: Row[Any]) -> None:
    """Raises ValueError, naming the column, where the database held bytes that are no text (see engine.decode_text)."""
    for name, value in row._mapping.items():
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise ValueError(f"its {name} is not UTF-8")


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
        build = Build(
            row.id, row.kernel, row.arch, row.target, version_of(row.nvrtc), tuple(json.loads(row.options)),
            json.loads(row.config), json.loads(row.static), row.source_sha, row.status, row.cache_key,
            row.image_sha, {k: Resources(**v) for k, v in json.loads(row.entries).items()}, row.log,
        )  # fmt: skip
        sound = build_row(build)["seal"] == row.seal and build.id == build_id_of(
            build.kernel, build.target, build.nvrtc, build.options, build.config, build.static,
            build.source_sha,
        )  # fmt: skip
    except Exception as e:
        raise CorruptRecord(f"{where}: build {row.id} cannot be read ({e})") from e
    if not sound:
        raise CorruptRecord(f"{where}: build {row.id} does not match its own digest")
    return build


def read_measurement(row: Row[Any], where: str) -> Observation | None:
    """None, with a warning that names it, unless the row matches its own digest."""
    try:
        require_utf8(row)
        problem = ProblemKey(row.kernel, json.loads(row.static), json.loads(row.runtime), row.dynamic,
                             json.loads(row.fields))  # fmt: skip
        m = Measurement(
            problem, row.arch, device_of(row.device_props), json.loads(row.config), row.build_id, row.outcome,
            row.provenance, row.reason, row.stage, row.model, row.p50_us, row.p10_us, row.p90_us, row.min_us,
            row.samples, row.error_abs, row.error_rel, json.loads(row.environment_props), row.run, row.at,
            json.loads(row.tags),
        )  # fmt: skip
        sound = measurement_id_of(m) == row.id
    except Exception as e:
        log.warning("%s: measurement %s cannot be read (%s); skipped", where, row.id, e)
        return None
    if not sound:
        log.warning("%s: measurement %s does not match its own digest; skipped", where, row.id)
        return None
    return Observation(row.id, m)


def read_winner(row: Row[Any], where: str) -> Winner | None:
    """None, with a warning that names it, unless its problem and device match their digests and its time is a time.

    Its configuration is the build's: whoever serves it asks `read_build` first.
    """
    try:
        require_utf8(row)
        key = ProblemKey(row.kernel, json.loads(row.static), json.loads(row.runtime), row.dynamic,
                         json.loads(row.fields))  # fmt: skip
        if (key.id, key.cell) != (row.problem_id, row.cell):
            raise ValueError("its problem does not match its digest")
        if digest(json.loads(row.device_props)) != row.device_id:
            raise ValueError("its device does not match its digest")
        if not 0 < row.latency_us < math.inf or not (row.margin is None or math.isfinite(row.margin)):
            raise ValueError(f"latency_us={row.latency_us!r}, margin={row.margin!r}")
        why = json.loads(row.why)
        return Winner(
            row.id, row.kernel, key, json.loads(row.config), find_arch(row.arch), device_of(row.device_props),
            row.provenance, row.latency_us, row.build_id, None, row.reason, where, row.margin,
            bool(why.get("stale")), why,
        )  # fmt: skip
    except Exception as e:
        log.warning("%s: winner %s cannot be read (%s); skipped", where, row.id, e)
        return None
