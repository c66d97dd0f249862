"""One kernel at a time, by name: its machine code, and the configuration that was found to be fast."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kerngen.arch import ARCHES, DEVICES, Arch, Device, Target, find_arch, find_device
from kerngen.errors import UnknownName, UsageError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import parse_fields, parse_problem

if TYPE_CHECKING:
    from kerngen.compiler.compile import Cubin
    from kerngen.templates.kernel import Kernel
    from kerngen.tuning_db import Winner

T = TypeVar("T")


def compile_kernel(kernel: str, problem: Any, config: Any = None, *, target: str | Arch | Device | Target) -> Cubin:
    """The machine code of `kernel` for `problem` on `target`. No GPU is needed; what was compiled before is read back.

    problem, config: the kernel's own Problem and Config, or their fields as a mapping, in which fields that have a
    default may be left out (dtypes are then the target's: fp16 before sm80); `kerngen kernel show NAME` lists them.
    config None: the default one; a winner's is `find_winner(...).config`. target: an arch ("sm90"), a board ("L4"), or
    one of kerngen.arch's values.
    Raises UnknownName, ProblemError or UsageError for a request that cannot be right, ConfigRefused for a configuration
    that cannot run there, ToolchainError and CompileError from NVRTC, TuningMiss where KERNGEN_NO_COMPILE is set and
    it would have to be compiled.
    """
    from kerngen.compiler.cache import CompileCache
    from kerngen.compiler.render import render

    found, place = find_kernel(kernel), _target(target)
    wanted = _problem(found, problem, place)
    chosen = found.default_config(wanted, place) if config is None else _made(found.config_type, config, parse_fields)
    return CompileCache().get_or_compile(render(found, wanted, chosen, place), place.arch)


def find_winner(
    kernel: str, problem: Any, *, target: str | Arch | Device | Target, db: str | os.PathLike[str] | None = None
) -> Winner | None:
    """What the tuning databases say is fastest for `problem`, as the runtime would be told; None: nothing serves it.

    kernel, problem, target: as in compile_kernel. db: a path or URL; None for the usual ones (override, user,
    prebuilt). Raises UnknownName, ProblemError or UsageError for a request that cannot be right, DatabaseError.
    """
    from kerngen.tuning_db import lookup, sources_for

    found, place = find_kernel(kernel), _target(target)
    wanted = _problem(found, problem, place)
    return lookup(sources_for(None if db is None else os.fspath(db)), found, wanted, place)


def _target(place: str | Arch | Device | Target) -> Target:
    if isinstance(place, Target):
        return place
    if isinstance(place, Arch | Device):
        return Target.of(place)
    if place in ARCHES:
        return Target.of(find_arch(place))
    try:
        return Target.of(find_device(place))
    except UnknownName:
        raise UnknownName("target", place, [*ARCHES, *DEVICES]) from None


def _problem(kernel: Kernel, value: Any, place: Target) -> Any:
    """A problem of `kernel`; of dtypes that a mapping leaves out, those of the arch."""
    return _made(kernel.problem_type, value, lambda cls, text: parse_problem(cls, text, place.arch))


def _made(cls: type[T], value: Any, parse: Callable[[type[T], str], T]) -> T:
    """`value` if it is one of `cls`, or one made of its fields, which are read as the command line's are."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise UsageError(f"{value!r} is neither a {cls.__module__}.{cls.__qualname__} nor a mapping of its fields")
    return parse(cls, ",".join(f"{name}={field}" for name, field in value.items()))
