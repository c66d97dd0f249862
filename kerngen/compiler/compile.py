"""Source to machine code with NVRTC. No GPU, no driver: any machine builds for every architecture.

`compile_cubin` and `compile_ptx` are functions of their arguments: the same source, arch, options and NVRTC give the
same bytes. Registers, spills and shared memory are read from the ptxas report and cross-checked in the ELF.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

from kerngen.arch import Arch
from kerngen.compiler.source import NAME, located, source_digest
from kerngen.errors import CompileError, ToolchainError
from kerngen.system.files import make_room_for_cupy

if TYPE_CHECKING:
    from concurrent.futures import Future

DEFAULT_OPTIONS: tuple[str, ...] = ("-std=c++17", "--extra-device-vectorization")
KEY_VERSION = 2
# What changes the report and not the code. NVRTC 13 answers a repeated compile from a cache of its own, without a
# ptxas report, unless it is told not to.
_REPORTING = ("--ptxas-options=-v", "--no-cache")
# EIATTR codes of the .nv.info sections, as cuobjdump names them.
_EIATTR_REGCOUNT = 0x2F
_EIATTR_MIN_STACK_SIZE = 0x12


@dataclass(frozen=True, slots=True)
class Resources:
    """What one entry point takes. Per thread: registers, spill and stack bytes. Per block: static_smem_bytes."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_smem_bytes: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """Compiled machine code and what it takes. `key` is `cache_key` of what it was made from."""

    key: str
    arch: str
    nvrtc: tuple[int, int]
    image: bytes
    entries: dict[str, Resources]
    log: str
    compile_ms: float = 0.0

    @property
    def spills(self) -> bool:
        return any(r.spill_store_bytes or r.spill_load_bytes for r in self.entries.values())

    @property
    def registers(self) -> int:
        return max(r.registers for r in self.entries.values())

    @property
    def static_smem_bytes(self) -> int:
        return max(r.static_smem_bytes for r in self.entries.values())


@dataclass(frozen=True, slots=True)
class Ptx:
    """Portable assembly for a virtual architecture; the driver compiles it for the GPU at hand when it is loaded."""

    key: str
    arch: str
    nvrtc: tuple[int, int]
    image: bytes


@cache
def _nvrtc() -> Any:
    try:
        make_room_for_cupy()
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as e:
        if isinstance(e, OSError) and e.filename:  # a library that is missing has none
            fix = "it wants a folder to keep files in: export CUPY_CACHE_DIR=FOLDER, one that can be written"
        else:
            fix = "install it: pip install 'kerngen[cuda12]' (every arch) or 'kerngen[cuda13]' (sm75 and newer)"
        raise ToolchainError(f"cannot load NVRTC through CuPy: {e}", hint=fix) from e
    return nvrtc


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that compiles here. Raises ToolchainError if there is none."""
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def supported_targets() -> frozenset[int]:
    """The compute capabilities (70, 90, 120) that the loaded NVRTC can target."""
    return frozenset(int(a) for a in _nvrtc().getSupportedArchs())


def require_target(arch: Arch) -> None:
    """Raises ToolchainError, naming the extra to install, if the loaded NVRTC cannot compile for `arch`."""
    if arch.cubin_number not in supported_targets():
        major, minor = nvrtc_version()
        what = arch if arch.cubin_number == arch.number else arch.nvrtc_target
        raise ToolchainError(
            f"NVRTC {major}.{minor} cannot compile for {what}",
            hint=f"install the one that can: pip install 'kerngen[{'cuda12' if arch.number < 75 else 'cuda13'}]'",
        )


