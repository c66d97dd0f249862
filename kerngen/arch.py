"""Where a kernel runs: GPU architectures, and profiles of real devices.

`Arch` holds what the compiler needs; it is the same for every GPU of a kind. `Device` is a board: SM count, memory,
clocks, tensor rate. `Target` is both: what a configuration is chosen for, where a cubin depends on the arch alone.

Architecture limits: CUDA C++ Programming Guide 12.9, "Compute Capabilities", tables "Feature Support per Compute
Capability" and "Technical Specifications per Compute Capability". Device figures: the vendor's datasheet or
architecture whitepaper named in each profile's `source`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kerngen.errors import UnknownName, UsageError

KIB = 1024


@dataclass(frozen=True, slots=True)
class Arch:
    """One GPU architecture. Sizes in bytes."""

    name: str
    cc: tuple[int, int]
    nvrtc_target: str  # for cubins; architecture-specific ("a") where wgmma and friends need it
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
    # What the cost model knows of the kind, not of a board: 16-bit FMAs with fp32 sums an SM and clock (whitepapers of
    # each generation), the share of that which mma.sync reaches where only wgmma and its successors reach all of it,
    # and the time from a load to its data while memory is busy (measured on sm90, taken over for its successors).
    tensor_fmas: int = 256
    mma_sync_share: float = 1.0
    memory_latency_us: float = 0.6

    def __str__(self) -> str:
        return self.name

    @property
    def number(self) -> int:
        """Compute capability as __CUDA_ARCH__ / 10: 70, 90, 120."""
        return self.cc[0] * 10 + self.cc[1]

    @property
    def dtype(self) -> str:
        """What activations are where nobody asks for another type: "bf16", or "fp16" where there is none."""
        return "bf16" if self.has_bf16 else "fp16"

    @property
    def ptx_target(self) -> str:
        """NVRTC's virtual architecture: compute_70. PTX for it runs on any GPU of this or a later arch."""
        return f"compute_{self.number}"


_VOLTA: dict[str, Any] = {
    "has_bf16": False, "has_cp_async": False, "has_ldmatrix": False, "has_mma16816": False, "tensor_fmas": 512,
}  # fmt: skip
_TURING: dict[str, Any] = {"has_bf16": False, "has_cp_async": False, "has_mma16816": False, "tensor_fmas": 512}
_BULK: dict[str, Any] = {
    "has_fp8": True,
    "has_tma": True,
    "has_clusters": True,
    "has_pdl": True,
    "memory_latency_us": 0.8,
}

_ARCHES = (
    Arch("sm70", (7, 0), "sm_70", 96 * KIB, 96 * KIB, 64, 32, **_VOLTA),
    Arch("sm75", (7, 5), "sm_75", 64 * KIB, 64 * KIB, 32, 16, **_TURING),
    Arch("sm80", (8, 0), "sm_80", 163 * KIB, 164 * KIB, 64, 32, KIB, tensor_fmas=1024),
    Arch("sm86", (8, 6), "sm_86", 99 * KIB, 100 * KIB, 48, 16, KIB),
    Arch("sm89", (8, 9), "sm_89", 99 * KIB, 100 * KIB, 48, 24, KIB, has_fp8=True),
    Arch("sm90", (9, 0), "sm_90a", 227 * KIB, 228 * KIB, 64, 32, KIB, has_wgmma=True,
         tensor_fmas=2048, mma_sync_share=0.62, **_BULK),
    Arch("sm100", (10, 0), "sm_100a", 227 * KIB, 228 * KIB, 64, 32, KIB,
         tensor_fmas=4096, mma_sync_share=0.26, **_BULK),
    Arch("sm120", (12, 0), "sm_120a", 99 * KIB, 100 * KIB, 48, 24, KIB, **_BULK),
)  # fmt: skip
ARCHES: dict[str, Arch] = {a.name: a for a in _ARCHES}


def find_arch(name: str) -> Arch:
    """The arch called `name` ("sm70"). Raises UnknownName, listing the known ones, or naming the arch of a board."""
    if name not in ARCHES:
        boards = [d for d in _DEVICES if len(name) > 1 and name.lower() in d.name.lower()]
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


