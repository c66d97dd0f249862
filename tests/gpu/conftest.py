"""Tests here need a CUDA device; without one they skip and say so.

`make test-gpu` runs them in parallel and then, alone, those marked `whole_gpu`: they time what they run. `--smoke`
chooses of each test function the fewest tests in which each value of each parameter occurs, and of a test's many
configurations some (bodies.py).
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from typing import Any

import bodies
import pytest

from kerngen.arch import ARCHES, Arch
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import Body, Case, Kernel, fields_of, static_fields

# Streams that wait for each other (test_exchange_norm.py) must have queues of their own; read as CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
MOST_SHAPES = 12  # that cases take turns of
MOST_KEPT_BYTES = 1 << 30  # of freed memory in one process's pool: fifteen of them share a GPU


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--smoke", action="store_true", help="run a sample: each kernel, body and edge once")


def pytest_configure(config: pytest.Config) -> None:
    bodies.smoke = config.getoption("--smoke", default=False)


def _why_not() -> str | None:
    try:
        import torch
    except ImportError as e:
        return f"torch cannot be imported: {e}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    try:
        import cupy  # noqa: F401
        from cuda.bindings import driver  # noqa: F401
    except ImportError as e:
        return f"{e}; pip install 'kerngen[cuda12]'"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/gpu" in str(item.path)]
    if config.getoption("--smoke", default=False):
        chosen = set(_sample(here))
        config.hook.pytest_deselected(items=[item for item in here if item not in chosen])
        items[:] = [item for item in items if item in chosen or item not in set(here)]
        here = [item for item in here if item in chosen]
    reason = _why_not()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _give_back_memory() -> Iterator[None]:
    yield
    import torch

    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MOST_KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share a cubin or a fixture that takes long to make go to one worker; others to who is free.

    Not by marks: with pytest 9.2 pytest-xdist 3.8 does not see `xdist_group`.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByCubin(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return ByCubin(config, log)


def _group(nodeid: str) -> str:
    """Of a test of a kernel's case that of its cubin: two workers that need one at once would both compile it."""
    path, _, test = nodeid.partition("::")
    name, case, body = path.rpartition("/")[2], test.partition("[")[2].removesuffix("]"), "own"
    if name == "test_kernels.py":
        case, _, body = case.rpartition("-")
    if name == "test_choosing.py":
        return name
    return f"{body} {_compiled()[case]}" if case in _compiled() else nodeid


@cache
def _compiled() -> dict[str, str]:
    """Kernel and case, as ids of tests have them -> what is compiled in."""
    cases = [(name, case) for name in kernel_names() for case in find_kernel(name).cases.CASES]
    return {f"{name}-{case}": f"{name} {static_fields(case.problem)}" for name, case in cases}


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else dict(callspec.params)


def _sample(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Of each test function the fewest in which each value of each parameter occurs: always the one that has the most
    values that are still missing. Of a case what counts are the fields of its problem; of an older architecture's body
    those that are compiled in, where it has them in the dtypes of its own.
    """
    functions: dict[Hashable, dict[pytest.Item, set[Hashable]]] = {}
    for item in items:
        if any(not mark.kwargs.get("smoke", True) for mark in item.iter_markers("whole_gpu")):
            continue
        parameters = _parameters(item)
        function = (item.path, getattr(item, "originalname", item.name), parameters.get("name"), parameters.get("body"))
        if (values := _values(item)) is not None:
            functions.setdefault(function, {})[item] = values
    for values_of in functions.values():
        missing: set[Hashable] = set().union(*values_of.values())
        yield (first := max(values_of, key=lambda item: len(values_of[item])))  # of those without parameters, too
        missing -= values_of.pop(first)
        while missing:
            yield (best := max(values_of, key=lambda item: len(values_of[item] & missing)))
            missing -= values_of.pop(best)


def _values(item: pytest.Item) -> set[Hashable] | None:
    """None where an older body does not serve it."""
    parameters = _parameters(item)
    body, found = parameters.get("body"), set[Hashable]()
    for name, value in parameters.items():
        if not isinstance(value, Case):
            found.add((name, value % MOST_SHAPES if name == "turn" else str(value)))
            continue
        fields = fields_of(value.problem) if body == "own" else static_fields(value.problem)
        if body in ARCHES:
            arch, bodies = ARCHES[body], _kernel(item).spec.BODIES
            if not arch.has_bf16 and "bf16" in fields.values():
                return None
            if any(_alike(arch, other, bodies) for other in ARCHES.values() if other.number < arch.number):
                fields = {key: field for key, field in fields.items() if key.endswith("dtype")}
        found |= {("field", *field) for field in fields.items()}
        found |= {("option", key, str(option)) for key, option in value.options.items() if body == "own"}
    return found


def _kernel(item: pytest.Item) -> Kernel:
    """That a test's parameters name, or its file is about."""
    name = _parameters(item).get("name")
    kernel: Kernel = vars(item.module)["KERNEL"] if name is None else find_kernel(name)  # type: ignore[attr-defined]
    return kernel


def _alike(arch: Arch, other: Arch, bodies: Sequence[Body]) -> bool:
    """Whether what is tested of one need not be tested of the other, but for what fits."""
    return arch.has_bf16 == other.has_bf16 and all(body.serves(arch) == body.serves(other) for body in bodies)
