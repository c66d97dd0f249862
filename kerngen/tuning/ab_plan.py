r"""What an A/B compares: problems, their candidates and where these are timed, as a TOML file says it.

    about = "clusters that push their partial results, against those that read them"
    device = "H100"                      # the board that the file was written for
    measured = {read_gbps = 3111}        # whatever else is known of earlier runs; nothing reads it

    [step]                               # time in a whole step of a model; without this, each kernel alone
    model = "gemma-4-31b"
    phase = "verify"                     # also: batch, context, tokens, draft, draft_weights, kv_cache_dtype,
                                         # kv_cache_layout, sparse_prefill
    tokens = 4

    [[entry]]
    kernel = "attn_decode"
    problem = "head_dim=512,q_len=4"     # or a table
    configs = ["num_splits=8", {config = "num_splits=16", note = "the default before"}]
    random = 20                          # and so many valid configurations, drawn from all bodies

    [[entry.patch]]                      # a change of the rendered source, before it is made
    name = "trigger late"
    config = "num_splits=8"
    wrong = true                         # an ablation: its results are known to be wrong
    [[entry.patch.replace]]
    this = "    pdl_launch_dependents();\n"
    by = ""

The default configuration of each problem is its base, and always among the candidates. A config is FIELD=VALUE,... over
the default. `this` stands in the rendered source exactly once. Beside `configs`, `patch` and `random` an entry may have

    body = "wgmma_ws"         the `most` configurations of this body that the cost model expects most of
    grid = [{gemv = [true], block_n = [32, 64]}, {stream = [true]}]
                              all that is valid of these parts of the space; [{}] is the whole of it
    sample = 16               so many of the grid, spread over how fast the cost model holds them to be
    name, held_out            for recordings (recorded.py): the file's name, and not to be fitted to
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from kerngen.arch import Target
from kerngen.compiler.render import render
from kerngen.errors import KerngenError, UsageError
from kerngen.system.files import read_toml
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Body, Kernel, defaults_of, describe, parse_fields, parse_over
from kerngen.tuning.plan import rank
from kerngen.tuning.recorded import Part
from kerngen.tuning.space import part_of, valid_of

MAX_BYTES = 4 << 20  # of a file
MOST = 24  # configurations of a body, unless the entry says otherwise
DRAWN_FROM = 32  # of a sample, times its size: so many valid points are ranked by the cost model
MOST_DRAWS = 1 << 16  # of a space in which next to nothing is valid; of a small one REPEATS times its points
REPEATS = 16
AGAIN = "default again"
_HINT = "kerngen/tuning/ab_plan.py has the format"
_FILE = {"about": str, "device": str, "measured": dict, "step": dict, "entry": list}
_STEP = {"model": str, "phase": str, "batch": int, "context": int, "tokens": int, "draft": str,
         "draft_weights": str, "kv_cache_dtype": str, "kv_cache_layout": str, "sparse_prefill": float}  # fmt: skip
_ENTRY = {
    "kernel": str, "problem": (str, dict), "configs": list, "patch": list, "random": int, "body": str, "most": int,
    "grid": list, "sample": int, "name": str, "held_out": bool, "note": str,
}  # fmt: skip
_CONFIG = {"config": str, "note": str, "smem_kb": int, "expected_us": list}
_PATCH = {"name": str, "config": str, "wrong": bool, "replace": list, "note": str}
_GENERATORS = ("configs", "patch", "random", "body", "grid", "sample")


@dataclass(frozen=True, slots=True)
class Written:
    """A candidate as written. replace: (this, by) in the rendered source. wrong: its results are known to be wrong."""

    config: str = ""
    name: str = ""
    replace: tuple[tuple[str, str], ...] = ()
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is timed: a configuration, of the source as it is or patched."""

    config: Any
    name: str = ""
    replace: tuple[tuple[str, str], ...] = ()
    wrong: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}: {describe(self.config)}" if self.name else describe(self.config)