def arch_of_capability(major: int, minor: int) -> Arch:
    """The arch whose cubins run on a device of this compute capability.

    Binary compatibility holds within a major version, upwards in minor; architecture-specific ("a") cubins run on
    exactly their own capability. Raises UnknownName where none fits.
    """
    fits = [
        a
        for a in _ARCHES
        if a.cc == (major, minor) or (a.cc[0] == major and a.cc[1] <= minor and not a.nvrtc_target.endswith("a"))
    ]
    if not fits:
        raise UnknownName("compute capability", f"{major}.{minor}", ARCHES)
    return max(fits, key=lambda a: a.cc)


@dataclass(frozen=True, slots=True)
class Device:
    """One board: what a prediction is made for, or what a measurement was made on.

    mem_gbps: memory bandwidth, GB/s (10^9). tensor_tflops: dense fp16/bf16 tensor rate with fp32 accumulation.
    l2_bytes: L2 size. clock_mhz: boost SM clock. source: where the figures come from; "probed" for a GPU at hand.
    """

    name: str
    arch: str
    num_sms: int
    mem_gbps: float
    mem_gib: float
    l2_bytes: int
    clock_mhz: int
    tensor_tflops: float
    source: str

    def __str__(self) -> str:
        return self.name


MIB = 1024 * KIB
_DEVICES = (
    Device("V100", "sm70", 80, 900, 32, 6 * MIB, 1530, 125,
           "NVIDIA V100 datasheet (SXM2, Jan 2020); SMs, L2, clock: Volta whitepaper WP-08608"),
    Device("T4", "sm75", 40, 320, 16, 4 * MIB, 1590, 65,
           "NVIDIA T4 datasheet; SMs, L2: Turing whitepaper WP-09183"),
    Device("A100", "sm80", 108, 2039, 80, 40 * MIB, 1410, 312,
           "NVIDIA A100 80GB SXM datasheet; SMs, L2: Ampere whitepaper (GA100) v1.0"),
    Device("RTX3090", "sm86", 82, 936, 24, 6 * MIB, 1695, 71,
           "NVIDIA Ampere GA102 whitepaper v2.1, table 'RTX 3090'"),
    Device("L4", "sm89", 58, 300, 24, 48 * MIB, 2040, 121,
           "NVIDIA L4 datasheet (dense, half of the sparse figure); SMs, L2: Ada whitepaper v2.1"),
    Device("RTX4090", "sm89", 128, 1008, 24, 72 * MIB, 2520, 165,
           "NVIDIA Ada GPU architecture whitepaper v2.1, table 'RTX 4090'"),
    Device("H100", "sm90", 132, 3350, 80, 50 * MIB, 1830, 989,
           "NVIDIA H100 SXM5 datasheet; SMs, L2: Hopper whitepaper v1.04"),
    Device("H200", "sm90", 132, 4800, 141, 50 * MIB, 1830, 989,
           "NVIDIA H200 SXM datasheet; SMs, L2: as H100 (Hopper whitepaper v1.04)"),
    Device("B200", "sm100", 148, 8000, 180, 126 * MIB, 1965, 2250,
           "NVIDIA Blackwell datasheet (HGX B200, dense); SMs, L2: as the CUDA device query reports"),
    Device("RTX5090", "sm120", 170, 1792, 32, 96 * MIB, 2407, 209,
           "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1, table 'RTX 5090'"),
)  # fmt: skip
DEVICES: dict[str, Device] = {d.name: d for d in _DEVICES}
DEFAULT_DEVICE: dict[str, str] = {
    "sm70": "V100", "sm75": "T4", "sm80": "A100", "sm86": "RTX3090",
    "sm89": "RTX4090", "sm90": "H200", "sm100": "B200", "sm120": "RTX5090",
}  # fmt: skip


def find_device(name: str) -> Device:
    """The profile called `name`, ignoring case. Raises UnknownName."""
    by_lower = {n.lower(): d for n, d in DEVICES.items()}
    if name.lower() not in by_lower:
        raise UnknownName("device", name, DEVICES)
    return by_lower[name.lower()]


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
