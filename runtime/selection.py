"""Kernel selection: the configuration and machine code that will run a problem.

The launcher, `kerngen compile` and `kerngen doctor` share `Selector`. It has a `KernelSelector` for each static problem
(a kernel and its compiled-in fields), with the winner table of the tuning databases. A problem without tuned points
gets what won for one near in shape, where the cost model holds that for good (neighbours.py), else the kernel's
default. That is chosen at powers of two of the dynamic field (between two of them a kernel may prefer another's) and of
the other runtime fields, or at finer steps of those. Then a new problem costs a bisection and a known one a dict
lookup: a prompt's forward selects hundreds of times. Fields that hardly change a time (Problem.TUNED_AS_DEFAULT) need
no tuning of their own: what serves the problem with their defaults gives the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kerngen.arch import Target
from kerngen.compiler import source_digest
from kerngen.compiler.cache import compiling_is_forbidden
from kerngen.errors import ConfigRefused, ProblemError
from kerngen.runtime.neighbours import Neighbour, Neighbourhood, is_slower, preferred
from kerngen.templates.kernel import Kernel, fields_of
from kerngen.tuning_db.read.canonical_fields import FINER_STEPS, round_up
from kerngen.tuning_db.read.ids import bucketed, coordinates

if TYPE_CHECKING:
    from kerngen.compiler.compile import Cubin
    from kerngen.tuning_db import Winner, WinnerTable
    from kerngen.tuning_db.read.boards import PerBoard
    from kerngen.tuning_db.read.source import Source

DEFAULT = "default configuration"
COMPARED_EVERY = 16  # of a field between two powers: defaults are compared where it is a multiple of so many
EACH_UP_TO = 256  # lengths that `telling_lengths` has all of
CHOICES_KEPT = 8192  # a dozen kernels' for several hundred lengths of context


@dataclass(eq=False, slots=True)
class Choice:
    """What serves a problem: the same object for all problems that share it.

    source: who chose the configuration. problem: one that it was chosen for. cubin: its machine code where a database
    that was asked keeps it and it is current; else it is compiled from `text`. winner: the record that it rests on,
    None for a default. neighbour: the record of another problem whose configuration the cost model chose.
    """

    kernel: Kernel
    problem: Any
    config: Any
    target: Target
    source: str
    provenance: str  # measured, carried, predicted or default
    cubin: Cubin | None = None
    winner: Winner | None = None
    neighbour: Winner | None = None

    @property
    def text(self) -> str:
        """The source to compile. Raises ConfigRefused, KerngenError as `render`."""
        from kerngen.compiler.render import render  # Jinja is for those that must render

        return render(self.kernel, self.problem, self.config, self.target)


class KernelSelector:
    """Selection for one kernel with one set of compiled-in fields on one target. A request pays for `choice` alone.

    table: its tuned points; None if defaults are chosen. neighbourhood: gives what else is tuned of the kernel. alike:
    gives what serves the problem whose tuning serves this one (Kernel.tuned_as); None where that is itself.
    """

    def __init__(
        self,
        kernel: Kernel,
        target: Target,
        table: WinnerTable | None,
        neighbourhood: Callable[[Kernel], Neighbourhood] | None = None,
        alike: Callable[[Any], Choice] | None = None,
    ) -> None:
        self.kernel, self.target, self._table = kernel, target, table
        self._neighbourhood, self._alike = neighbourhood, alike
        self._of_alike: dict[int, tuple[Choice, Choice]] = {}  # by the other choice's identity, as _tuned
        self._tuned: dict[int, tuple[Winner, Choice]] = {}  # by the winner's identity; held, so that it stays its own
        self._remote: dict[tuple[Any, ...], Choice] = {}  # by winner, cell and length: see `_weighed`
        self._defaults: dict[tuple[Any, ...], Choice] = {}
        self._nearby: dict[tuple[Any, ...], dict[Any, Choice]] = {}  # by length: others near it
        self._preferred: dict[tuple[Any, ...], Choice] = {}  # by length, a multiple of COMPARED_EVERY
        self._exceptions: dict[Any, Choice] = {}  # by config: of problems that the default above them cannot run

    def choice(self, problem: Any) -> Choice:
        """The configuration and code for `problem`. Raises ConfigRefused if none is valid."""
        winner = self._table.answer(problem) if self._table is not None else None
        if winner is None:
            return self._default(problem) if self._alike is None else self._choice_alike(problem, self._alike(problem))
        tuned = self._tuned_choice(problem, winner)
        return self._weighed(problem, winner, tuned) if self._is_remote(problem, winner) else tuned

    def _tuned_choice(self, problem: Any, winner: Winner) -> Choice:
        if (known := self._tuned.get(id(winner))) is None:
            config = self.kernel.config_type(**winner.config)
            source = f"{winner.source} ({winner.provenance})"
            choice = Choice(self.kernel, problem, config, self.target, source, winner.provenance, winner.cubin, winner)
            known = self._tuned[id(winner)] = winner, choice
        return known[1]

    def _choice_alike(self, problem: Any, other: Choice) -> Choice:
        """The configuration of `other`, with machine code of this problem's own."""
        if (known := self._of_alike.get(id(other))) is None:
            code = self._table.code(problem, other.config) if self._table is not None else None
            known = self._of_alike[id(other)] = other, replace(other, problem=problem, cubin=code)
        return known[1]

    def _is_remote(self, problem: Any, winner: Winner) -> bool:
        """Whether the winner is of a longer length than those near this one."""
        if not problem.DYNAMIC or winner.problem.dynamic is None:
            return False
        return winner.problem.dynamic > _coarse(getattr(problem, problem.DYNAMIC))

    def _weighed(self, problem: Any, winner: Winner, tuned: Choice) -> Choice:
        """`tuned`, or the default where a prediction puts that in its place: a tune that was cut short, or that knows a
        model's own steps alone, leaves gaps.
        """
        size = _coarse(getattr(problem, problem.DYNAMIC))
        key = id(winner), coordinates(bucketed(self.kernel, problem)), size
        if (known := self._remote.get(key)) is None:
            at = _moved(problem, {problem.DYNAMIC: size})
            known = tuned
            if self._loses(at, tuned.config):
                default = self._default(at)
                if default.cubin is not None or not compiling_is_forbidden():
                    known = default
            self._remote[key] = known
        return known

    def _loses(self, problem: Any, config: Any) -> bool:
        """Whether a prediction puts the kernel's own choice in the place of `config`, which was measured elsewhere."""
        try:
            own = self.kernel.default_config(problem, self.target)
        except ProblemError:
            return False
        return own != config and is_slower(self.kernel, problem, self.target, config, own)

    def tuned_lengths(self, problem: Any) -> Sequence[int]:
        """Where something is tuned along the dynamic field, for the other runtime fields that `problem` has."""
        return () if self._table is None else self._table.lengths(problem)

    def telling_lengths(self, problem: Any, most: int) -> list[int]:
        """Values of the dynamic field whose choices are all that there are for those from 1 to `most`."""
        found = {*range(1, min(most, EACH_UP_TO) + 1), *range(COMPARED_EVERY, most + 1, COMPARED_EVERY), most}
        reach = getattr(problem, "REACH", 1)
        for tuned in self.tuned_lengths(problem):  # a winner serves down to the one below it, or to its reach
            found |= {tuned, tuned + 1, ceil(tuned / reach)}
        return sorted(length for length in found if 0 < length <= most)

    def _default(self, problem: Any) -> Choice:
        """The default of the next power of two on the dynamic axis, or the problem's own where that cannot run it.

        Between two powers the kernel may prefer that of a length between them, or of those down to an eighth: no more
        of them are needed than a bundle has.
        """
        key = coordinates(bucketed(self.kernel, problem))
        size = getattr(problem, problem.DYNAMIC) if problem.DYNAMIC else None
        above = round_up(size)
        found = self._default_at(key, problem, above)
        if self.kernel.why_invalid(problem, found.config, self.target) is not None:
            own = self._default_for(problem)
            return self._exceptions.setdefault(own.config, own)
        if self.kernel.prefer is None or size is None or size == above:
            return found
        compared = size if size < COMPARED_EVERY else ceil(size / COMPARED_EVERY) * COMPARED_EVERY
        if (preferred := self._preferred.get((key, compared))) is None:
            others = self._others_at(key, problem, found, above)
            at = _moved(problem, {problem.DYNAMIC: compared})
            valid = {c: o for c, o in others.items() if self.kernel.why_invalid(at, c, self.target) is None}
            best = self.kernel.prefer(at, (found.config, *valid), self.target)
            preferred = self._preferred[key, compared] = valid.get(best, found)
        return found if self.kernel.why_invalid(problem, preferred.config, self.target) is not None else preferred

    def _others_at(self, key: tuple[Any, ...], problem: Any, found: Choice, above: int) -> dict[Any, Choice]:
        """See _others: once for all lengths up to `above`."""
        if (others := self._nearby.get((key, above))) is None:
            others = self._nearby[key, above] = self._others(key, problem, found, above)
        return others

    def _default_at(self, key: tuple[Any, ...], problem: Any, dynamic: Any) -> Choice:
        """The default where the dynamic field is `dynamic`; None: there is none. key: the other runtime fields, as they
        are looked up, which it is chosen for too: who asks first does not decide for those that share it.
        """
        if (found := self._defaults.get((key, dynamic))) is None:
            runtime = bucketed(self.kernel, problem)
            moved = _moved(problem, runtime if dynamic is None else runtime | {problem.DYNAMIC: dynamic})
            found = self._defaults[key, dynamic] = self._default_for(moved)
        return found

    def _others(self, key: tuple[Any, ...], problem: Any, found: Choice, above: int) -> dict[Any, Choice]:
        """By config, the defaults of three smaller powers of two and `between` all four, without `found`'s."""
        powers = [above >> i for i in range(min(4, above.bit_length()))]
        below = []
        for dynamic in (*powers[1:], *(length for power in powers for length in between(power))):
            with suppress(ConfigRefused, ProblemError):  # what serves fewer is no need
                below.append(self._default_at(key, problem, dynamic))
        return {c.config: c for c in reversed(below) if c.config != found.config}

    def _default_for(self, problem: Any) -> Choice:
        """Of `problem` without a winner: the default, or what won for one that is near in shape."""
        config = self.kernel.default_config(problem, self.target)
        self.kernel.require_valid(problem, config, self.target)
        source, provenance, winner = DEFAULT, "default", None
        if (near := self._neighbour(problem, config)) is not None:
            fused = {"fused": config.fused} if self.kernel.is_fused else {}  # which is no property of a tiling
            config, winner = replace(near.config, **fused), near.winner
            source, provenance = f"{describe_shape(winner, problem)}, chosen by the cost model", "predicted"
        code = self._table.code(problem, config) if self._table is not None else None
        return Choice(self.kernel, problem, config, self.target, source, provenance, code, neighbour=winner)

    def _neighbour(self, problem: Any, default: Any) -> Neighbour | None:
        """None where the default was judged to be faster than the winners of its own line, too."""
        if self._neighbourhood is None or (self._table is not None and self._table.passed_over(problem) is not None):
            return None
        found = preferred(self.kernel, problem, self.target, default, self._neighbourhood(self.kernel).of(problem))
        return None if found is None or found.config == default else found