@dataclass(frozen=True, slots=True)
class Grid:
    """What `grid` and `sample` mean on a target. parts: of the space, restricted. size: its points, valid or not."""

    parts: tuple[Part, ...]
    configs: tuple[Any, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A problem and where its candidates come from."""

    kernel: Kernel
    problem: Any
    written: tuple[Written, ...] = ()
    random: int = 0
    body: str = ""
    most: int = MOST
    grid: tuple[Part, ...] = ()
    sample: int = 0
    name: str = ""
    held_out: bool = False

    @property
    def about(self) -> str:
        return f"{self.kernel.name} {describe(self.problem)}"

    def candidates(self, target: Target, seed: int = 0) -> list[Candidate]:
        """The default configuration, then what else is to be timed, each once. Where the source is patched the default
        stands there twice: what its two times differ by is noise.

        Raises UsageError that names the entry; ConfigRefused for a configuration that cannot run there.
        """
        kernel, problem = self.kernel, self.problem
        default = kernel.default_config(problem, target)
        found = [Candidate(default)]
        for w in self.written:
            config = parse_over(default, w.config) if w.config else default
            kernel.require_valid(problem, config, target)
            found.append(Candidate(config, w.name, w.replace, w.wrong))
        configs = list(self.gridded(target).configs) if self.grid or self.sample else []
        if self.body:
            configs += _of_body(kernel, self.body, problem, target)[: self.most]
        configs += drawn(kernel, problem, target, self.random, seed)
        again = [Candidate(default, AGAIN)] if any(w.replace for w in self.written) else []
        return list(dict.fromkeys([*found, *map(Candidate, configs), *again]))

    def gridded(self, target: Target) -> Grid:
        """What is to be recorded. Asks why_invalid and the cost model; compiles nothing. Raises UsageError."""
        try:
            return _gridded(self, target)
        except KerngenError as e:
            raise UsageError(f"{self.kernel.name}-{self.name or describe(self.problem)}: {e.message}",
                             hint=e.hint) from e  # fmt: skip

    def source(self, candidate: Candidate, target: Target) -> str:
        """What is compiled. Raises as `render` and `patched` do."""
        return patched(render(self.kernel, self.problem, candidate.config, target), candidate)


@dataclass(frozen=True, slots=True)
class Plan:
    """A file. step: the model and the step that it times in, as options of a command would say them; {}: alone."""

    entries: tuple[Entry, ...]
    device: str = ""
    about: str = ""
    step: Mapping[str, Any] = field(default_factory=dict)


def patched(text: str, candidate: Candidate) -> str:
    """`text` with what the candidate replaces. Raises UsageError where a part does not stand there exactly once."""
    for this, by in candidate.replace:
        if (count := text.count(this)) != 1:
            raise UsageError(f"{candidate.name}: the source has {count} times {this[:60]!r}, which it replaces",
                             hint="once is what is meant; kerngen kernel show prints the source")  # fmt: skip
        text = text.replace(this, by)
    return text


# -- reading


def read_plan(path: Path) -> Plan:
    """What a file says. Raises UsageError, with file and entry, where it says anything that the format has not."""
    told = read_toml(path, MAX_BYTES, _HINT)
    _require(str(path), told, _FILE, needed=("entry",))
    step = told.get("step", {})
    _require(f"{path}, step", step, _STEP, needed=("model",) if step else ())
    entries = tuple(_entry(f"{path}, entry {i}", e) for i, e in enumerate(told["entry"], 1))
    named = [(e.kernel.name, e.name) for e in entries if e.name]
    if twice := sorted({f"{k}-{n}" for k, n in named if named.count((k, n)) > 1}):
        raise UsageError(f"{path}: {', '.join(twice)} is there twice")
    if not entries:
        raise UsageError(f"{path} has no entries", hint=_HINT)
    return Plan(entries, told.get("device", ""), told.get("about", ""), step)


def _entry(where: str, given: Any) -> Entry:
    _require(where, given, _ENTRY, needed=("kernel", "problem"))
    where += f" ({given['kernel']})"
    if not any(given.get(name) for name in _GENERATORS):
        raise UsageError(f"{where} has nothing to compare", hint=f"one of: {', '.join(_GENERATORS)}")
    if given.get("name") and not given["name"].replace("-", "").replace("_", "").isalnum():
        raise UsageError(f"{where}: a name is letters, digits, - and _: it becomes a file's")
    grid = given.get("grid", [])
    if not all(isinstance(p, dict) and all(isinstance(v, list) and v for v in p.values()) for p in grid):
        raise UsageError(f"{where}: grid is a list of fields with lists of values")
    written = [_config(where, c) for c in given.get("configs", [])] + [_patch(where, p) for p in given.get("patch", [])]
    try:
        kernel = find_kernel(given["kernel"])
        text = given["problem"]
        problem = parse_fields(kernel.problem_type, text) if isinstance(text, str) else kernel.problem_type(**text)
    except (KerngenError, TypeError) as e:
        raise UsageError(f"{where}: {getattr(e, 'message', e)}", hint=getattr(e, "hint", None)) from e
    others = {n: given[n] for n in ("random", "body", "most", "sample", "name", "held_out") if n in given}
    return Entry(kernel, problem, tuple(written), grid=tuple({k: tuple(v) for k, v in p.items()} for p in grid),
                 **others)  # fmt: skip


def _config(where: str, given: Any) -> Written:
    if isinstance(given, str):
        return Written(given)
    _require(f"{where}, configs", given, _CONFIG, needed=("config",))
    return Written(given["config"])


def _patch(where: str, given: Any) -> Written:
    _require(f"{where}, patch", given, _PATCH, needed=("name",))
    for part in given.get("replace", []):
        _require(f"{where}, patch {given['name']!r}, replace", part, {"this": str, "by": str}, needed=("this", "by"))
    replaced = tuple((part["this"], part["by"]) for part in given.get("replace", []))
    return Written(given.get("config", ""), given["name"], replaced, given.get("wrong", False))


def _require(where: str, given: Any, fields: Mapping[str, Any], needed: Sequence[str]) -> None:
    if not isinstance(given, dict):
        raise UsageError(f"{where}: {given!r} is no table", hint=_HINT)
    if lacking := [name for name in needed if name not in given]:
        raise UsageError(f"{where} has no {lacking[0]!r}", hint=_HINT)
    for name, value in given.items():
        if name not in fields:
            raise UsageError(f"{where}: {name!r} is not one of: {', '.join(fields)}", hint=_HINT)
        if not isinstance(value, fields[name]) or (fields[name] is int and isinstance(value, bool)):
            kinds = fields[name] if isinstance(fields[name], tuple) else (fields[name],)
            raise UsageError(f"{where}: {name} is {value!r}, no {' or '.join(k.__name__ for k in kinds)}", hint=_HINT)


# -- configurations that nobody wrote out


def _of_body(kernel: Kernel, name: str, problem: Any, target: Target) -> list[Any]:
    """The valid configurations of a body, those first of which the cost model expects most. name: its own, or that of
    its template where no other has it. Raises UsageError.
    """
    bodies = [(b, {b.template, b.when.get("body", b.template)}) for b in kernel.spec.BODIES]
    found = [b for b, names in bodies if name in names]
    if len(found) != 1:
        times = Counter(n for _, names in bodies for n in names)
        known = ", ".join(sorted(n for n, count in times.items() if count == 1))
        raise UsageError(f"{kernel.name} has {len(found)} bodies {name!r}", hint=f"a body is one of: {known}")
    if not found[0].serves(target.arch):
        raise UsageError(f"{name} does not serve {target.arch}")
    return [config for _, config in rank(kernel, problem, target, valid_of(kernel, found[0], problem, target))]


def drawn(kernel: Kernel, problem: Any, target: Target, count: int, seed: int) -> list[Any]:
    """`count` valid configurations, of each body that serves as many as of the others, where it has them."""
    rng = Random(f"{seed} {kernel.name} {describe(problem)}")
    hands = []
    for body in _proven(kernel, target) if count else ():
        valid = valid_of(kernel, body, problem, target)
        hands.append(rng.sample(valid, min(count + 1, len(valid))))
    found: list[Any] = []
    for turn in range(count + 1):
        found += [hand[turn] for hand in hands if turn < len(hand)]
    default = kernel.default_config(problem, target)
    return [c for c in dict.fromkeys(found) if c != default][:count]


def _proven(kernel: Kernel, target: Target) -> list[Body]:
    return [b for b in kernel.bodies(target.arch) if b.proven]


def _gridded(entry: Entry, target: Target) -> Grid:
    kernel, problem = entry.kernel, entry.problem
    parts = _restricted(kernel, problem, target, entry.grid)
    size = sum(prod(map(len, part.values())) for part in parts)
    if entry.sample:
        found = _sampled(kernel, problem, target, parts, entry.sample)
    else:
        found = [c for c in _every(kernel, parts) if kernel.why_invalid(problem, c, target) is None]
    if not found:
        raise UsageError(f"none of the grid's {size:,} points is valid")
    return Grid(parts, tuple(dict.fromkeys(found)), size)


def _restricted(kernel: Kernel, problem: Any, target: Target, wanted: tuple[Part, ...]) -> tuple[Part, ...]:
    """Each body's space, or the parts of it that `wanted` keeps."""
    found: list[Part] = []
    for part in (_own_names(kernel, part) for part in wanted or ({},)):
        known, fits = set[str](), False
        for body in _proven(kernel, target):
            space = part_of(kernel, body, problem, target)
            known |= space.keys()
            if any(name in part and not set(part[name]) & set(space[name]) for name in body.when):
                continue
            fits = True
            for name in part.keys() & space.keys() - body.when.keys():
                if absent := [v for v in part[name] if v not in space[name]]:
                    raise UsageError(f"{name} is never {absent} there; it is one of {space[name]}")
            if lost := sorted(part.keys() - space.keys()):
                raise UsageError(f"the body with {dict(body.when)} has no {', '.join(lost)}")
            found.append({k: tuple(v for v in vs if v in part.get(k, vs)) for k, vs in space.items()})
        if not fits:
            raise UsageError(f"no body has the grid's {dict(part)}")
    return tuple(found)


def _own_names(kernel: Kernel, part: Part) -> Part:
    """`part` by today's fields, where it was written by those that are filed; flags are the bodies that they leave."""
    of = defaults_of(kernel.config_type)
    own = {of.own.get(name, name): values for name, values in part.items() if name not in of.flags}
    if flags := {name: values for name, values in part.items() if name in of.flags}:
        bodies = {of["body"]: {}, **of.bodies}
        fit = (b for b, filed in bodies.items() if all(filed.get(f, False) in values for f, values in flags.items()))
        own["body"] = tuple(fit)
    return own


def _every(kernel: Kernel, parts: tuple[Part, ...]) -> Iterator[Any]:
    for part in parts:
        for values in product(*part.values()):
            yield kernel.config_type(**dict(zip(part, values, strict=True)))


def _sampled(kernel: Kernel, problem: Any, target: Target, parts: tuple[Part, ...], count: int) -> list[Any]:
    """`count` valid points: of many that are spread evenly over the grid, ranked by the cost model, the best, the worst
    and others between, the closer to each other the faster.
    """
    points: list[Any] = []
    for part in parts:
        points += _spread(kernel, problem, target, part, count * DRAWN_FROM // len(parts))
    ranked = [c for _, c in rank(kernel, problem, target, dict.fromkeys(points))]
    if len(ranked) <= count:
        return ranked
    places: dict[int, None] = {}
    for i in range(count):
        at = round((i / max(count - 1, 1)) ** 2 * (len(ranked) - 1))
        while at in places:
            at = (at + 1) % len(ranked)
        places[at] = None
    return [ranked[at] for at in sorted(places)]


def _spread(kernel: Kernel, problem: Any, target: Target, part: Part, count: int) -> list[Any]:
    """Up to `count` valid points of `part`, the first of an additive recurrence by powers of one number.

    That is a sequence of low discrepancy in as many dimensions as the part has fields with a choice (M. Roberts, 2018:
    the root of x ** (d + 1) = x + 1): any prefix of it holds every value of every field about equally often.
    """
    only = {k: vs[0] for k, vs in part.items() if len(vs) == 1}
    several = {k: vs for k, vs in part.items() if len(vs) != 1}
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (len(several) + 1))
    steps = [root ** -(d + 1) for d in range(len(several))]
    found: dict[Any, None] = {}
    for n in range(1, min(MOST_DRAWS, REPEATS * prod(map(len, part.values())))):
        chosen = {k: vs[int((0.5 + n * s) % 1.0 * len(vs))] for (k, vs), s in zip(several.items(), steps, strict=True)}
        config = kernel.config_type(**only, **chosen)
        if config not in found and kernel.why_invalid(problem, config, target) is None:
            found[config] = None
            if len(found) == count:
                break
    return list(found)
