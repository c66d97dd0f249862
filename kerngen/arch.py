"""Where a kernel runs: GPU architectures, and targets, which are an architecture and a board of it (boards.py).

`Arch` holds what the compiler needs; it is the same for every GPU of a kind. `Target` is both: what a configuration is
chosen for, where a cubin depends on the arch alone.

Limits: CUDA C++ Programming Guide 12.9, "Compute Capabilities", tables "Feature Support per Compute Capability" and
"Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from kerngen.boards import DEFAULT_DEVICE, DEVICES, Device, find_device
from kerngen.errors import UnknownName, UsageError

__all__ = [
    "ARCHES", "DEFAULT_DEVICE", "DEVICES", "Arch", "Device", "Target", "arch_of_capability", "borrowed",
    "default_device", "find_arch", "find_device", "parse_arches",
]  # fmt: skip

KIB = 1024


@dataclass(frozen=True, slots=True)
class Arch:
    """One GPU architecture. Sizes in bytes."""

    name: str
    cc: tuple[int, int]
    # For cubins; architecture-specific ("a") where wgmma and friends need it. An arch is the same whatever its cubins
    # are for: GB10 runs sm120's kernels, compiled for sm_121.
    nvrtc_target: str = field(compare=False)
    max_smem_bytes: int  # a block's opt-in limit
    smem_per_sm: int
    max_warps_per_sm: int
    max_blocks_per_sm: int
    reserved_smem_bytes: int = 0  # taken by the system from every resident block (sm80 and up)
    regs_per_sm: int = 65536
    max_regs_per_thread: int = 255
    has_bf16: bool = True
    has_cp_async: bool = True
    has_ldmatrix: bool = True
    has_mma16816: bool = True  # mma.sync.m16n8k16 with fp16/bf16 operands
    has_fp8: bool = False
    has_tma: bool = False
    has_wgmma: bool = False
    has_clusters: bool = False
    has_pdl: bool = False  # programmatic dependent launch
    # What the cost model knows of the kind, not of a board; docs/prediction.md has the sources. 16-bit FMAs with fp32
    # sums an SM and clock; the share of that which mma.sync reaches (on sm90 and sm100 wgmma and tcgen05 reach all of
    # it, on sm70 nothing does); the time from a load to its data while memory is busy (measured on sm90, taken over for
    # its successors); the share of a datasheet's bandwidth that loads to registers reach, and that asynchronous copies
    # do; and what L2 gives an SM, bytes a clock, where all of them ask (as sm70, where no figure is public).
    tensor_fmas: int = 256
    mma_sync_share: float = 1.0
    memory_latency_us: float = 0.6
    load_share: float = 0.92
    copy_share: float = 0.92
    l2_bytes_per_clock: float = 25.6

    def __str__(self) -> str:
        return self.name

    @property
    def number(self) -> int:
        """Compute capability as __CUDA_ARCH__ / 10: 70, 90, 120."""
        return self.cc[0] * 10 + self.cc[1]

    @property
    def cubin_number(self) -> int:
        """As `number`, of what its cubins are compiled for."""
        return int("".join(filter(str.isdigit, self.nvrtc_target)))

    @property
    def dtype(self) -> str:
        """What activations are where nobody asks for another type: "bf16", or "fp16" where there is none."""
        return "bf16" if self.has_bf16 else "fp16"

    @property
    def ptx_target(self) -> str:
        """NVRTC's virtual architecture: compute_70. PTX for it runs on any GPU of this or a later arch."""
        return f"compute_{self.number}"

    def registers_of(self, threads: int) -> int:
        """What ptxas gives each thread of a block of so many, at most: it counts in warpgroups."""
        return min(self.max_regs_per_thread, self.regs_per_sm // (128 * ceil(threads / 128)) // 8 * 8)

    def bound_for(self, registers: int) -> int:
        """The fewest threads in __launch_bounds__ by which ptxas gives each no more than so many, a multiple of 8."""
        return 128 * (self.regs_per_sm // (128 * (registers + 8)) + 1)

    def why_too_large(self, smem_bytes: int, blocks: int = 1) -> str | None:
        """Why `blocks` blocks of an SM cannot have so much shared memory each, or None."""
        if smem_bytes > self.max_smem_bytes:
            return f"needs {smem_bytes:,} B of shared memory; {self} allows {self.max_smem_bytes:,} B a block"
        if (together := blocks * (smem_bytes + self.reserved_smem_bytes)) > self.smem_per_sm:
            return f"{blocks} blocks an SM need {together:,} B of shared memory; {self} has {self.smem_per_sm:,} B"
        return None


_VOLTA: dict[str, Any] = {
    "has_bf16": False, "has_cp_async": False, "has_ldmatrix": False, "has_mma16816": False, "tensor_fmas": 512,
    "mma_sync_share": 0.78,
}  # fmt: skip
_TURING: dict[str, Any] = {"has_bf16": False, "has_cp_async": False, "has_mma16816": False, "tensor_fmas": 512}
_BULK: dict[str, Any] = {
    "has_fp8": True,
    "has_tma": True,
    "has_clusters": True,
    "has_pdl": True,
    "memory_latency_us": 0.8,
    "l2_bytes_per_clock": 38.8,
}

_ARCHES = (
    Arch("sm70", (7, 0), "sm_70", 96 * KIB, 96 * KIB, 64, 32, **_VOLTA),
    Arch("sm75", (7, 5), "sm_75", 64 * KIB, 64 * KIB, 32, 16, **_TURING),
    Arch("sm80", (8, 0), "sm_80", 163 * KIB, 164 * KIB, 64, 32, KIB, tensor_fmas=1024,
         l2_bytes_per_clock=47.4),
    Arch("sm86", (8, 6), "sm_86", 99 * KIB, 100 * KIB, 48, 16, KIB, load_share=0.91, copy_share=0.91),
    Arch("sm89", (8, 9), "sm_89", 99 * KIB, 100 * KIB, 48, 24, KIB, has_fp8=True),
    Arch("sm90", (9, 0), "sm_90a", 227 * KIB, 228 * KIB, 64, 32, KIB, has_wgmma=True,
         tensor_fmas=2048, mma_sync_share=0.62, copy_share=0.98, **_BULK),
    Arch("sm100", (10, 0), "sm_100a", 227 * KIB, 228 * KIB, 64, 32, KIB,
         tensor_fmas=4096, mma_sync_share=0.26, **_BULK),
    Arch("sm120", (12, 0), "sm_120a", 99 * KIB, 100 * KIB, 48, 24, KIB, load_share=0.93, copy_share=0.93,
         **(_BULK | {"l2_bytes_per_clock": 25.6})),
)  # fmt: skip
ARCHES: dict[str, Arch] = {a.name: a for a in _ARCHES}


def find_arch(name: str) -> Arch:
    """The arch called `name` ("sm70"). Raises UnknownName, listing the known ones, or naming the arch of a board."""
    if name not in ARCHES:
        boards = [d for d in DEVICES.values() if len(name) > 1 and name.lower() in d.name.lower()]
        guess = f"{boards[0]} is {boards[0].arch}; " if len({d.arch for d in boards}) == 1 else ""
        raise UnknownName("arch", name, ARCHES, guess=guess)
    return ARCHES[name]


def parse_arches(text: str) -> tuple[Arch, ...]:
    """A comma-separated list ("sm70,sm90") or "all". Raises UnknownName or UsageError."""
    if text == "all":
        return _ARCHES
    names = [n.strip() for n in text.split(",") if n.strip()]
    if not names:
        raise UsageError("no arch given", hint=f"name one or more of: {', '.join(ARCHES)}, or all")
    return tuple(find_arch(n) for n in dict.fromkeys(names))


# GPUs that are of no arch of their own, by `cubin_number`.
UNLIKE = {72: "Jetson Xavier", 87: "Jetson Orin", 101: "Jetson Thor", 103: "B300", 110: "Jetson Thor", 121: "GB10"}


def arch_of_capability(major: int, minor: int) -> Arch:
    """The arch that a device of this compute capability is, or whose sources run there, compiled for that capability.

    The latter is the nearest older one of its major version, or for 11.0, which CUDA 12 calls 10.1, sm100. Code is
    generic then, without wgmma: it takes nothing that its arch has alone. Raises UnknownName where there is none, with
    the way on.
    """
    if exact := [a for a in _ARCHES if a.cc == (major, minor)]:
        return exact[0]
    family = 10 if major == 11 else major
    fits = [a for a in _ARCHES if a.cc[0] == family and (a.cc[1] < minor or major == 11) and not a.has_wgmma]
    if not fits:
        guess = "no kernel is built for it; models run with --backend torch; "
        raise UnknownName("compute capability", f"{major}.{minor}", ARCHES, guess=guess)
    return replace(max(fits, key=lambda a: a.cc), nvrtc_target=f"sm_{major}{minor}")


def borrowed(arch: Arch) -> str:
    """For people: whose kernels a GPU runs, of which arch_of_capability said `arch`; "" where they are its own."""
    if arch.cubin_number == arch.number:
        return ""
    name = UNLIKE.get(arch.cubin_number, "this GPU")
    return f"{name} runs {arch}'s kernels, compiled for {arch.nvrtc_target}"


def default_device(arch: Arch) -> Device:
    """The profile that tuning for `arch` predicts for when no device is named."""
    return DEVICES[DEFAULT_DEVICE[arch.name]]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a kernel runs: an architecture, and the board of it that is at hand or meant.

    What is compiled may depend on `arch` alone, so that one cubin serves every board of it; what is chosen at launch
    (configuration, grid, splits) may depend on `device` too.
    """

    arch: Arch
    device: Device

    def __str__(self) -> str:
        return f"{self.arch} ({self.device})"

    @classmethod
    def of(cls, place: Arch | Device) -> Target:
        """The target of a board, or of an arch's usual one (`default_device`)."""
        if isinstance(place, Arch):
            return cls(place, default_device(place))
        return cls(find_arch(place.arch), place)
