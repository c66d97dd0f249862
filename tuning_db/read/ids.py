"""Ids in the tuning database: canonical JSON, digests of it, and the keys of problems.

Every id is the sha256 of canonical JSON of what the thing is, so that two databases merge by set union. Values here
hold all fields of a problem; ids are of what is filed (see canonical_fields.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import Kernel, fields_of, filled, static_fields, trimmed
from kerngen.tuning_db.read.canonical_fields import (
    FINER_STEPS,
    bucket,
    canonical_fields_of,
    filed_kernel,
    finer,
    named_kernel,
    round_up,
)

# Of the recipes, in every digest that names a row or seals one; another one needs a migration.
ID_VERSION = 2
MEASUREMENT_VERSION = 3  # of a measurement's id
SEAL_VERSION = 1
_AS_THEY_ARE = frozenset((str, int, bool, type(None)))
LATER = frozenset(("step_id", "step_us", "base_step_us", "base_id"))  # columns that older rows were sealed without


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces; floats in hexadecimal, so that every platform writes the same."""
    return _ENCODER.encode(_exact(value))


def _exact(value: Any) -> Any:
    if value.__class__ in _AS_THEY_ARE:
        return value
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {str(k): _exact(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(v) for v in value]
    return value


def digest(value: Any) -> str:
    """sha256 of `canonical(value)`, in hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def seal_of(table: str, row: Mapping[str, Any]) -> str:
    """What a row's `seal` must be: the digest of all its other columns, as they are stored; of LATER where it is not
    null.
    """
    content = {name: v for name, v in row.items() if name != "seal" and not (v is None and name in LATER)}
    return digest({"v": SEAL_VERSION, "table": table, "row": content})


@dataclass(frozen=True, slots=True)
class ProblemKey:
    """A problem as the database files it.

    static: the compiled-in fields. runtime: the other fields, bucketed, but for the dynamic one. dynamic: the
    value of the field that Problem.DYNAMIC names; None for a kernel that has none. fields: the whole problem as
    it was asked for, no part of its identity.
    """

    kernel: str
    static: dict[str, Any]
    runtime: dict[str, Any]
    dynamic: int | None
    fields: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def static_key(self) -> str:
        return self.ids().static_key

    @property
    def cell(self) -> str:
        return self.ids().cell

    @property
    def id(self) -> str:
        return self.ids().problem

    @property
    def dynamic_name(self) -> str:
        """What its points are counted in: num_tokens, kv_len; "dynamic" of a kernel that is not installed."""
        known = self.kernel in kernel_names()
        return str(find_kernel(self.kernel).problem_type.DYNAMIC) if known else "dynamic"

    @property
    def flat(self) -> dict[str, Any]:
        """Compiled-in fields, bucketed fields, then the dynamic one under its own name."""
        return self.static | self.runtime | ({} if self.dynamic is None else {self.dynamic_name: self.dynamic})

    def filed(self) -> ProblemKey:
        """As a row of it states it: under the names that are filed, without the fields that have their default."""
        of = canonical_fields_of(self.kernel)
        return ProblemKey(filed_kernel(self.kernel), trimmed(self.static, of.static), trimmed(self.runtime, of.runtime),
                          self.dynamic, trimmed(self.fields, of.fields))  # fmt: skip

    def filled(self) -> ProblemKey:
        """As it is known here: with them."""
        of = canonical_fields_of(self.kernel)
        return ProblemKey(named_kernel(self.kernel), filled(self.static, of.static), filled(self.runtime, of.runtime),
                          self.dynamic, filled(self.fields, of.fields))  # fmt: skip

    def ids(self) -> ProblemIds:
        of = canonical_fields_of(self.kernel)
        return ids_as_filed(ProblemKey(filed_kernel(self.kernel), trimmed(self.static, of.static),
                                       trimmed(self.runtime, of.runtime), self.dynamic))  # fmt: skip


class ProblemIds(NamedTuple):
    """static_key: what is compiled in. cell: all but the dynamic value, the line along which tuned points lie."""

    static_key: str
    cell: str
    problem: str


# A cache: each problem is looked up some twenty times while a board's results files become a database.
_IDS: dict[tuple[str, str, str, int | None], ProblemIds] = {}
_MOST_IDS = 20_000


def ids_as_filed(key: ProblemKey) -> ProblemIds:
    """The ids of a problem whose fields are as filed: what a row must match, whatever is installed here."""
    of = key.kernel, repr(key.static), repr(key.runtime), key.dynamic
    if (ids := _IDS.get(of)) is None:
        cell = digest({"v": ID_VERSION, "kernel": key.kernel, "static": key.static, "runtime": key.runtime})
        problem = digest({"v": ID_VERSION, "cell": cell, "dynamic": key.dynamic})
        ids = ProblemIds(_static_key(key.kernel, key.static), cell, problem)
        if len(_IDS) < _MOST_IDS:
            _IDS[of] = ids
    return ids


def static_key(kernel: str, static: dict[str, Any]) -> str:
    """Identity of what is compiled in: sha256 over the kernel's name and the static fields of its problem."""
    return _static_key(filed_kernel(kernel), trimmed(static, canonical_fields_of(kernel).static))


def static_key_as_filed(kernel: str, static: dict[str, Any]) -> str:
    """As `static_key`, of a kernel and fields that are as filed."""
    return _static_key(kernel, static)


def _static_key(kernel: str, static: dict[str, Any]) -> str:
    return digest({"v": ID_VERSION, "kernel": kernel, "static": static})


def problem_key(kernel: Kernel, problem: Any) -> ProblemKey:
    """How `problem` is filed and looked up.

    Runtime fields other than the dynamic one are bucketed by the spec's `bucket(problem) -> dict` where it has
    one; otherwise integers are rounded up to a power of two, those of Problem.FINER to a sixteenth of it, and other
    values are kept as they are.
    """
    fields = fields_of(problem)
    runtime = bucketed(kernel, problem)
    dynamic = int(fields[problem.DYNAMIC]) if problem.DYNAMIC else None
    return ProblemKey(kernel.name, static_fields(problem), runtime, dynamic, fields)


def bucketed(kernel: Kernel, problem: Any) -> dict[str, Any]:
    """The runtime fields of `problem` but for the dynamic one, as they are filed and looked up."""
    own: Callable[[Any], dict[str, Any]] | None = getattr(kernel.spec, "bucket", None)
    if own is not None:
        return dict(own(problem))
    return {k: bucket(problem, k, getattr(problem, k)) for k in problem.RUNTIME if k != problem.DYNAMIC}


def buckets_above(kernel: Kernel, problem: Any) -> Iterator[dict[str, Any]]:
    """`bucketed(kernel, problem)`, then with larger buckets of Problem.FINER, up to the next power of two of each."""
    own = bucketed(kernel, problem)
    names = [] if hasattr(kernel.spec, "bucket") else finer(problem)
    for sizes in product(*(_sizes_above(own[name]) for name in names)):
        yield own | dict(zip(names, sizes, strict=True))


def _sizes_above(size: int) -> list[int]:
    return [n for n in range(size, round_up(size) + 1) if round_up(n, FINER_STEPS) == n]


def coordinates(runtime: dict[str, Any]) -> tuple[Any, ...]:
    """A cell's bucketed fields as something to look it up by."""
    return tuple([runtime[k] for k in sorted(runtime)])