def cache_key(source: str, target: str, options: tuple[str, ...], nvrtc: tuple[int, int]) -> str:
    """sha256 of everything that decides the machine code, in a versioned canonical encoding.

    Comments do not (identity.py): nothing of them is in the machine code, since no option asks for line numbers. A
    failure is not cached, so a message always has the lines of its own text. target: what NVRTC is asked for, "sm_70"
    or "compute_70".
    """
    fields = {"v": KEY_VERSION, "nvrtc": list(nvrtc), "options": list(options), "source": source_digest(source),
              "target": target}  # fmt: skip
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def source_key(source: str, target: str, options: tuple[str, ...] = DEFAULT_OPTIONS) -> str:
    """As cache_key, but for any NVRTC: what identifies PTX that was compiled on another machine."""
    return cache_key(source, target, options, (0, 0))


def _compile(source: str, target: str, options: tuple[str, ...]) -> tuple[Any, str]:
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(str(source), NAME, (), ())  # CuPy takes no subclass of str
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={target}", *_REPORTING, *options))
    except nvrtc.NVRTCError as e:
        log = located(source, nvrtc.getProgramLog(program))
        nvrtc.destroyProgram(program)
        raise CompileError(f"NVRTC rejected the source for {target}: {first_error(log) or e}", log=log) from e
    return program, nvrtc.getProgramLog(program)


def first_error(log: str) -> str:
    """The first error of NVRTC's log, with the line of the source that it shows and how many more there are."""
    lines = log.rstrip("\0").splitlines()
    errors = [i for i, line in enumerate(lines) if re.search(r"\berror\b.*: |^ptxas fatal", line)]
    if not errors:
        return log.strip("\0 \n")[:200]
    end = next((i for i in range(errors[0], len(lines)) if not lines[i].strip()), len(lines))
    shown = lines[errors[0] : min(end, *errors[1:2], end)]
    return "\n  ".join([*shown, *([f"and {len(errors) - 1} more"] if len(errors) > 1 else [])])


