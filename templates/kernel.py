"""What a kernel folder must hold, and the typed view of it that the rest of kerngen uses.

templates/<name>/
  kernel.cu.jinja   the source; renders constants once, at the top; other bodies beside it where hardware differs
  spec.py           Problem, Config, SPACE and the functions below (no torch, no CuPy: it loads anywhere)
  reference.py      expected(inputs), tolerance(problem): the same thing in eager torch, fp32
  cases.py          CASES, inputs(case, device), case_for(problem): the shapes that tests, bench and tuner share
  bench.py          baselines(case, inputs): what to compare the time with
  traffic.py        optional: traffic(problem, config, arch), what the cost model should know beyond spec.cost
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from kerngen.arch import Arch
from kerngen.errors import ConfigRefused, ProblemError, UsageError

ROOT = Path(__file__).resolve().parent


class Problem(Protocol):
    """What must be computed: a frozen dataclass of ints, strs and bools.

    RUNTIME names the fields that may differ between two launches of one cubin (batch, num_tokens, kv_len); they are
    never rendered. DYNAMIC is the one of them that tuning buckets ("" if there is none). All other fields are
    compiled in. __post_init__ raises ProblemError on fields that contradict each other.
    """

    RUNTIME: tuple[str, ...]
    DYNAMIC: str


@dataclass(frozen=True, slots=True)
class Arg:
    """One kernel argument: `ptr` for a tensor or null, or a scalar passed by value."""

    name: str
    kind: str  # ptr | i32 | i64 | f32


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of one entry point. A kernel may need several, in order (decode, then combine)."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int  # dynamic shared memory
    pdl: bool = False  # programmatic dependent launch: the kernel calls griddepcontrol.wait before it reads
    cluster: tuple[int, int, int] = (1, 1, 1)


@dataclass(frozen=True, slots=True)
class Cost:
    """The least that must be done: bytes through device memory, floating-point operations (an FMA is two)."""

    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one configuration really moves and executes: what an optional `traffic(problem, config, arch)` returns.

    It refines `cost` for the prediction: re-reads, padding to tiles, loads in flight. A list of them gives one per
    launch; a single one describes the first launch, and the others read and write the workspace. All counts are
    totals over the grid but bytes_in_flight and steps, which are per block. None: the predictor estimates it from the
    config.
    """

    dram_bytes: int  # through device memory
    flops: int  # on the tensor cores, tile padding included (an FMA is two)
    l2_bytes: int | None = None  # through L2, re-reads by other blocks included
    smem_bytes: int | None = None  # through shared memory, reads and writes
    cuda_ops: int = 0  # instructions per thread summed over threads, outside the tensor cores (dequant, softmax)
    bytes_in_flight: int | None = None  # of loads that a block keeps outstanding in its main loop
    steps: int = 0  # of a block's main loop: between two of them all its warps wait for each other


