"""Checks a spec.py against the contract of kernel.py as it is loaded. Errors name the file and the line."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from kerngen.compiler.source import shown
from kerngen.errors import TemplateError
from kerngen.templates.kernel import POINTERS, Arg, Body, Spec, load_part

# Functions of a spec.py, with the number of arguments that each is called with.
REQUIRED = {"why_invalid": 3, "launches": 3, "cost": 1}
CHOICE = {"candidates": 2, "default_config": 2}  # one: configurations to choose among, or the choice
OPTIONAL = {
    "expected_registers": 3, "why_unsupported": 2, "smem_bytes": 3, "outputs": 1, "workspace_bytes": 3,
    "constants": 3, "traffic": 3, "ranked_as": 2, "replaces": 1,
}  # fmt: skip
ARG_KINDS = (*POINTERS, "i32", "i64", "f32", "map")


def load_spec(name: str, folder: Path) -> Spec:
    """The spec.py of the kernel in `folder`. Raises TemplateError, with file, line and reason, if it is wrong."""
    path = folder / "spec.py"
    if not name.isidentifier():
        raise TemplateError(f"kernel {name}: {shown(folder)}: {name!r} is no Python name, so nothing can import it")
    module = load_part(name, "spec", folder)
    if wrong := list(_complaints(module, folder)):
        lines = _lines(path)
        places = [f"{shown(path)}:{lines[about]}" if about in lines else shown(path) for about, _ in wrong]
        first, *others = [f"{place}: {why}" for place, (_, why) in zip(places, wrong, strict=True)]
        raise TemplateError(f"kernel {name}: {first}", hint="\n  ".join(others) or None)
    return cast(Spec, module)


def _lines(path: Path) -> dict[str, int]:
    """Name -> the line on which the module at `path` defines it."""
    found: dict[str, int] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.lineno
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found |= {n.id: node.lineno for n in ast.walk(target) if isinstance(n, ast.Name)}
    return found


def _complaints(spec: Any, folder: Path) -> Iterator[tuple[str, str]]:
    """(what it is about, why) for each thing that is not as kernel.py says."""
    needed = ("Problem", "Config", "BODIES", "OUTPUTS", *REQUIRED)
    if absent := [name for name in needed if not hasattr(spec, name)]:
        yield "", f"lacks {', '.join(absent)}; a spec.py has {', '.join(needed)}"
        return
    if sum(hasattr(spec, name) or (folder / f"{name}.py").is_file() for name in CHOICE) != 1:
        yield "", f"has not one of {' and '.join(CHOICE)}: which configurations to choose among, or the choice itself"
    for name, count in (REQUIRED | CHOICE | OPTIONAL).items():
        if hasattr(spec, name) and (why := _why_not_called(getattr(spec, name), count)):
            yield name, f"{name} {why}"
    for name in ("Problem", "Config"):
        if not (is_dataclass(cls := getattr(spec, name)) and isinstance(cls, type)):
            yield name, f"{name} is no dataclass"
            return
        if not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            yield name, f"{name} is not frozen: @dataclass(frozen=True, slots=True)"
    yield from _of_problem(spec.Problem)
    if unset := [f.name for f in fields(spec.Config) if f.default is f.default_factory is MISSING]:
        yield "Config", f"{', '.join(unset)} of Config must have defaults: what a body leaves out keeps them"
    if hasattr(spec, "replaces") and "fused" not in {f.name for f in fields(spec.Config)}:
        yield "Config", "Config has no field fused: whether a step asks the kernel, or those of `replaces`"
    if not (isinstance(spec.BODIES, tuple) and spec.BODIES and all(isinstance(b, Body) for b in spec.BODIES)):
        yield "BODIES", "BODIES is not a tuple of Body, at least one"
        return
    for body in spec.BODIES:
        yield from (("BODIES", why) for why in _of_body(body, spec, folder))


def _why_not_called(function: Any, count: int) -> str | None:
    if not callable(function):
        return "is not a function"
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return f"is called with {count} argument{'s' * (count > 1)}, and does not take so many"
    return None


def _of_problem(problem: Any) -> Iterator[tuple[str, str]]:
    names = {f.name for f in fields(problem)}
    runtime, dynamic = getattr(problem, "RUNTIME", None), getattr(problem, "DYNAMIC", None)
    if not isinstance(runtime, tuple) or not set(runtime) <= names:
        yield "Problem", f"Problem.RUNTIME is {runtime!r}, not a tuple of its fields: {', '.join(sorted(names))}"
    elif dynamic not in ("", *runtime):
        yield "Problem", f"Problem.DYNAMIC is {dynamic!r}: one of RUNTIME ({', '.join(runtime)}), or '' for none"
    alike = getattr(problem, "TUNED_AS_DEFAULT", ())
    settled = {f.name for f in fields(problem) if f.default is not MISSING} - set(runtime or ())
    if not isinstance(alike, tuple) or not set(alike) <= settled:
        yield "Problem", f"Problem.TUNED_AS_DEFAULT is {alike!r}, not a tuple of compiled-in fields that have defaults"


def _compiled_in(problem: Any) -> set[str]:
    return {f.name for f in fields(problem)} - set(getattr(problem, "RUNTIME", ()))


def _of_body(body: Body, spec: Any, folder: Path) -> Iterator[str]:
    if not (folder / body.template).is_file():
        yield f"template {body.template}: no such file in {shown(folder)}"
    if not (isinstance(body.args, Mapping) and body.args):
        yield f"{body.template}: args is {body.args!r}, not entry point -> arguments, at least one"
        return
    args = [a for entry in body.args.values() for a in entry]
    if wrong := [a for a in args if not isinstance(a, Arg) or a.kind not in ARG_KINDS]:
        yield f"{body.template}: {wrong[0]!r} is no Arg of kind {', '.join(ARG_KINDS)}"
        return
    if strange := [a.only for a in args if a.only not in ("", *_compiled_in(spec.Problem))]:
        yield f"{body.template}: {strange[0]} of an argument's `only` is no compiled-in field of Problem"
    pointers = {a.name for a in args if a.kind == "ptr"}
    if maps := [a.name for a in args if a.kind == "map" and (a.of not in pointers or not hasattr(spec, "tensor_map"))]:
        yield f"{body.template}: {', '.join(maps)}: a map is `of` another argument that is a ptr, as tensor_map says"
    if lost := [name for name in spec.OUTPUTS if name not in {a.name for a in args if a.kind in POINTERS}]:
        yield f"{body.template}: OUTPUTS has {', '.join(lost)}, which is no {' or '.join(POINTERS)} of its args"
    config = {f.name for f in fields(spec.Config)}
    if strange := [name for name in (*body.space, *body.when) if name not in config]:
        yield f"{body.template}: its space has {', '.join(strange)}; Config has {', '.join(sorted(config))}"
    for name, values in body.space.items():
        if not callable(values) and not (isinstance(values, tuple) and values):
            yield f"{body.template}: the candidates of {name} are {values!r}, not a tuple of values or a function"
