"""Canonical fields: rows hold a problem's and a configuration's fields without defaults, under their first names.

A row's id is the digest of its canonical fields, so a kernel may gain a field: as long as the default means what was
done before, everything that was tuned stays found. Therefore a default never changes, and no field that is filed loses
its default or gains one (tests/host/test_tuning_db_identity.py pins them).

A kernel that is not installed here has no known defaults: its fields are filed, and read, as they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from math import ceil
from typing import Any

from kerngen.arch import Device
from kerngen.errors import UnknownName
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import Defaults, Kernel, defaults_of


@dataclass(frozen=True, slots=True)
class CanonicalFields:
    """How one kernel is filed: a whole problem, its two parts as ProblemKey has them, and a config."""

    fields: Defaults
    static: Defaults
    runtime: Defaults
    config: Defaults
    dynamic: str = ""  # what the problem's dynamic field is filed as


FINER_STEPS = 16  # buckets of a field between zero and the power of two at or above it
_NOTHING = Defaults({})
_AS_GIVEN = CanonicalFields(_NOTHING, _NOTHING, _NOTHING, _NOTHING)
_KNOWN: dict[tuple[type[Any], type[Any]], CanonicalFields] = {}


def canonical_fields_of(kernel: str) -> CanonicalFields:
    """The defaults by which `kernel` is filed. kernel: its name, or the one that it is filed under."""
    if (found := _find(kernel)) is None:
        return _AS_GIVEN
    classes = found.problem_type, found.config_type
    if classes not in _KNOWN:
        _KNOWN[classes] = _canonical_fields(*classes, own_buckets=hasattr(found.spec, "bucket"))
    return _KNOWN[classes]


def _canonical_fields(problem: type[Any], config: type[Any], own_buckets: bool) -> CanonicalFields:
    fields = defaults_of(problem)
    # What a spec's own `bucket` returns need not be fields: it leaves out itself what a new field must not change.
    others = [n for n in problem.RUNTIME if n != problem.DYNAMIC]
    runtime = Defaults({n: MISSING if own_buckets else bucket(problem, n, fields[n]) for n in others}, fields.names)
    static = fields.only(n for n in fields if n not in problem.RUNTIME)
    return CanonicalFields(
        fields, static, runtime, defaults_of(config), fields.names.get(problem.DYNAMIC, problem.DYNAMIC)
    )


def filed_kernel(name: str) -> str:
    """What rows call the kernel `name`."""
    found = _find(name)
    return name if found is None else found.filed


def named_kernel(name: str) -> str:
    """What the kernel is called that rows call `name`."""
    found = _find(name)
    return name if found is None else found.name


def _find(name: str) -> Kernel | None:
    """The kernel of that name, else the one that is filed under it; None where it is not installed."""
    try:
        return find_kernel(name)
    except UnknownName:
        return next((k for k in map(find_kernel, kernel_names()) if k.filed == name), None)


def _filed_names(cls: type[Any]) -> dict[str, str]:
    return {f.name: str(f.metadata.get("filed", f.name)) for f in fields(cls)}


_DEVICE = _filed_names(Device)


def filed_device(device: Device) -> dict[str, Any]:
    """A board's figures under the names that rows have them."""
    return {_DEVICE[name]: value for name, value in asdict(device).items()}


def device_from(stated: Mapping[str, Any]) -> Device:
    """The board that `filed_device` gave `stated` of; figures that are none here are left out. Raises TypeError."""
    return Device(**{name: stated[filed] for name, filed in _DEVICE.items() if filed in stated})


def finer(problem: Any) -> tuple[str, ...]:
    """The runtime fields of a problem, or of its class, that are bucketed at FINER_STEPS: Problem.FINER."""
    return getattr(problem, "FINER", ())


def bucket(problem: Any, name: str, value: Any) -> Any:
    """The bucket of a runtime field's value. problem: or its class."""
    return round_up(value, FINER_STEPS if name in finer(problem) else 1)


def round_up(value: Any, steps: int = 1) -> Any:
    """The power of two at or above a positive int, or the multiple of one of so many parts of that power; anything else
    as it is.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    step = max(1, (1 << (value - 1).bit_length()) // steps)
    return ceil(value / step) * step