@dataclass(frozen=True, slots=True)
class Case:
    """A named problem with what it takes to make its inputs: a seed, and options that only cases.py reads."""

    name: str
    problem: Any
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|out - ref| <= atol + rtol * |ref|, elementwise, and no NaN. `why` says where the figures come from."""

    atol: float
    rtol: float
    why: str


@dataclass(frozen=True)
class Kernel:
    """A kernel folder, loaded. Functions of spec.py are reached through it, so that each call is typed and checked."""

    name: str
    spec: ModuleType

    @property
    def problem_type(self) -> type[Any]:
        return self.spec.Problem

    @property
    def config_type(self) -> type[Any]:
        return self.spec.Config

    @property
    def space(self) -> dict[str, tuple[Any, ...]]:
        """Config field -> its candidate values, ascending where they are numbers."""
        return self.spec.SPACE

    @property
    def args(self) -> dict[str, tuple[Arg, ...]]:
        """Entry point -> its arguments, in order. Arguments called `workspace` are allocated by the launcher."""
        return self.spec.ARGS

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the arguments that the kernel writes and the reference checks."""
        return self.spec.OUTPUTS

    def body(self, problem: Any, config: Any, arch: Arch) -> str:
        """File name of the template that serves `arch`, within the kernel's folder."""
        return self.spec.body(problem, config, arch)

    def why_unsupported(self, problem: Any, arch: Arch) -> str | None:
        """Why no configuration at all can serve `problem` on `arch` (with what does instead), or None."""
        check: Callable[[Any, Arch], str | None] | None = getattr(self.spec, "why_unsupported", None)
        return None if check is None else check(problem, arch)

    def why_invalid(self, problem: Any, config: Any, arch: Arch) -> str | None:
        """Why `config` cannot run `problem` on `arch`, with the numbers, or None if it can."""
        return self.why_unsupported(problem, arch) or self.spec.why_invalid(problem, config, arch)

    def require_valid(self, problem: Any, config: Any, arch: Arch) -> None:
        """Raises ConfigRefused with the reason. Asked before every compile and every launch."""
        if (why := self.why_invalid(problem, config, arch)) is not None:
            raise ConfigRefused(f"{self.name}{describe(problem)} {describe(config)} on {arch}: {why}")

    def default_config(self, problem: Any, arch: Arch) -> Any:
        """A valid configuration that needs no tuning. Always a candidate when tuning."""
        return self.spec.default_config(problem, arch)

    @property
    def max_spill_bytes(self) -> int:
        """What a default configuration may spill, bytes a thread: MAX_SPILL_BYTES of spec.py, or 0."""
        return getattr(self.spec, "MAX_SPILL_BYTES", 0)

    def smem_bytes(self, problem: Any, config: Any, arch: Arch) -> int:
        """Shared memory of a block, static and dynamic together."""
        return self.spec.smem_bytes(problem, config, arch)

    def launches(self, problem: Any, config: Any, arch: Arch) -> tuple[Launch, ...]:
        return self.spec.launches(problem, config, arch)

    def workspace_bytes(self, problem: Any, config: Any, arch: Arch) -> int:
        """Bytes of scratch that the launches share; 0 if the kernel has no `workspace` argument.

        The launcher hands the workspace over zeroed once; a kernel that needs zeros must leave zeros behind.
        """
        size: Callable[[Any, Any, Arch], int] | None = getattr(self.spec, "workspace_bytes", None)
        return 0 if size is None else size(problem, config, arch)

    def cost(self, problem: Any) -> Cost:
        return self.spec.cost(problem)

    @cached_property
    def _refine(self) -> Callable[[Any, Any, Arch], Traffic | list[Traffic]] | None:
        if hasattr(self.spec, "traffic") or not (ROOT / self.name / "traffic.py").is_file():
            return getattr(self.spec, "traffic", None)
        module = import_module(f"kerngen.templates.{self.name}.traffic")
        return module.traffic

    def traffic(self, problem: Any, config: Any, arch: Arch) -> tuple[Traffic, ...] | None:
        """One Traffic per launch, from `traffic` in spec.py or in a traffic.py beside it; None if there is none."""
        if (refine := self._refine) is None:
            return None
        traffic = refine(problem, config, arch)
        return (traffic,) if isinstance(traffic, Traffic) else tuple(traffic)

    @property
    def reference(self) -> ModuleType:
        return import_module(f"kerngen.templates.{self.name}.reference")

    @property
    def cases(self) -> ModuleType:
        return import_module(f"kerngen.templates.{self.name}.cases")

    @property
    def bench(self) -> ModuleType:
        return import_module(f"kerngen.templates.{self.name}.bench")


def fields_of(value: Any) -> dict[str, Any]:
    """A Problem's or Config's fields as a plain dict, in declaration order."""
    return dataclasses.asdict(value)


def static_fields(problem: Any) -> dict[str, Any]:
    """The fields that are compiled in: everything but RUNTIME."""
    return {k: v for k, v in fields_of(problem).items() if k not in problem.RUNTIME}


def describe(value: Any) -> str:
    """[head_dim=512 page_size=16]: how a Problem or Config is written in messages and tables."""
    return "[" + " ".join(f"{k}={v}" for k, v in fields_of(value).items()) + "]"


def parse_fields(cls: type[Any], text: str) -> Any:
    """Build a Problem or Config from "head_dim=512,page_size=16". Unnamed fields keep their defaults.

    Raises UsageError on an unknown field or a value of the wrong type, ProblemError from the dataclass itself.
    """
    # Text in a module with `from __future__ import annotations`, classes in one without.
    types = {f.name: f.type if isinstance(f.type, str) else f.type.__name__ for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, eq, raw = part.partition("=")
        if not eq or key not in types:
            raise UsageError(f"{part!r} is not FIELD=VALUE of {cls.__module__}.{cls.__name__}",
                             hint=f"fields: {', '.join(types)}")  # fmt: skip
        values[key] = _parse_value(key, raw, types[key])
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    if absent := [name for name in required if name not in values]:
        raise ProblemError(f"{', '.join(absent)} must be given: there is no default",
                           hint=f"fields: {', '.join(types)}")  # fmt: skip
    return cls(**values)


def _parse_value(key: str, raw: str, type_name: str) -> Any:
    if type_name == "bool":
        if raw.lower() in ("1", "true", "yes"):
            return True
        if raw.lower() in ("0", "false", "no"):
            return False
    elif type_name in ("int", "float"):
        try:
            return int(raw) if type_name == "int" else float(raw)
        except ValueError:
            pass
    elif type_name == "str":
        return raw
    raise UsageError(f"{key}={raw!r} is not of type {type_name}")
