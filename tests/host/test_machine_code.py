"""Where machine code of most of a body's sample changed, its revision was raised, or somebody said that it need not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import machine_code
import pytest
from machine_code import Line

from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.templates import find_kernel, kernel_names

LINES = machine_code.read(machine_code.PATH.read_text())
CHEAP = next(line for line in LINES if line.asked.startswith("rmsnorm "))


def _forgotten(lines: Sequence[Line], folder: Path) -> dict[str, str]:
    """Bodies of which most lines compile to other machine code at the same revision -> how many, in words."""
    sampled, changed = Counter[str](), Counter[str]()
    anew = []
    for line in lines:
        asked = machine_code.asked_of(line.board, line.asked)
        sampled[asked.name] += 1
        if asked.body.revision == line.revision and asked.digits != line.source:
            anew.append((line, asked))
    with CachedCompiler(1, CompileCache(folder)) as compiler:
        made = machine_code.compiled(compiler, (asked for _, asked in anew))
        for (line, asked), (nvrtc, code) in zip(anew, made, strict=True):
            changed[asked.name] += nvrtc == line.nvrtc and code != line.code
    return {name: f"{changed[name]} of {n}" for name, n in sampled.items() if 2 * changed[name] > n}


def test_a_body_whose_machine_code_changed_has_another_revision(tmp_path: Path) -> None:
    assert _forgotten(LINES, tmp_path) == {}, (
        "the machine code of these bodies changed, their revision did not: if their times did, raise Body.revision in "
        "spec.py, and what was tuned before is tuned again; if not, say so with `make golden`"
    )


@pytest.mark.parametrize(
    ("line", "is_forgotten"),
    [
        (replace(CHEAP, source="0" * 12, code="0" * 12), True),
        (replace(CHEAP, source="0" * 12), False),  # another text, the same machine code
        (replace(CHEAP, code="0" * 12), False),  # nobody compiles what has not changed
        (replace(CHEAP, source="0" * 12, code="0" * 12, revision=CHEAP.revision - 1), False),
        (replace(CHEAP, source="0" * 12, code="0" * 12, nvrtc="1.0"), False),  # another compiler
    ],
)
def test_what_is_noticed(line: Line, is_forgotten: bool, tmp_path: Path) -> None:
    assert _forgotten([line], tmp_path) == ({"rmsnorm/kernel.cu.jinja": "1 of 1"} if is_forgotten else {})


def test_every_kernel_is_sampled() -> None:
    assert {line.asked.split(" ")[0] for line in LINES} == set(kernel_names())
    bodies = {machine_code.asked_of(line.board, line.asked).name for line in LINES}
    every = {f"{name}/{b.template}" for name in kernel_names() for b in find_kernel(name).spec.BODIES if b.proven}
    assert len(every - bodies) <= 2, f"no board of golden.BOARDS has them by default: {sorted(every - bodies)}"
