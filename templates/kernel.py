"""The contract of a kernel folder, and the typed view of it that the rest of kerngen uses.

templates/<name>/
  kernel.cu.jinja   the source; renders constants once, at the top; other bodies beside it where hardware differs
  spec.py           Problem, Config, BODIES and the functions of `Spec` (no torch, no CuPy: it loads anywhere)
  op.py             functions from tensors to a `Call`: the only place that knows how tensors become a problem
  reference.py      expected(problem, inputs), tolerance(problem): the same thing in eager torch, fp32; where outputs
                    are stored in another form than they are compared in, values(problem, name, tensor), and where
                    their tolerances differ tolerance_of(problem, name)
  cases.py          CASES, inputs(case, device), case_for(problem): the shapes that tests, bench and tuner share; where
                    the op that asks for a case takes more than `Kernel.op_call` knows, op_call(case, inputs)
  bench.py          baselines(case, inputs): what to compare the time with
  traffic.py        optional: traffic(problem, config, target), what the cost model should know beyond spec.cost
  candidates.py     optional: candidates(problem, target), where they are too many lines for spec.py
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol

from kerngen.arch import Arch, Target
from kerngen.compiler.source import place_of, reason_of, shown
from kerngen.errors import ConfigRefused, LaunchError, ProblemError, TemplateError, UnknownName, UsageError
from kerngen.identity import without_comment_lines
from kerngen.templates.common.rows.spec import why_no_dtype

ROOT = Path(__file__).resolve().parent
POINTERS = ("ptr", "ptrs")  # kinds of Arg


class Problem(Protocol):
    """What must be computed: a frozen dataclass of ints, strs and bools.

    RUNTIME names the fields that may differ between two launches of one cubin (batch, num_tokens, kv_len); they are
    never rendered. DYNAMIC is the one of them that tuning buckets ("" if there is none). All other fields are
    compiled in. __post_init__ raises ProblemError on fields that contradict each other. REACH, if there is one: what is
    tuned for a value of DYNAMIC serves no value that is smaller by more than this factor. TUNED_AS_DEFAULT, if there is
    one, names compiled-in fields that hardly change what a configuration takes, as where things lie in memory: what is
    tuned with their defaults serves their other values too.

    The tuning database files a Problem and a Config without the fields that have their default. So a new field with a
    default that means what was done before keeps everything that was tuned, and a default, once shipped, never changes.
    A field that is renamed stays filed under its old name if its metadata says {"filed": "old_name"}; a kernel, if its
    spec.py says FILED = "old_name".
    """

    RUNTIME: tuple[str, ...]
    DYNAMIC: str


class TokenProblem:
    """Base of a Problem over rows of tokens: one cubin serves any num_tokens, and tuning has points along it."""

    __slots__ = ()
    RUNTIME: ClassVar[tuple[str, ...]] = ("num_tokens",)
    DYNAMIC: ClassVar[str] = "num_tokens"
    REACH: ClassVar[float] = 2  # a model's tokens are tuned at powers of two


@dataclass(frozen=True, slots=True)
class Arg:
    """One kernel argument: `ptr` for a tensor or null, `ptrs` for a tuple of them, a scalar passed by value, or `map`.

    A kernel gets `ptrs` as the address of an array of addresses, and `map` as a CUtensorMap of the tensor that the
    argument `of` names: the launcher makes it as the spec's `tensor_map` says, and no call passes it. align: what a
    pointer's address is a multiple of, in bytes: 16 where the kernel reads vectors. contiguous: False where another
    argument, or the problem, says how far apart the tensor's rows are. page_heads: of a paged cache, the problem's
    field that says how many heads a page has in memory (values.py, page_strides); it must lie so, and be contiguous
    where that field is 0. only: the problem's flag without which the entry has no such argument; empty for one that is
    always there.
    """

    name: str
    kind: str  # ptr | ptrs | i32 | i64 | f32 | map
    align: int = 16
    contiguous: bool = True
    of: str = ""
    page_heads: str = ""
    only: str = ""


def args(kind: str, *names: str, align: int = 16, page_heads: str = "") -> tuple[Arg, ...]:
    """Arguments of one kind, one after the other."""
    return tuple(Arg(name, kind, align, page_heads=page_heads) for name in names)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """How bulk copies see a tensor, as 16-bit elements (PTX ISA, "Tensors"): what of a box lies outside is zeros.

    dims: elements along each axis, innermost first, all positive. strides: of all axes but the innermost, in bytes,
    multiples of 16. box: what one copy takes, up to 256 of each axis. swizzled: boxes land in shared memory with the
    128-byte swizzle, of 64 elements of the innermost axis; if not, as they are. l2_bytes: that L2 fetches for a miss,
    128 or 256; what streams once has more of an H200's memory by 128 (docs/experiments.md).
    """

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzled: bool = True
    l2_bytes: int = 128


Choices = tuple[Any, ...] | Callable[[Any, Target], tuple[Any, ...]]


def _everywhere(arch: Arch) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Body:
    """One source of a kernel: where it serves, what it is called with, and what may vary in it.

    template: file in the kernel's folder. args: entry point -> its arguments in order; one called `workspace` is
    allocated by the launcher. space: Config field -> candidate values, ascending where they are numbers, or a function
    of (problem, target) that gives them; a field that is left out keeps its default. serves: which arches it runs on.
    when: Config fields that choose this body where several serve an arch; they are part of its space. proven: False
    where no GPU has confirmed it yet. It is compiled, checked and run where a Config asks for it; nothing chooses it.
    revision: of what it takes to run. What was measured or predicted of a configuration holds for all sources of one
    revision; whoever changes how long the body takes raises it (CONTRIBUTING.md says when).
    """

    template: str
    args: Mapping[str, tuple[Arg, ...]]
    space: Mapping[str, Choices]
    serves: Callable[[Arch], bool] = _everywhere
    when: Mapping[str, Any] = field(default_factory=dict)
    proven: bool = True
    revision: int = 1

    def choices(self, problem: Any, target: Target) -> dict[str, tuple[Any, ...]]:
        """Config field -> its candidate values for `problem` on `target`."""
        given = {k: v(problem, target) if callable(v) else v for k, v in self.space.items()}
        return given | {k: (v,) for k, v in self.when.items()}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of one entry point. A kernel may need several, in order (decode, then combine)."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int  # dynamic shared memory
    pdl: bool = False  # programmatic dependent launch: the kernel calls griddepcontrol.wait before it reads
    # Before that wait it reads what was complete when the forward's first kernel, embed, let its successor start. Only
    # in a forward is it launched with pdl: elsewhere the kernel right before may have written what it reads.
    reads_ahead: bool = False
    cluster: tuple[int, int, int] = (1, 1, 1)
    # Its blocks wait for each other, so they are started all together or not at all: a cooperative launch, which waits
    # for its predecessor's end. An executor that knows its stream to be the only one with such kernels launches it as
    # any other.
    cooperative: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """The least that must be done: bytes through device memory, floating-point operations (an FMA is two)."""

    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one configuration really moves and executes: what an optional `traffic(problem, config, target)` returns.

    It refines `cost` for the prediction: re-reads, padding to tiles, loads in flight, dependences. A list of them gives
    one per launch; a single one describes the first launch, and the others read and write the workspace. Counts are
    totals over the grid, where it is not said that they are of a block or a unit. None: the predictor estimates it from
    the config.
    """

    dram_bytes: int  # through device memory
    flops: int  # on the tensor cores, tile padding included (an FMA is two)
    l2_bytes: int | None = None  # through L2, re-reads by other blocks included
    smem_bytes: int | None = (
        None  # through shared memory, reads and writes; 128 for each line of L1 that a load touches
    )
    cuda_ops: int = 0  # instructions per thread summed over threads, outside the tensor cores (dequant, softmax)
    bytes_in_flight: int | None = None  # of loads that a block keeps outstanding in its main loop
    memory_share: float = 1.0  # of the memory's rate, what is reached: less where many SMs have no block
    copies: bool = False  # what is in flight are asynchronous copies, and goes on while warps compute
    # What executes `flops`: mma (mma.sync), what a block's warps issue together (wgmma, tcgen05), or roles: wgmma by
    # warpgroups that do nothing but multiply and one that does nothing but copy.
    tensor: str = "mma"
    units: int | None = None  # pieces of work, dealt to the blocks, those beyond having none; None: each block is one
    clocks: float = 0  # of a unit: what its instructions take because each waits for the one before
    joins: float = 0  # of a unit: so often its warps add up through shared memory what they split
    join_bytes: int = 0  # through shared memory, in all these
    waits: float = (
        0  # of a block: trips to L2, one after another, while it has nothing else to do: meeting other blocks
    )
    # Its blocks are resident while the launch before it runs, and poll for what that writes: it is begun for nothing.
    hidden: bool = False
    fit: str = ""  # which of the kernel's fitted constants (kerngen/cost/fitted.toml) apply to the launch


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


