"""`python -m tools.timeline` without a GPU: where clocks go, and what is made of what they said."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from kerngen.arch import Target, find_arch
from kerngen.boards import find_device
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import render
from kerngen.errors import CompileError
from kerngen.templates import find_kernel
from kerngen.workload.steps import Step, sequence
from kerngen.workload.workload import find_model
from tools.timeline import FIELDS, Blocks, blocks_of, rows_of, table, with_clocks

EPOCH = 1_764_000_000_000_000_000  # of the clock: nanoseconds, more digits than a float has


@pytest.mark.parametrize(
    ("model", "step"), [("gemma-4-31b", Step.verify(1, 4, 512)), ("gemma-4-26b-a4b", Step.decode(4, 512))]
)
def test_every_kernel_of_a_step_takes_clocks(model: str, step: Step) -> None:
    """One problem of each body: the clocks are put into its text."""
    target, seen = Target.of(find_device("H100")), set()
    for name, problem in dict.fromkeys((x.kernel, x.problem) for x in sequence(find_model(model), step, target.arch)):
        kernel = find_kernel(name)
        config = kernel.default_config(problem, target)
        if (body := (name, kernel.body(config, target.arch).template)) in seen:
            continue
        seen.add(body)
        entries = {x.entry: (3, prod(x.grid)) for x in kernel.launches(problem, config, target)}
        cubin = compile_cubin(with_clocks(render(kernel, problem, config, target), entries), target.arch)
        assert entries.keys() <= cubin.entries.keys()
        assert all(f"clocks_{entry}".encode() in cubin.image for entry in entries)


def test_a_text_without_a_place_for_them() -> None:
    with pytest.raises(CompileError, match=r"\['absent'\].*\[\]"):
        with_clocks('extern "C" __global__ void there(int x) {\n}\n', {"absent": (1, 1)})


def test_a_wait_that_is_spelled_otherwise_is_no_wait_without_marks() -> None:
    text = 'DEVICE void pdl_wait() { wait(); }\nextern "C" __global__ void there(int x) {\n    pdl_wait();\n}\n'
    with pytest.raises(CompileError, match=r"0 .*pdl_wait"):
        with_clocks(text, {"there": (1, 1)})


def test_an_older_arch_has_no_wait_to_tell_of() -> None:
    """Its pdl_wait is empty: marks stand in it all the same, and the text compiles."""
    kernel, arch = find_kernel("rmsnorm"), find_arch("sm80")
    problem = kernel.problem_type(num_tokens=4)
    target = Target.of(arch)
    config = kernel.default_config(problem, target)
    assert compile_cubin(with_clocks(render(kernel, problem, config, target), {"rmsnorm": (1, 4)}), arch)


def _stamps(*blocks: tuple[int, int, int, int]) -> np.ndarray:  # type: ignore[type-arg]
    """As the device leaves them, of (begun, ready, on, ended) after EPOCH; ready and on 0: it does not wait."""
    found = np.zeros((len(blocks), FIELDS), np.uint64)
    for row, (begun, ready, on, ended) in zip(found, blocks, strict=True):
        row[0], row[3] = ~np.uint64(EPOCH + begun), EPOCH + ended
        if on:
            row[1], row[2] = EPOCH + ready, ~np.uint64(EPOCH + on)
    return found


def test_what_blocks_leave() -> None:
    seen = blocks_of(_stamps((0, 100, 900, 2000), (64, 300, 932, 2100), (700, 800, 964, 2500)))
    assert seen == Blocks(*(EPOCH + t for t in (64, 700, 300, 900, 2100, 2500)))
    assert blocks_of(_stamps((0, 0, 0, 50))) == Blocks(EPOCH, EPOCH, None, None, EPOCH + 50, EPOCH + 50)
    missing = _stamps((0, 1, 2, 3), (0, 1, 2, 3))
    missing[1] = 0
    assert blocks_of(missing) is None


def test_rows_count_from_the_end_of_the_launch_before() -> None:
    problem = find_kernel("rmsnorm").problem_type(num_tokens=4)
    a, b, c = ("a", "a", problem), ("second", "b", problem), ("c", "c", problem)

    def launch(begun: int, ended: int) -> Blocks:
        return Blocks(*(EPOCH + t for t in (begun, begun + 100, begun + 200, ended - 500, ended - 100, ended)))

    replay = [launch(0, 1000), launch(500, 3000), None, launch(900, 4000), launch(3500, 6000)]
    rows = rows_of([a, b, c, a, b], [replay, replay])
    assert [(r.entry, r.before, r.count) for r in rows] == [
        ("second", "a", 2)
    ]  # both behind an `a`; the `a` behind c is not known
    (row,) = rows
    assert (row.begun_us, row.last_begun_us, row.ready_us) == (-0.5, -0.4, -0.3)
    assert (row.on_us, row.ended_us, row.last_ended_us) == (1.5, 1.9, 2.0)
    head, line = table(rows)
    assert head.split() == ["launches", "begin", "last", "ready", "on", "done", "last", "done"]
    assert line.split()[:8] == ["second", "behind", "a", "2", "-0.50", "-0.40", "-0.30", "1.50"]
    assert "num_tokens=4" in line
    assert [r.entry for r in rows_of([a, b, a], [[*replay[:2], launch(2000, 5000)]])] == ["second", "a"]
