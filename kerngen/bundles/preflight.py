"""Preflight check of a model on one GPU: which configuration each kernel runs, who chose it, what is not built yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kerngen.arch import DEFAULT_DEVICE, Target
from kerngen.compiler.builds import Build, workload_builds
from kerngen.compiler.cache import CompileCache, compiling_is_forbidden
from kerngen.compiler.compile import require_target
from kerngen.errors import KerngenError
from kerngen.runtime.selection import Choice, Selector
from kerngen.templates import find_kernel
from kerngen.tuning_db.read.ranks import is_exact
from kerngen.workload.workload import Workload

EXACT, SAME_ARCH, CARRIED, PREDICTED, DEFAULT = "exact device", "same arch", "carried", "predicted", "default"
KINDS = (EXACT, SAME_ARCH, CARRIED, PREDICTED, DEFAULT)  # measured, measured, then what their names say; the best first


@dataclass(frozen=True, slots=True)
class Preflight:
    """kinds: kernel -> how many of its problems run what. builds: how many there are. missing: those in no place.

    blocked: why what is missing cannot be made here either, "" where it can. unsupported: in words.
    """

    target: Target
    kinds: dict[str, Counter[str]]
    builds: int
    stored: int
    missing: list[Build]
    blocked: str
    unsupported: list[str] = field(default_factory=list)

    @property
    def works(self) -> bool:
        return not self.unsupported and not (self.missing and self.blocked)

    def kernels(self, *kinds: str) -> list[str]:
        """Those with problems of one of these kinds."""
        return [name for name, counts in self.kinds.items() if any(counts[k] for k in kinds)]


def kind_of(choice: Choice, target: Target) -> str:
    """One of KINDS."""
    if choice.winner is None:
        return DEFAULT if choice.neighbour is None else PREDICTED
    if choice.provenance != "measured":
        return choice.provenance
    return EXACT if is_exact(choice.winner.device, target.device) else SAME_ARCH


def preflight(load: Workload, selector: Selector, cache: CompileCache) -> Preflight:
    """Of `load` on the selector's target, with the machine code of their stores and of `cache`."""
    target = selector.target
    kinds: dict[str, Counter[str]] = {}
    for item in load.items:
        kernel = find_kernel(item.kernel)
        if kernel.why_unsupported(item.problem, target) is None:
            kinds.setdefault(kernel.name, Counter())[kind_of(selector.choice(kernel, item.problem), target)] += 1
    unsupported: list[str] = []
    builds = workload_builds(load, selector, unsupported)
    found = _finder(cache)
    missing = [b for b in builds if b.stored is None and not found(b)]
    stored = sum(b.stored is not None for b in builds)
    return Preflight(target, kinds, len(builds), stored, missing, _why_not_compiled(target), unsupported)


def _finder(cache: CompileCache) -> Callable[[Build], Any]:
    """Whether a build is in `cache`: nothing is where no NVRTC says by which version it is filed."""

    def find(build: Build) -> Any:
        try:
            return cache.find(build.source, build.target.arch)
        except KerngenError:
            return None

    return find


def _why_not_compiled(target: Target) -> str:
    if compiling_is_forbidden():
        return "KERNGEN_NO_COMPILE forbids compiling"
    try:
        require_target(target.arch)
    except KerngenError as e:
        return e.message
    return ""


def advice(
    found: Preflight, model: str, here: Target | None, *, bundle: bool, named: str | None = None
) -> dict[str, str]:
    """Command -> what it improves. model: what follows --model, with the drafter's options. here: this machine's GPU.
    bundle: the answers came from one. named: what --device calls the board, its name by default.
    """
    arch, device = found.target.arch.name, found.target.device.name
    is_here = here is not None and here.device.name == device
    usual = (
        f"--arch {arch} --model {model}"  # means the GPU at hand where that is measured, else the arch's usual board
    )
    board = usual
    if not is_here and DEFAULT_DEVICE[arch] != device:
        board = f"--arch {arch} --device {named or device} --model {model}"
    below = found.kernels(SAME_ARCH, CARRIED, PREDICTED, DEFAULT)
    commands: dict[str, str] = {}
    if is_here and below:
        commands[f"kerngen tune {usual}{_only(found, below)}"] = "measures on this GPU"
    elif below:
        if kernels := found.kernels(DEFAULT):
            commands[f"kerngen tune {board}{_only(found, kernels)} --objective predicted"] = f"predicts for {device}"
        commands[f"kerngen tune {usual}{_only(found, below)}"] = f"measures, on a machine with {device}"
    if found.missing and found.blocked:
        commands[f"kerngen compile {board} -o FILE"] = (
            "makes a bundle, where compiling is possible; then export KERNGEN_BUNDLE=FILE"
        )
    elif bundle and commands:
        commands[f"kerngen compile {board} -o FILE"] = "makes a bundle of what that finds"
    elif found.missing:
        commands[f"kerngen compile {board}"] = "builds ahead what a run would compile"
    return commands


def _only(found: Preflight, kernels: list[str]) -> str:
    return "" if len(kernels) == len(found.kinds) else f" --kernel {','.join(kernels)}"