def compile_cubin(source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> Cubin:
    """Compile `source` for `arch`. Deterministic: same arguments and NVRTC, same bytes.

    Raises ToolchainError if this NVRTC cannot target `arch`, CompileError (with NVRTC's log) if the source is wrong
    or the ptxas report and the ELF disagree.
    """
    from time import perf_counter

    require_target(arch)
    version = nvrtc_version()
    start = perf_counter()
    program, log = _compile(source, arch.nvrtc_target, options)
    image = whole_elf(_nvrtc().getCUBIN(program))
    _nvrtc().destroyProgram(program)
    entries = parse_report(log)
    check_against_elf(entries, image, arch)
    key = cache_key(source, arch.nvrtc_target, options, version)
    return Cubin(key, arch.name, version, image, entries, log, (perf_counter() - start) * 1e3)


def compile_ptx(source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> Ptx:
    """Compile `source` to PTX for `arch`'s virtual architecture (compute_70). Errors as compile_cubin."""
    require_target(arch)
    program, _ = _compile(source, arch.ptx_target, options)
    image = _nvrtc().getPTX(program)
    _nvrtc().destroyProgram(program)
    # NVRTC ends PTX with a NUL; the driver wants exactly one.
    image = image.rstrip(b"\0") + b"\0"
    return Ptx(source_key(source, arch.ptx_target, options), arch.name, nvrtc_version(), image)


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def parse_report(log: str) -> dict[str, Resources]:
    """Entry point -> Resources, from the log that `--ptxas-options=-v` gives. Raises CompileError if it has none."""
    entries: dict[str, Resources] = {}
    name, stack = None, (0, 0, 0)
    for line in log.splitlines():
        if m := _ENTRY.search(line):
            name, stack = m.group(1), (0, 0, 0)
        elif name and (m := _STACK.search(line)):
            stack = (int(m.group(1)), int(m.group(2)), int(m.group(3)))
        elif name and (m := _USED.search(line)):
            entries[name] = Resources(int(m.group(1)), stack[1], stack[2], stack[0], int(m.group(2) or 0))
            name = None
    if not entries:
        raise CompileError("NVRTC's log holds no ptxas report", log=log,
                           hint="does the source declare an extern \"C\" __global__ function?")  # fmt: skip
    return entries


def whole_elf(image: bytes) -> bytes:
    """`image` with the last byte that CuPy's getCUBIN drops (it takes it for a string's NUL).

    The file ends with a table of headers, whose last field is a 64-bit alignment or entry size: that byte is zero. The
    driver loads the short file, disassemblers do not. Raises CompileError if anything else is missing.
    """
    tables = [  # e_phoff, e_phentsize, e_phnum; e_shoff, e_shentsize, e_shnum of a 64-bit little-endian ELF
        int.from_bytes(image[at : at + 8], "little")
        + int.from_bytes(image[size : size + 2], "little") * int.from_bytes(image[size + 2 : size + 4], "little")
        for at, size in ((0x20, 0x36), (0x28, 0x3A))
    ]
    missing = max(tables) - len(image)
    if image[:5] != b"\x7fELF\x02" or missing > 1:
        raise CompileError(f"NVRTC's cubin is not a whole 64-bit ELF: {len(image)} bytes, headers end at {max(tables)}")
    return image + b"\0" * max(0, missing)


def elf_resources(image: bytes) -> dict[str, tuple[int, int]]:
    """Entry point -> (registers, static shared memory bytes) as the cubin's ELF states them.

    On sm90 and newer .nv.shared counts 1,024 bytes more than the ptxas report: the system's own.
    """
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    elf = ELFFile(BytesIO(image))
    symbols = elf.get_section_by_name(".symtab")
    info = elf.get_section_by_name(".nv.info")
    if not isinstance(symbols, SymbolTableSection) or info is None:
        raise CompileError("the cubin has no symbol table or no .nv.info section")
    data, at, registers = info.data(), 0, {}
    while at + 4 <= len(data):  # format byte, attribute byte, u16 size or value
        form, attribute, size = data[at], data[at + 1], int.from_bytes(data[at + 2 : at + 4], "little")
        at += 4
        if form != 4:  # EIFMT_SVAL carries a payload; the others fit in the u16
            continue
        if attribute == _EIATTR_REGCOUNT:
            symbol = int.from_bytes(data[at : at + 4], "little")
            registers[symbols.get_symbol(symbol).name] = int.from_bytes(data[at + 4 : at + 8], "little")
        at += size
    shared = {s.name[len(".nv.shared.") :]: s["sh_size"] for s in elf.iter_sections()
              if s.name.startswith(".nv.shared.")}  # fmt: skip
    text = [s.name[len(".text.") :] for s in elf.iter_sections() if s.name.startswith(".text.")]
    return {name: (registers.get(name, 0), int(shared.get(name, 0))) for name in text}


def check_against_elf(entries: dict[str, Resources], image: bytes, arch: Arch) -> None:
    """Raises CompileError where the ptxas report and the ELF disagree on registers or shared memory."""
    elf = elf_resources(image)
    for name, r in entries.items():
        if name not in elf:
            raise CompileError(f"entry {name} is in the ptxas report but not in the cubin")
        registers, shared = elf[name]
        if registers != r.registers or shared not in (r.static_smem_bytes, r.static_smem_bytes + 1024):
            raise CompileError(
                f"{name} on {arch}: the report says {r.registers} registers and {r.static_smem_bytes} B of shared "
                f"memory, the ELF {registers} and {shared}"
            )


class CompilePool:
    """Compiles in `jobs` processes. Each worker is fresh (spawned), so nothing of the parent leaks into a build."""

    def __init__(self, jobs: int) -> None:
        from kerngen.system.processes import Processes  # whoever serves compiled code needs none

        self._processes = Processes(jobs, tries=2)

    def submit(self, source: str, arch: Arch, options: tuple[str, ...] = DEFAULT_OPTIONS) -> Future[Cubin]:
        return self._processes.submit(compile_cubin, source, arch, options)

    def close(self) -> None:
        self._processes.close()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
