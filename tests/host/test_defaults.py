"""Default configurations: those of the golden file, and what must hold of each whatever it is."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import golden
import pytest

from kerngen.arch import Target, find_device
from kerngen.errors import KerngenError
from kerngen.templates import Kernel, find_kernel, kernel_names

TEXT = golden.PATH.read_text()
LINES = list(golden.sections(TEXT))


def _answered(board: str, line: str) -> str:
    """The line as it would be written now."""
    try:
        kernel, problem = golden.problem_of(line)
        return golden.index_of(kernel, problem, find_kernel(kernel).default_config(problem, _target(board)))
    except KerngenError as e:
        return f"{line.partition(' -> ')[0]}: {e.message}"


def _target(board: str) -> Target:
    return Target.of(find_device(board))


def _changes(lines: list[tuple[str, str]]) -> list[str]:
    """Of each line that differs from what would be written now both, the board before them."""
    now = ((board, line, _answered(board, line)) for board, line in lines)
    return [f"[{board}]\n  was {line}\n  is  {answer}" for board, line, answer in now if answer != line]


def test_defaults_are_those_of_the_golden_file() -> None:
    changed = _changes(LINES)
    assert not changed, "\n".join([f"{len(changed)} lines changed; if they should: make golden", *changed])


def test_a_line_that_changed_is_shown_with_what_it_became() -> None:
    board, line = LINES[0]
    was = f"{line.partition(' -> ')[0]} -> no_such_field=1"
    renamed = f"{line.split(' ')[0]} no_such_field=1 -> -"
    changed, unknown = _changes([(board, was), (board, line), (board, renamed)])
    assert changed == f"[{board}]\n  was {was}\n  is  {line}"
    assert "unknown" in unknown.partition("  is  ")[2]


def test_every_kernel_is_sampled() -> None:
    assert {line.split(" ")[0] for _, line in LINES} == set(kernel_names())
    assert list(dict.fromkeys(board for board, _ in LINES)) == list(golden.BOARDS)
    assert len({(board, line.partition(" -> ")[0]) for board, line in LINES}) == len(LINES), "a problem is twice in it"


def _cases(board: str) -> Iterator[tuple[Kernel, Any, Any]]:
    for name, problem in (golden.problem_of(line) for at, line in LINES if at == board):
        kernel = find_kernel(name)
        yield kernel, problem, kernel.default_config(problem, _target(board))


@pytest.mark.parametrize("board", golden.BOARDS)
def test_a_default_is_valid_and_fits_the_board(board: str) -> None:
    target = _target(board)
    arch = target.arch
    for kernel, problem, config in _cases(board):
        told = golden.index_of(kernel.name, problem, config)
        assert kernel.why_invalid(problem, config, target) is None, told
        assert kernel.smem_bytes(problem, config, target) <= arch.max_smem_bytes, told
        for launch in kernel.launches(problem, config, target):
            (x, y, z), threads = launch.grid, prod(launch.block)
            assert 1 <= x < 2**31, told
            assert 1 <= y <= 65535, told
            assert 1 <= z <= 65535, told
            assert threads % 32 == 0, told
            assert threads <= 1024, told
            assert all(blocks % size == 0 for blocks, size in zip(launch.grid, launch.cluster, strict=True)), told
            if launch.cooperative:  # its blocks wait for each other: registers and shared memory hold them all
                smem = launch.smem_bytes + arch.reserved_smem_bytes
                held = min(arch.smem_per_sm // smem, arch.regs_per_sm // (32 * threads), 2048 // threads)
                assert prod(launch.grid) <= held * target.device.num_sms, told
