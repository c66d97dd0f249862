"""Machine code of a sample of each body's configurations, as it was when somebody last said that its time is the same.

    make golden     # rewrites tests/host/machine_code.txt, after a change of device code that needs no new measurement

What was tuned holds as long as a body's revision does (Body.revision), whatever its source says. So a change that makes
a body faster or slower has to raise it. test_machine_code.py notices where that may have been forgotten: most of a
body's sample compiles to something else, and the revision is the same.

A line is `KERNEL PROBLEM -> CONFIG | REVISION SOURCE NVRTC CODE`: of defaults.txt, two configurations of each body, the
first digits of the source's digest and of one over its instructions, whatever its entries are called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import golden
from elftools.elf.elffile import ELFFile

from kerngen.arch import Arch, find_arch, find_device
from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.compiler.compile import Cubin
from kerngen.compiler.render import source_of
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Body, Kernel, parse_fields
from kerngen.tuning_db.read.freshness import source_sha

PATH = Path(__file__).parent / "machine_code.txt"
HEADER = "# Machine code of a sample of each body's configurations. `make golden` rewrites it (machine_code.py)."
SAMPLE = 2  # configurations of a body
DIGITS = 12


@dataclass(frozen=True, slots=True)
class Line:
    """asked: `KERNEL PROBLEM -> CONFIG`. The others are as the file has them."""

    board: str
    asked: str
    revision: int
    source: str
    nvrtc: str
    code: str

    def __str__(self) -> str:
        return f"{self.asked} | {self.revision} {self.source} {self.nvrtc} {self.code}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a line's first part means today. Raises KerngenError where that is nothing."""

    kernel: Kernel
    body: Body
    arch: Arch
    source: str

    @property
    def digits(self) -> str:
        return source_sha(self.source)[:DIGITS]

    @property
    def name(self) -> str:
        return f"{self.kernel.name}/{self.body.template}"


def asked_of(board: str, asked: str) -> Asked:
    arch, (name, problem) = find_arch(find_device(board).arch), golden.problem_of(asked)
    kernel, text = find_kernel(name), asked.partition(" -> ")[2]
    config: Any = parse_fields(kernel.config_type, "" if text == "-" else text)
    return Asked(kernel, kernel.body(config, arch), arch, str(source_of(kernel, problem, config, arch)))


def read(text: str) -> list[Line]:
    found = []
    for board, line in golden.sections(text):
        asked, _, said = line.partition(" | ")
        revision, source, nvrtc, code = said.split(" ")
        found.append(Line(board, asked, int(revision), source, nvrtc, code))
    return found


def code_of(cubin: Cubin) -> str:
    """The first digits of a digest over its instructions."""
    return hashlib.sha256(b"\0".join(sorted(instructions_of(cubin)))).hexdigest()[:DIGITS]


def instructions_of(cubin: Cubin) -> list[bytes]:
    """Of each entry."""
    sections = ELFFile(BytesIO(cubin.image)).iter_sections()
    return [s.data() for s in sections if s.name.startswith(".text.")]


def compiled(compiler: CachedCompiler, asked: Iterable[Asked]) -> Iterator[tuple[str, str]]:
    """(NVRTC's version, code) of each."""
    for future in [compiler.submit(a.source, a.arch) for a in asked]:
        cubin = future.result()
        yield "{}.{}".format(*cubin.nvrtc), code_of(cubin)


def _sample() -> Iterator[tuple[str, str]]:
    """(board, `KERNEL PROBLEM -> CONFIG`), the shortest sources of each body."""
    bodies: dict[str, dict[str, tuple[int, str, str]]] = {}
    for board, line in golden.sections(golden.PATH.read_text()):
        asked = asked_of(board, line)
        bodies.setdefault(asked.name, {}).setdefault(asked.digits, (len(asked.source), board, line))
    for found in bodies.values():
        yield from ((board, line) for _, board, line in sorted(found.values())[:SAMPLE])


def main() -> None:
    known = {(k.board, k.asked, k.source): k for k in (read(PATH.read_text()) if PATH.exists() else ())}
    lines: dict[str, list[Line]] = {board: [] for board in golden.BOARDS}
    anew: list[tuple[str, str, Asked]] = []
    for board, line in _sample():
        asked = asked_of(board, line)
        if (there := known.get((board, line, asked.digits))) is not None:
            kept = Line(board, line, asked.body.revision, there.source, there.nvrtc, there.code)
            lines[board].append(kept)
        else:
            anew.append((board, line, asked))
    with CachedCompiler(2, CompileCache()) as compiler:
        made = compiled(compiler, (asked for *_, asked in anew))
        for (board, line, asked), (nvrtc, code) in zip(anew, made, strict=True):
            lines[board].append(Line(board, line, asked.body.revision, asked.digits, nvrtc, code))
    parts = [HEADER]
    for board, found in lines.items():
        parts += [f"\n[{board}]", *sorted(map(str, found))]
    PATH.write_text("\n".join(parts) + "\n")
    print(f"{PATH}: {sum(map(len, lines.values()))} configurations, {len(anew)} compiled anew")


if __name__ == "__main__":
    main()