class Spec(Protocol):
    """What a spec.py holds. Optional beside it: why_unsupported(problem, target) -> str | None (left out: whether the
    arch has problem.dtype), smem_bytes(problem, config, target) -> int: static and dynamic, outputs(problem): which of
    OUTPUTS the kernel writes for it, workspace_bytes(problem, config, target) -> int, traffic(problem, config, target),
    tensor_map(problem, config, of, shape) -> TensorMap | None for arguments that are maps, MAX_SPILL_BYTES,
    COMPARES_SIZES: True where defaults of other values of the dynamic field may be faster between powers of two,
    replaces(problem): (kernel, fields of its problem) of each that a step would ask in place of this one. Its Config
    has a field `fused` then: whether the step asks this one. It is no part of what is rendered;
    expected_registers(problem, config, target) -> int, or by entry: a thread's, before the configuration is compiled,
    and constants(problem, config, arch) -> dict: what spec.py and its templates both know (`k` there), said once; its
    problem comes without RUNTIME fields.

    And one of candidates(problem, target): 3 to 12 sensible configurations, the valid one that the cost model ranks
    first being the default; and default_config(problem, target): the default itself, where there is nothing to rank.
    ranked_as(problem, config) -> (problem, config): what is timed by the cost model in their place, where a default
    must be the same for several problems.

    What sees an Arch, `BODIES` and `constants`, decides what is compiled: a cubin depends on the arch alone. All that
    is chosen at launch sees the Target, the board included.
    """

    Problem: type[Any]
    Config: type[Any]
    BODIES: tuple[Body, ...]
    OUTPUTS: tuple[str, ...]

    def why_invalid(self, problem: Any, config: Any, target: Target, /) -> str | None: ...

    def launches(self, problem: Any, config: Any, target: Target, /) -> tuple[Launch, ...]: ...

    def cost(self, problem: Any, /) -> Cost: ...


