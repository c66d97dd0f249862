"""Every `@op` of every kernel folder as a custom operator of torch, in the namespace `kerngen`.

The op's annotations give its schema; a parameter that is a value stands for its fields there (`call.Op`). Its kernel
makes the Call and has it executed where the tensors are; its fake makes the Call on tensors without storage and
executes nothing, since a Call has its result allocated already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.library import CustomOpDef, custom_op

from kerngen.errors import KerngenError, LaunchError, UsageError
from kerngen.ops.devices import executor
from kerngen.ops.takes import Takes
from kerngen.runtime.launcher import require_layout
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.call import Call, Op
from kerngen.templates.kernel import Arg, Kernel, spread

log = logging.getLogger(__name__)

NAMESPACE = "kerngen"
P = ParamSpec("P")
R = TypeVar("R")
_registered: dict[str, tuple[Op[..., Any], CustomOpDef, Callable[..., Any]]] = {}  # by the op's name


def functions() -> dict[str, Callable[..., Any]]:
    """Name -> function on tensors, of every op of every kernel folder at hand, registered with torch once.

    A folder whose op.py cannot be used is left out with a warning. Raises UsageError where two folders have an op of
    one name.
    """
    found = {}
    for kernel in map(find_kernel, kernel_names()):
        for op in _ops(kernel):
            try:
                found[op.name] = _function(op)
            except (TypeError, ValueError, NameError) as e:  # its annotations give no schema
                log.warning("kernel %s: torch takes no op %s: %s; left out", kernel.name, op.name, e)
    return found


def _ops(kernel: Kernel) -> Iterator[Op[..., Any]]:
    if not (kernel.folder / "op.py").is_file():
        return
    try:
        module = kernel.op
    except KerngenError as e:
        log.warning("%s; its ops are left out", e.message)
        return
    yield from (v for v in vars(module).values() if isinstance(v, Op) and v.make.__module__ == module.__name__)


def _function(op: Op[P, R]) -> Callable[P, R]:
    if (known := _registered.get(op.name)) is None:
        known = _registered[op.name] = (op, *_register(op))
    if known[0].make.__module__ != op.make.__module__:
        places = " and ".join(sorted(o.make.__module__ for o in (known[0], op)))
        raise UsageError(f"two kernel folders have an op {op.name}: {places}", hint="rename one of them")
    return known[2]


def _register(op: Op[P, R]) -> tuple[CustomOpDef, Callable[P, R]]:
    """Raises TypeError, ValueError or NameError where torch cannot read the op's annotations."""
    signature = op.signature
    parameters = signature.parameters.values()
    names = tuple(signature.parameters)
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}  # torch leaves out what equals them
    tensors = tuple(p.name for p in parameters if p.annotation in (Tensor, Tensor | None, list[Tensor]))
    takes = Takes(op, tensors, tuple(n for n in names if n not in tensors))

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        takes.check(arguments)
        device = _device(op.name, {n: arguments[n] for n in tensors})
        call = op.of_flat(arguments)
        if device.type != "cuda":
            _require_layouts(call)
            return executor(device).run(call, "")
        with torch.cuda.device(device):
            return executor(device).run(call, "")

    def fake(*args: Any, **kwargs: Any) -> Any:
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        takes.check_anew(arguments)
        return op.of_flat(arguments).result

    for made in (run, fake):
        made.__name__ = op.name
        made.__signature__ = signature  # type: ignore[attr-defined]
    registered = custom_op(f"{NAMESPACE}::{op.name}", run, mutates_args=op.mutates, device_types=("cpu", "cuda"))
    registered.register_fake(fake)
    overload = getattr(getattr(torch.ops, NAMESPACE), op.name).default

    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = overload(*args, **kwargs)
        return result

    function.__name__ = function.__qualname__ = op.name
    function.__module__ = "kerngen.ops"
    function.__doc__ = op.make.__doc__
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": signature.return_annotation}
    return registered, function


def _device(name: str, tensors: Mapping[str, Tensor | list[Tensor] | None]) -> torch.device:
    """Where all of a call's tensors are. Raises LaunchError where they are apart."""
    first: dict[torch.device, str] = {}
    for _, shown, tensor in spread(tensors):
        if tensor is not None:
            first.setdefault(tensor.device, shown)
    if len(first) > 1:
        places = ", ".join(f"{shown} on {device}" for device, shown in first.items())
        raise LaunchError(f"{name}: its tensors are on several devices: {places}")
    return next(iter(first))


@cache
def _args_of(kernel: str) -> Mapping[str, Arg]:
    """The arguments of `kernel` by name; of several of one name one whose rows need not follow each other."""
    args = (a for body in find_kernel(kernel).spec.BODIES for entry in body.args.values() for a in entry)
    return {a.name: a for a in sorted(args, key=lambda a: not a.contiguous)}


def _require_layouts(call: Call[Any]) -> None:
    """As the launcher asks it of tensors on a GPU, so that what runs here runs there."""
    for name, shown, value in spread(call.arguments):
        if isinstance(value, Tensor):
            require_layout(call.kernel, _args_of(call.kernel)[name], shown, value, call.problem)
