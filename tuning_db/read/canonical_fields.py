"""How fields are filed: without those that have their default, and put back where the kernel is installed.

What a row states, and what its id is the digest of, are the filed fields. So a kernel may gain a field: as long as the
default means what was done before, everything that was tuned stays found. What follows: a default never changes, and
no field that is filed loses its default or gains one (tests/host/test_tuning_db_identity.py pins them).

A kernel that is not installed here has no known defaults: its fields are filed, and read, as they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from kerngen.errors import UnknownName
from kerngen.templates import find_kernel
from kerngen.templates.kernel import defaults_of


@dataclass(frozen=True, slots=True)
class Filing:
    """The defaults of one kernel: of a whole problem, of its two parts as ProblemKey has them, and of a config."""

    fields: Mapping[str, Any]
    static: Mapping[str, Any]
    runtime: Mapping[str, Any]
    config: Mapping[str, Any]


_AS_GIVEN = Filing({}, {}, {}, {})
_KNOWN: dict[tuple[type[Any], type[Any]], Filing] = {}


def filing_of(kernel: str) -> Filing:
    """The defaults by which `kernel` is filed."""
    try:
        found = find_kernel(kernel)
    except UnknownName:
        return _AS_GIVEN
    classes = found.problem_type, found.config_type
    if classes not in _KNOWN:
        _KNOWN[classes] = _filing(*classes, own_buckets=hasattr(found.spec, "bucket"))
    return _KNOWN[classes]


def _filing(problem: type[Any], config: type[Any], own_buckets: bool) -> Filing:
    fields = defaults_of(problem)
    static = {k: v for k, v in fields.items() if k not in problem.RUNTIME}
    # What a spec's own `bucket` returns need not be fields: it leaves out itself what a new field must not change.
    bucketed = () if own_buckets else (n for n in problem.RUNTIME if n != problem.DYNAMIC)
    return Filing(fields, static, {n: round_up(fields[n]) for n in bucketed}, defaults_of(config))


def round_up(value: Any, steps: int = 1) -> Any:
    """The power of two at or above a positive int, or the multiple of one of so many parts of that power; anything else
    as it is.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    step = max(1, (1 << (value - 1).bit_length()) // steps)
    return ceil(value / step) * step