@dataclass(frozen=True)
class Kernel:
    """A kernel folder, loaded. Everything that others ask of a spec.py goes through here, typed."""

    name: str
    spec: Spec

    @property
    def filed(self) -> str:
        """The name that the tuning database has it under: FILED of spec.py, where it was called otherwise before."""
        return getattr(self.spec, "FILED", self.name)

    @property
    def about(self) -> str:
        """The first line of spec.py's docstring, without the kernel's name."""
        return (self.spec.__doc__ or "").strip().split("\n")[0].removeprefix(f"{self.name}: ")

    @cached_property
    def folder(self) -> Path:
        """Where it lies: in this package, or wherever its author keeps it."""
        return Path(str(import_module(f"kerngen.templates.{self.name}.spec").__file__)).resolve().parent

    @property
    def shared(self) -> tuple[Path, ...]:
        """The folders in which `common/FILE` is looked for, in order: ours, and the one beside the kernel's folder."""
        return tuple(dict.fromkeys((ROOT / "common", self.folder.parent / "common")))

    @cached_property
    def folder_digest(self) -> str:
        """sha256 over what decides how it is rendered, refused and launched: its folder, and what it may include.

        Lines of a .cuh that are blank or a comment do not.
        """
        hashed = hashlib.sha256()
        for folder in (*self.shared, self.folder):
            for path in sorted(folder.rglob("*")):
                if path.suffix in (".py", ".jinja", ".cuh"):
                    name = path.relative_to(folder).as_posix()
                    hashed.update(name.encode() + b"\0" + without_comment_lines(name, path.read_bytes()) + b"\0")
        return hashed.hexdigest()

    @property
    def problem_type(self) -> type[Any]:
        return self.spec.Problem

    @property
    def config_type(self) -> type[Any]:
        return self.spec.Config

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the arguments that the kernel writes and the reference checks."""
        return self.spec.OUTPUTS

    def outputs_of(self, problem: Any) -> tuple[str, ...]:
        """Those of them that it writes for `problem`: all, unless spec.py's `outputs` says which."""
        narrowed: Callable[[Any], tuple[str, ...]] | None = getattr(self.spec, "outputs", None)
        return self.outputs if narrowed is None else narrowed(problem)

    def bodies(self, arch: Arch) -> tuple[Body, ...]:
        """The bodies that may run on `arch`. Raises ProblemError where there is none."""
        if not (found := tuple(b for b in self.spec.BODIES if b.serves(arch))):
            raise ProblemError(f"{self.name} has no body for {arch}")
        return found

    def body(self, config: Any, arch: Arch) -> Body:
        """The body that `config` means on `arch`. Raises ConfigRefused where none of them is meant."""
        for body in self.bodies(arch):
            if all(getattr(config, k) == v for k, v in body.when.items()):
                return body
        raise ConfigRefused(f"{self.name} {describe(config)}: no body for {arch} has these fields")

    def why_unsupported(self, problem: Any, target: Target) -> str | None:
        """Why no configuration at all can serve `problem` on `target` (with what does instead), or None."""
        check: Callable[[Any, Target], str | None] | None = getattr(self.spec, "why_unsupported", None)
        if check is not None:
            return check(problem, target)
        return why_no_dtype(target.arch, problem.dtype) if hasattr(problem, "dtype") else None

    def why_invalid(self, problem: Any, config: Any, target: Target) -> str | None:
        """Why `config` cannot run `problem` on `target`, with the numbers, or None if it can."""
        if (why := self.why_unsupported(problem, target)) is not None:
            return why
        try:
            return self.spec.why_invalid(problem, config, target)
        except ZeroDivisionError:  # a spec divides by what its space has no zero of
            if (why := self._why_outside(problem, config, target)) is None:
                raise
            return why

    def _why_outside(self, problem: Any, config: Any, target: Target) -> str | None:
        """Which numbers below one of `config` are in no body's space, with what is, or None."""
        low = {
            f.name: v
            for f in dataclasses.fields(config)
            if type(v := getattr(config, f.name)) is int and v < 1 and v != f.default
        }
        if not low:
            return None
        spaces = [body.choices(problem, target) for body in self.bodies(target.arch)]
        outside = []
        for name, value in low.items():
            known = sorted({v for space in spaces for v in space.get(name, ())})
            if known and value not in known:
                outside.append(f"{name}={value} is none of {', '.join(map(str, known))}")
        return "; ".join(outside) or None

    def require_valid(self, problem: Any, config: Any, target: Target) -> None:
        """Raises ConfigRefused with the reason. Asked before every compile and every launch."""
        why = self.why_invalid(problem, config, target) or self._why_outside(problem, config, target)
        if why is not None:
            raise ConfigRefused(f"{self.name}{describe(problem)} {describe(config)} on {target.arch}: {why}")

    def default_config(self, problem: Any, target: Target) -> Any:
        """A valid configuration that needs no tuning: of the spec's candidates the one that the cost model ranks first.
        Always a candidate when tuning. Raises ProblemError where none is valid.
        """
        from kerngen.cost.choose import fastest, fused_is_faster  # the cost model knows kernels by this module

        if (own := getattr(self.spec, "default_config", None)) is not None:
            config = own(problem, target)
        else:
            config = fastest(self, problem, target, self.candidates(problem, target))
        if not self.is_fused:
            return config
        return replace(config, fused=fused_is_faster(self, problem, config, target))

    @property
    def is_fused(self) -> bool:
        """Whether steps may ask several kernels in place of this one."""
        return hasattr(self.spec, "replaces")

    def replaces(self, problem: Any) -> list[tuple[str, Any]]:
        """(kernel, problem) of each launch that a step would ask in place of this kernel's of `problem`, in order.
        Raises ProblemError where one of them does not take it.
        """
        from kerngen.templates import find_kernel

        named: Callable[[Any], Iterable[tuple[str, Mapping[str, Any]]]] = getattr(self.spec, "replaces", lambda _: ())
        return [(name, find_kernel(name).problem_type(**fields)) for name, fields in named(problem)]

    def candidates(self, problem: Any, target: Target) -> list[Any]:
        """The few valid configurations that the spec names for `problem`, each once; of a spec that chooses itself, its
        default. Raises ProblemError where none is valid.
        """
        if (named := self._named) is None:
            return [self.default_config(problem, target)]
        found = [c for c in dict.fromkeys(named(problem, target)) if self.spec.why_invalid(problem, c, target) is None]
        if not found:
            raise ProblemError(f"no configuration of {self.name} serves {describe(problem)} on {target.arch}")
        return found

    def expected_registers(self, problem: Any, config: Any, target: Target) -> int | Mapping[str, int] | None:
        """Of a thread, before `config` is compiled, where the spec knows about how many; of each entry where they
        differ.
        """
        known: Callable[[Any, Any, Target], int | Mapping[str, int]] | None
        known = getattr(self.spec, "expected_registers", None)
        return None if known is None else known(problem, config, target)

    @property
    def expects_registers(self) -> bool:
        """Whether the spec says how many registers a configuration will have."""
        return hasattr(self.spec, "expected_registers")

    def will_spill(self, problem: Any, config: Any, target: Target) -> bool:
        """Whether the spec expects more registers than a thread can have."""
        registers = self.expected_registers(problem, config, target)
        return isinstance(registers, int) and registers > target.arch.max_regs_per_thread

    def ranked_as(self, problem: Any, config: Any) -> tuple[Any, Any]:
        """What the cost model times in place of `problem` and `config` to rank its candidates: themselves, mostly."""
        given: Callable[[Any, Any], tuple[Any, Any]] | None = getattr(self.spec, "ranked_as", None)
        return (problem, config) if given is None else given(problem, config)

    @property
    def max_spill_bytes(self) -> int:
        """What a default configuration may spill, bytes a thread: MAX_SPILL_BYTES of spec.py, or 0."""
        return getattr(self.spec, "MAX_SPILL_BYTES", 0)

    @property
    def prefer(self) -> Callable[[Any, Sequence[Any], Target], Any] | None:
        """Of some configurations, all valid, the one for a problem on a target; None where sizes are not compared."""
        if not getattr(self.spec, "COMPARES_SIZES", False):
            return None
        from kerngen.cost.choose import fastest

        return lambda problem, configs, target: fastest(self, problem, target, configs)

    def smem_bytes(self, problem: Any, config: Any, target: Target) -> int:
        """Shared memory of a block, static and dynamic together; 0 if the spec says nothing of it."""
        size: Callable[[Any, Any, Target], int] | None = getattr(self.spec, "smem_bytes", None)
        return 0 if size is None else size(problem, config, target)

    def launches(self, problem: Any, config: Any, target: Target) -> tuple[Launch, ...]:
        return self.spec.launches(problem, config, target)

    def workspace_bytes(self, problem: Any, config: Any, target: Target) -> int:
        """Bytes of scratch that the launches share; 0 if the kernel has no `workspace` argument.

        The launcher hands the workspace over zeroed once; a kernel that needs zeros must leave zeros behind.
        """
        size: Callable[[Any, Any, Target], int] | None = getattr(self.spec, "workspace_bytes", None)
        return 0 if size is None else size(problem, config, target)

    def cost(self, problem: Any) -> Cost:
        return self.spec.cost(problem)

    def constants(self, problem: Any, config: Any, arch: Arch) -> Mapping[str, Any]:
        """Name -> value of what spec.py and its templates both know: `k` in a template. Compiled in, as `p` and `c`."""
        given: Callable[[Any, Any, Arch], Mapping[str, Any]] | None = getattr(self.spec, "constants", None)
        return {} if given is None else given(_CompiledIn(problem), config, arch)

    def bench_cases(self, wanted: str = "", problems: Sequence[str] = ()) -> list[Case]:
        """The bench cases whose name contains `wanted`; in their place `problems`, if there are any: FIELD=VALUE,...
        each, and named so. Raises as parse_fields does.
        """
        if not problems:
            return [c for c in self.bench.BENCH_CASES if wanted in c.name]
        return [replace(self.cases.case_for(parse_fields(self.problem_type, text)), name=text) for text in problems]

    def tuned_as(self, problem: Any) -> Any:
        """The problem whose tuning serves `problem` where it has none of its own: see TUNED_AS_DEFAULT."""
        names = getattr(problem, "TUNED_AS_DEFAULT", ())
        return replace(problem, **{f.name: f.default for f in dataclasses.fields(problem) if f.name in names})

    def tensor_map(self, problem: Any, config: Any, of: str, shape: tuple[int, ...]) -> TensorMap | None:
        """Of its argument `of`, a tensor of that shape; None where that is empty or the kernel will not use it."""
        given: Callable[[Any, Any, str, tuple[int, ...]], TensorMap | None] | None
        given = getattr(self.spec, "tensor_map", None)
        return None if given is None or 0 in shape else given(problem, config, of, shape)

    @cached_property
    def _refine(self) -> Any:
        return self._beside("traffic")

    @cached_property
    def _named(self) -> Any:
        return self._beside("candidates")

    def _beside(self, name: str) -> Any:
        """The function `name` of spec.py, or of a NAME.py beside it; None where neither has it."""
        if hasattr(self.spec, name) or not (self.folder / f"{name}.py").is_file():
            return getattr(self.spec, name, None)
        return getattr(self._module(name), name)

    def traffic(self, problem: Any, config: Any, target: Target) -> tuple[Traffic, ...] | None:
        """One Traffic per launch, from `traffic` in spec.py or in a traffic.py beside it; None if there is none."""
        if (refine := self._refine) is None:
            return None
        traffic = refine(problem, config, target)
        return (traffic,) if isinstance(traffic, Traffic) else tuple(traffic)

    def require_arguments(self, names: Iterable[str]) -> None:
        """Raises LaunchError unless `names` are the arguments of the kernel's entries, but for the workspace."""
        args = [a for body in self.spec.BODIES for args in body.args.values() for a in args]
        wanted = {a.name for a in args if a.kind != "map"} - {"workspace"}
        if differing := wanted ^ set(names):
            raise LaunchError(
                f"{self.name}: a call and the entries' arguments differ in {', '.join(sorted(differing))}"
            )

    @property
    def op(self) -> ModuleType:
        return self._module("op")

    @property
    def reference(self) -> ModuleType:
        return self._module("reference")

    def values_of(self, problem: Any, name: str, tensor: Any) -> Any:
        """What an output holds, as it is compared: the tensor, unless `values` of reference.py says otherwise."""
        own: Callable[[Any, str, Any], Any] | None = getattr(self.reference, "values", None)
        return tensor if own is None else own(problem, name, tensor)

    def tolerance_of(self, problem: Any, name: str) -> Tolerance:
        """Of an output: `tolerance` of reference.py, unless its `tolerance_of` says otherwise."""
        own: Callable[[Any, str], Tolerance] | None = getattr(self.reference, "tolerance_of", None)
        given: Tolerance = self.reference.tolerance(problem) if own is None else own(problem, name)
        return given

    @property
    def cases(self) -> ModuleType:
        return self._module("cases")

    @property
    def bench(self) -> ModuleType:
        return self._module("bench")

    def op_call(self, case: Case, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """The op that asks for `case`, and its arguments, as cases.py says; None where no op does. By default the op is
        called as the kernel, and its arguments are inputs, or fields of the problem, of the same names.
        """
        own: Callable[[Case, Mapping[str, Any]], tuple[Any, dict[str, Any]] | None] | None
        if (own := getattr(self.cases, "op_call", None)) is not None:
            return own(case, inputs)
        return asking(getattr(self.op, self.name), case, inputs)

    def _module(self, part: str) -> ModuleType:
        return load_part(self.name, part, self.folder)


class _CompiledIn:
    """A problem without its RUNTIME fields: what a cubin may depend on. Its properties see no more than that."""

    def __init__(self, problem: Any) -> None:
        self._problem = problem

    def __getattr__(self, name: str) -> Any:
        if name in self._problem.RUNTIME:
            raise AttributeError(f"{name} is a RUNTIME field: one cubin serves all its values")
        if isinstance(member := getattr(type(self._problem), name, None), property) and member.fget:
            return member.fget(self)
        return getattr(self._problem, name)


def asking(op: Any, case: Case, inputs: Mapping[str, Any], **given: Any) -> tuple[Any, dict[str, Any]]:
    """`op` and its flat arguments, by name: of those given, of the case's inputs, or fields of its problem."""
    known = {**inputs, **given}
    return op, {n: known[n] if n in known else getattr(case.problem, n) for n in op.signature.parameters}


def load_part(kernel: str, part: str, folder: Path) -> ModuleType:
    """PART.py of the kernel in `folder`. Raises TemplateError, with file, line and reason, if it cannot be loaded."""
    try:
        return import_module(f"kerngen.templates.{kernel}.{part}")
    except Exception as e:  # whatever the author's module does as it is loaded
        path, line = place_of(e, folder) or (folder / f"{part}.py", 0)
        if not path.is_file():
            raise TemplateError(f"kernel {kernel} has no {shown(path)}") from e
        place = f"{shown(path)}:{line}" if line else shown(path)
        raise TemplateError(f"kernel {kernel}: {place}: {reason_of(e)}") from e


def spread(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(name, shown, value) of each argument or output; of a tuple or list each element, shown as name[0], name[1].

    `shown` tells all of them apart; `name` is what a spec or an op says something of.
    """
    for name, value in arguments.items():
        if isinstance(value, tuple | list):
            yield from ((name, f"{name}[{i}]", element) for i, element in enumerate(value))
        else:
            yield name, name, value


def fields_of(value: Any) -> dict[str, Any]:
    """A Problem's or Config's fields as a plain dict, in declaration order."""
    return dataclasses.asdict(value)


def static_fields(problem: Any) -> dict[str, Any]:
    """The fields that are compiled in: everything but RUNTIME."""
    return {k: v for k, v in fields_of(problem).items() if k not in problem.RUNTIME}


class Defaults(dict[str, Any]):
    """Each field of a class with its default, dataclasses.MISSING where it has none, and how some are filed.

    names: field -> the name that it is filed under, where that is another. bodies: value of `body` -> the fields that
    it is filed as.
    """

    def __init__(
        self,
        defaults: Mapping[str, Any],
        names: Mapping[str, str] | None = None,
        bodies: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(defaults)
        self.names = {name: filed for name, filed in (names or {}).items() if name in defaults}
        self.own = {filed: name for name, filed in self.names.items()}
        self.bodies = bodies or {}
        self.flags = {flag for fields in self.bodies.values() for flag in fields}  # fields that bodies are filed as

    def only(self, names: Iterable[str]) -> Defaults:
        return Defaults({n: self[n] for n in names}, self.names)


def defaults_of(cls: type[Any]) -> Defaults:
    """How the fields of a Problem or Config class are filed: those that have their default are left out.

    A field's metadata may say `filed`: the name that it had before, `field(default=0, metadata={"filed": "old_name"})`.
    That of a Config's `body` says for each of its values what rows have in its place: {"gemv": {"gemv": True}}.
    """
    fields = dataclasses.fields(cls)
    filed = {f.name: f.metadata["filed"] for f in fields if "filed" in f.metadata}
    bodies = filed.pop("body", None)
    return Defaults({f.name: f.default for f in fields}, filed, bodies)


def trimmed(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` as they are filed: by the names that they are filed under, without those that equal their default, in
    value and in type: 1 is not True.
    """
    kept = {k: v for k, v in fields.items() if not _same(v, defaults.get(k, dataclasses.MISSING))}
    if not isinstance(defaults, Defaults):
        return kept
    if defaults.bodies and "body" in kept:
        kept |= defaults.bodies[kept.pop("body")]
    return {defaults.names.get(k, k): v for k, v in kept.items()}


def untrimmed(fields: Mapping[str, Any], defaults: Defaults) -> dict[str, Any]:
    """`fields` by the names that they are filed under, with those that equal their default."""
    known = {defaults.names.get(k, k): v for k, v in defaults.items() if v is not dataclasses.MISSING}
    return known | dict.fromkeys(defaults.flags, False) | trimmed(fields, defaults)


def filled(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What `trimmed` left out put back, in the order of declaration; fields that are not declared come last."""
    if isinstance(defaults, Defaults):
        fields = {defaults.own.get(k, k): v for k, v in fields.items()}
        if not defaults.flags.isdisjoint(fields):
            fields = _with_body(fields, defaults)
    known = {k: fields.get(k, v) for k, v in defaults.items()}
    return {k: v for k, v in known.items() if v is not dataclasses.MISSING} | dict(fields)


def _with_body(fields: Mapping[str, Any], defaults: Defaults) -> dict[str, Any]:
    """`fields` with the body that its flags mean; as they are where they mean none."""
    flags = {k: v for k, v in fields.items() if k in defaults.flags and v is not False}
    others = {k: v for k, v in fields.items() if k not in defaults.flags}
    found = [body for body, filed in ({defaults["body"]: {}} | dict(defaults.bodies)).items() if filed == flags]
    return others | {"body": found[0]} if found else dict(fields)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def describe(value: Any) -> str:
    """[head_dim=512 page_size=16]: how a Problem or Config is written in messages and tables."""
    return "[" + " ".join(f"{k}={v}" for k, v in fields_of(value).items()) + "]"


def parse_fields(cls: type[Any], text: str) -> Any:
    """Build a Problem or Config from "head_dim=512,page_size=16". Unnamed fields keep their defaults.

    Raises UnknownName on a field that is none, UsageError on a value of the wrong type, ProblemError from the dataclass
    itself.
    """
    # Text in a module with `from __future__ import annotations`, classes in one without.
    types = {f.name: f.type if isinstance(f.type, str) else f.type.__name__ for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    of = defaults_of(cls)
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, eq, raw = part.partition("=")
        if not eq:
            raise UsageError(f"{part!r} is not FIELD=VALUE", hint=f"fields: {', '.join(types)}")
        key = of.own.get(key, key)
        if key not in types and key not in of.flags:
            raise UnknownName(f"{cls.__name__.lower()} field", key, types)
        values[key] = _parse_value(key, raw, types.get(key, "bool"))
    if not of.flags.isdisjoint(values):
        values = _with_body(values, of)
        if wrong := sorted(of.flags & values.keys()):
            raise UsageError(f"{', '.join(wrong)} together name no body", hint=f"body: {', '.join(of.bodies)}")
    if "body" in values and of.bodies and values["body"] not in {of["body"], *of.bodies}:
        raise UnknownName("body", values["body"], {of["body"]: "", **of.bodies})
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    if absent := [name for name in required if name not in values]:
        raise ProblemError(f"{', '.join(absent)} must be given: there is no default",
                           hint=f"fields: {', '.join(types)}")  # fmt: skip
    return cls(**values)


# What the runtime computes with in fp16: its residual stream is fp32.
_FP16 = {"dtype": "fp16", "logits_dtype": "fp16", "residual_dtype": "fp32"}


def parse_problem(problem_type: type[Any], text: str, arch: Arch) -> Any:
    """As parse_fields, with the dtypes that go together on `arch`: where `dtype` is named fp16, or is not named and
    `arch` has no bf16, those that `text` leaves out are what the runtime has beside fp16.
    """
    parts = (part.partition("=") for part in text.split(","))
    named = {name.strip(): value.strip() for name, _, value in parts}
    if named.get("dtype", arch.dtype) == "fp16":
        own = [f.name for f in dataclasses.fields(problem_type) if f.name in _FP16 and f.name not in named]
        text = ",".join([*filter(None, [text]), *(f"{name}={_FP16[name]}" for name in own)])
    return parse_fields(problem_type, text)


def parse_over(value: Any, text: str) -> Any:
    """A Config, or a Problem whose fields all have defaults, with the fields that `text` names in place of its own.
    Raises as parse_fields does.
    """
    of = defaults_of(type(value))
    named = {of.own.get(name, name) for name in (part.partition("=")[0].strip() for part in text.split(","))}
    parsed = fields_of(parse_fields(type(value), text))
    return replace(value, **{n: v for n, v in parsed.items() if n in named or (n == "body" and named & of.flags)})


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