def describe_shape(winner: Winner, problem: Any) -> str:
    """ "winner of n=8192 k=2816": by what its problem differs from `problem`."""
    asked = fields_of(problem)
    differing = " ".join(f"{k}={v}" for k, v in winner.problem.flat.items() if asked.get(k) != v)
    return f"winner of {differing}" if differing else "winner of this very problem"


def _coarse(length: int) -> int:
    """What stands for lengths up to it, where the cost model compares."""
    return max(ceil(length / COMPARED_EVERY) * COMPARED_EVERY, round_up(length, FINER_STEPS))


def between(power: int) -> list[int]:
    """Lengths between a power of two and the one below it, the longest first: eighths of the power."""
    return [power * eighths // 8 for eighths in (7, 6, 5) if power * eighths % 8 == 0]


def lengths_up_to(most: int) -> list[int]:
    """To `most`, which is one of them: powers of two and what lies between them."""
    powers = [1 << e for e in range(most.bit_length())]
    above = 1 << most.bit_length()
    return sorted({most, *powers, *(n for power in (*powers, above) for n in between(power) if 0 < n < most)})


def finer_between(power: int) -> list[int]:
    """Those between a power of two and the one below it."""
    return [n for n in range(power // 2 + 1, power) if round_up(n, FINER_STEPS) == n]


def _moved(problem: Any, runtime: dict[str, Any]) -> Any:
    """`problem` with these runtime fields, or as it is where the kernel takes no such."""
    try:
        return replace(problem, **runtime)
    except ProblemError:
        return problem


class Selector:
    """Selects what runs on `target`. sources: tuning databases in lookup order; with none, defaults are chosen."""

    def __init__(self, sources: Sequence[Source | PerBoard], target: Target) -> None:
        self.target = target
        self._sources = tuple(sources)
        # Of a kernel's files as they were at its first selection, as its spec.py is.
        self._digest_of = cache(source_digest.source_digest_of)
        self._neighbourhood = cache(lambda kernel: Neighbourhood(self._sources, kernel, target))
        self._selectors: dict[tuple[Any, ...], KernelSelector] = {}
        self._known: dict[tuple[str, Any], Choice] = {}  # of problems met; forgotten together where they are too many
        self._fused: dict[tuple[str, Any], bool] = {}  # as _known

    def choice(self, kernel: Kernel, problem: Any) -> Choice:
        """The configuration and code for `problem`, for the launcher and `kerngen compile`. Raises ConfigRefused."""
        asked = kernel.name, problem
        if (found := self._known.get(asked)) is None:
            if len(self._known) >= CHOICES_KEPT:
                self._known.clear()
            found = self._known[asked] = self._selector(kernel, problem).choice(problem)
        return found

    def tuned_lengths(self, kernel: Kernel, problem: Any) -> Sequence[int]:
        """See KernelSelector.tuned_lengths; of the problem whose tuning serves this one, where nothing else does."""
        own = self._selector(kernel, problem).tuned_lengths(problem)
        alike = kernel.tuned_as(problem)
        return own or (() if alike == problem else self._selector(kernel, alike).tuned_lengths(alike))

    def telling_lengths(self, kernel: Kernel, problem: Any, most: int) -> list[int]:
        """See KernelSelector.telling_lengths."""
        return self._selector(kernel, problem).telling_lengths(problem, most)

    def fuses(self, kernel: Kernel, problem: Any) -> bool:
        """Whether a step asks `kernel` for `problem`; if not, it asks the kernels that this one replaces."""
        asked = kernel.name, problem
        if (found := self._fused.get(asked)) is None:
            if len(self._fused) >= CHOICES_KEPT:
                self._fused.clear()
            found = self._fused[asked] = self._fuses(kernel, problem)
        return found

    def _fuses(self, kernel: Kernel, problem: Any) -> bool:
        if kernel.why_unsupported(problem, self.target) is not None:
            return False
        try:
            return bool(self.choice(kernel, problem).config.fused)
        except (ConfigRefused, ProblemError):  # no configuration serves it; the kernels that it replaces do
            return False

    def _selector(self, kernel: Kernel, problem: Any) -> KernelSelector:
        key = (kernel.name, *_static(kernel)(problem))
        if (selector := self._selectors.get(key)) is None:
            near = self._neighbourhood if self._sources else None
            is_itself = kernel.tuned_as(problem) == problem
            alike = None if is_itself else lambda problem: self.choice(kernel, kernel.tuned_as(problem))
            table = self._table(kernel, problem)
            selector = self._selectors[key] = KernelSelector(kernel, self.target, table, near, alike)
        return selector

    def _table(self, kernel: Kernel, problem: Any) -> WinnerTable | None:
        """What the databases have tuned of its compiled-in fields; None without any."""
        if not self._sources:
            return None
        from kerngen.tuning_db import WinnerTable

        return WinnerTable(self._sources, kernel, problem, self.target, self._digest_of)


@cache
def default_selector(target: Target) -> Selector:
    """Chooses defaults alone."""
    return Selector((), target)


@cache
def _static(kernel: Kernel) -> Callable[[Any], tuple[Any, ...]]:
    """Gives the compiled-in fields of a problem as a tuple."""
    names = [f.name for f in fields(kernel.problem_type) if f.name not in kernel.problem_type.RUNTIME]
    if len(names) == 1:  # attrgetter gives no tuple then
        (name,) = names
        return lambda problem: (getattr(problem, name),)
    return attrgetter(*names) if names else lambda problem: ()
