"""What a row must be to be served, beyond matching its digests: whoever writes rows can make those, too.

All of it raises ValueError, in words that quote what was found. It asks for no more than any kerngen has written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any, TypeGuard

from kerngen.arch import Device
from kerngen.compiler.compile import Resources
from kerngen.errors import is_printable_name
from kerngen.tuning_db.read.values import PROVENANCES, Build, Measurement, Winner

_SHA = re.compile(r"[0-9a-f]{64}")
_SOURCE = re.compile(r"[0-9a-f]{64}(\.\d+)?")  # read/freshness.py
_TARGET = re.compile(r"(sm|compute)_\d{2,3}[af]?")
_DEVICE_TYPES = {f.name: f.type for f in fields(Device)}  # as annotations are written: "int", "float", "str"
_RESOURCES = tuple(f.name for f in fields(Resources))
_FIGURES = ("p50_us", "p10_us", "p90_us", "min_us", "step_us", "base_step_us")


def require_build(b: Build) -> None:
    """Of a compile: names, digests, and what its entry points take."""
    _require_name("kernel", b.kernel)
    _require("target", b.target, _matches(_TARGET, b.target))
    _require("NVRTC", b.nvrtc, len(b.nvrtc) == 2 and all(map(_is_count, b.nvrtc)))
    _require("options", b.options, all(map(is_printable_name, b.options)))
    require_fields("configuration", b.config)
    require_fields("compiled-in fields", b.static)
    _require("source", b.source_sha, _matches(_SOURCE, b.source_sha))
    _require("key", b.key, _matches(_SHA, b.key))
    _require("image", b.image_sha, b.image_sha is None or _matches(_SHA, b.image_sha))
    for name, resources in b.entries.items():
        _require_name("entry point", name)
        require_resources(resources)


def require_resources(r: Resources) -> None:
    for name in _RESOURCES:
        _require(name, value := getattr(r, name), _is_count(value))


def require_winner(w: Winner) -> None:
    """Of a winner: what it is for, how it was known, and its figures; not its board and its compiled-in fields, which
    many winners share.
    """
    _require_name("kernel", w.kernel)
    _require("id", w.id, _matches(_SHA, w.id))
    _require("build", w.build_id, _matches(_SHA, w.build_id))
    _require("provenance", w.provenance, w.provenance in PROVENANCES)
    us, is_carried = w.latency_us, w.provenance == "carried"
    _require(
        f"time of what is {w.provenance}",
        us,
        us is None if is_carried else us is not None and _is_number(us) and us > 0,
    )
    _require("margin", w.margin, w.margin is None or _is_number(w.margin))
    _require("reason", w.reason, isinstance(w.reason, str))
    _require("closure", w.closure, isinstance(w.closure, str))
    _require("stale", w.stale, isinstance(w.stale, bool))
    key = w.problem
    require_fields("runtime fields", key.runtime)
    require_fields("fields", {name: value for name, value in key.fields.items() if name not in key.static})
    _require("dynamic field", key.dynamic, key.dynamic is None or _is_count(key.dynamic))


def require_device(device: Device) -> None:
    """Of a board: each figure is one, and none is below zero."""
    for name, kind in _DEVICE_TYPES.items():
        value = getattr(device, name)
        if kind == "str":
            _require(f"board's {name}", value, isinstance(value, str) and (not value or is_printable_name(value)))
        else:
            _require(f"board's {name}", value, _is_number(value) and value >= 0)
    _require("board's num_sms", device.num_sms, type(device.num_sms) is int)
    _require_name("board", device.name)


def require_measurement(m: Measurement) -> None:
    """Of an observation, what Measurement itself does not ask: that its figures are numbers, and its names names."""
    _require_name("kernel", m.problem.kernel)
    require_fields("fields", m.problem.fields | m.problem.static | m.problem.runtime)
    _require("dynamic field", m.problem.dynamic, m.problem.dynamic is None or _is_count(m.problem.dynamic))
    require_device(m.device)
    require_fields("configuration", m.config)
    for name in _FIGURES:
        value = getattr(m, name)
        _require(name, value, value is None or (_is_number(value) and value >= 0))
    for name in ("error_abs", "error_rel"):  # what is wrong may be off by infinity, or by no number
        value = getattr(m, name)
        _require(name, value, value is None or (isinstance(value, int | float) and not isinstance(value, bool)))
    _require("samples", m.samples, _is_count(m.samples))
    for name in ("reason", "model", "run", "at"):
        _require(name, getattr(m, name), isinstance(getattr(m, name), str))
    for name in ("environment", "tags"):
        _require(name, getattr(m, name), isinstance(getattr(m, name), dict))


def require_fields(what: str, values: Mapping[str, Any]) -> None:
    """Fields of a problem or a configuration: names, each with one value of JSON that is no list and no object."""
    for name, value in values.items():
        if not _is_name(name):
            raise ValueError(f"its {what} have one called {name!r:.80}")
        kind = type(value)
        if not (value is None or kind in (bool, int) or (kind is str and (not value or _is_name(value)))
                or (kind is float and math.isfinite(value))):  # fmt: skip
            raise ValueError(f"{name} among its {what} is {value!r:.80}")


def require_indices(what: str, indices: Iterable[object], length: int) -> None:
    """Places in a list: one below zero would be counted from its end."""
    for index in indices:
        _require(what, index, _is_count(index) and index < length)


def _require_name(what: str, name: object) -> None:
    _require(what, name, isinstance(name, str) and (name.isidentifier() if what == "kernel" else _is_name(name)))


@lru_cache(maxsize=4096)
def _is_name(text: str) -> bool:
    return is_printable_name(text)


def _require(what: str, value: object, holds: bool) -> None:
    if not holds:
        raise ValueError(f"its {what} is {value!r:.80}")


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0
