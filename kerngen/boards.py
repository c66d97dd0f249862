"""Boards: what is known of the GPUs that people have, which of them one is, and how far one is from another.

A profile is a `Device` with public figures. A GPU at hand is probed (runtime/launcher.py); `identify` says of which
profile it is, by the name that its driver reports, and `distance` how much of what was tuned on one board holds on
another. A board that has no profile can be described in a file (board_file.py). Figures: the vendor's datasheet or
architecture whitepaper that each profile's `source` names.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log2

from kerngen.errors import UnknownName

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Device:
    """One board: what a prediction is made for, or what a measurement was made on. Its fields are in database ids.

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


_PROFILES = (
    Device("V100", "sm70", 80, 900, 32, 6 * MIB, 1530, 125,
           "NVIDIA V100 datasheet (SXM2, Jan 2020); SMs, L2, clock: Volta whitepaper WP-08608"),
    Device("V100-16", "sm70", 80, 900, 16, 6 * MIB, 1530, 125,
           "NVIDIA V100 datasheet (SXM2, 16 GB); SMs, L2, clock: Volta whitepaper WP-08608"),
    Device("T4", "sm75", 40, 320, 16, 4 * MIB, 1590, 65,
           "NVIDIA T4 datasheet; SMs, L2: Turing whitepaper WP-09183"),
    Device("A100", "sm80", 108, 2039, 80, 40 * MIB, 1410, 312,
           "NVIDIA A100 80GB SXM datasheet; SMs, L2: Ampere whitepaper (GA100) v1.0"),
    Device("A100-40", "sm80", 108, 1555, 40, 40 * MIB, 1410, 312,
           "NVIDIA A100 40GB datasheet (SXM and PCIe alike); SMs, L2: Ampere whitepaper (GA100) v1.0"),
    Device("A100-PCIe", "sm80", 108, 1935, 80, 40 * MIB, 1410, 312,
           "NVIDIA A100 80GB PCIe datasheet; SMs, L2: Ampere whitepaper (GA100) v1.0"),
    Device("RTX3090", "sm86", 82, 936, 24, 6 * MIB, 1695, 71,
           "NVIDIA Ampere GA102 whitepaper v2.1, table 'RTX 3090'"),
    Device("RTXA6000", "sm86", 84, 768, 48, 6 * MIB, 1800, 155,
           "NVIDIA RTX A6000 datasheet (dense, half of the sparse); SMs, L2, clock: Ampere GA102 whitepaper v2.1"),
    Device("A10", "sm86", 72, 600, 24, 6 * MIB, 1695, 125,
           "NVIDIA A10 datasheet (dense; its 9,216 CUDA cores are 72 SMs); L2: Ampere GA102 whitepaper v2.1"),
    Device("L4", "sm89", 58, 300, 24, 48 * MIB, 2040, 121,
           "NVIDIA L4 datasheet (dense, half of the sparse figure); SMs, L2: Ada whitepaper v2.1"),
    Device("RTX4090", "sm89", 128, 1008, 24, 72 * MIB, 2520, 165,
           "NVIDIA Ada GPU architecture whitepaper v2.1, table 'RTX 4090'"),
    Device("L40S", "sm89", 142, 864, 48, 96 * MIB, 2520, 362,
           "NVIDIA L40S datasheet (dense); SMs, L2: Ada whitepaper v2.1 (AD102)"),
    Device("RTX6000Ada", "sm89", 142, 960, 48, 96 * MIB, 2505, 364,
           "NVIDIA RTX 6000 Ada datasheet (dense, a quarter of its sparse FP8); SMs, L2: Ada whitepaper v2.1"),
    Device("H100", "sm90", 132, 3350, 80, 50 * MIB, 1830, 989,
           "NVIDIA H100 SXM5 datasheet; SMs, L2: Hopper whitepaper v1.04"),
    Device("H100-PCIe", "sm90", 114, 2039, 80, 50 * MIB, 1620, 756,
           "NVIDIA H100 PCIe datasheet (dense); SMs, L2, bandwidth, tensor clock: Hopper whitepaper v1.04"),
    Device("H200", "sm90", 132, 4800, 141, 60 * MIB, 1830, 989,
           "NVIDIA H200 SXM datasheet; SMs: as H100 (Hopper whitepaper v1.04); L2: as its driver reports"),
    Device("B200", "sm100", 148, 8000, 180, 126 * MIB, 1965, 2250,
           "NVIDIA Blackwell datasheet (HGX B200, dense); SMs, L2: as the CUDA device query reports"),
    Device("RTX5090", "sm120", 170, 1792, 32, 96 * MIB, 2407, 209,
           "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1, table 'RTX 5090'"),
)  # fmt: skip
DEVICES: dict[str, Device] = {d.name: d for d in _PROFILES}
DEFAULT_DEVICE: dict[str, str] = {
    "sm70": "V100", "sm75": "T4", "sm80": "A100", "sm86": "RTX3090",
    "sm89": "RTX4090", "sm90": "H200", "sm100": "B200", "sm120": "RTX5090",
}  # fmt: skip

# What drivers call the boards of a profile. Those that share a chip with one but not its figures are not listed (V100
# PCIe, V100S, A10G, A40, L40, H100 NVL, H200 NVL, GH200, RTX 4090 D): they have no profile, and `distance` says what
# holds on them.
REPORTED: dict[str, tuple[str, ...]] = {
    "V100": ("Tesla V100-SXM2-32GB",),
    "V100-16": ("Tesla V100-SXM2-16GB",),
    "T4": ("Tesla T4",),
    "A100": ("NVIDIA A100-SXM4-80GB",),
    "A100-40": ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
    "A100-PCIe": ("NVIDIA A100 80GB PCIe",),
    "RTX3090": ("NVIDIA GeForce RTX 3090",),
    "RTXA6000": ("NVIDIA RTX A6000",),
    "A10": ("NVIDIA A10",),
    "L4": ("NVIDIA L4",),
    "RTX4090": ("NVIDIA GeForce RTX 4090",),
    "L40S": ("NVIDIA L40S",),
    "RTX6000Ada": ("NVIDIA RTX 6000 Ada Generation",),
    "H100": ("NVIDIA H100 80GB HBM3",),
    "H100-PCIe": ("NVIDIA H100 PCIe",),
    "H200": ("NVIDIA H200",),
    "B200": ("NVIDIA B200",),
    "RTX5090": ("NVIDIA GeForce RTX 5090",),
}

# Limits of `distance`, in octaves. Boards of one kind and their datasheets are up to 3 % apart in what is reported
# (H200: 4800 and 4814 GB/s, B200: 126 and 126.5 MiB); A100s of 40 and 80 GB are 0.39 apart, a 4090 and an L40S 0.415
# (of 855 winners of the one the cost model has 12 slower than the default on the other), an H100 and an H200 0.52, a
# 3090 and an A10 0.64 (there 61 of 150 of attention).
SAME = 0.05  # one board: what was measured on one holds on the other
NEAR = 0.42  # of one kind: better than a default, worse than what was predicted for the board itself


def plain_name(reported: str) -> str:
    """A driver's name for a GPU without the vendor's, which older drivers leave out: "GeForce RTX 4090"."""
    return reported.strip().removeprefix("NVIDIA ").strip()


_BY_PLAIN_NAME = {plain_name(name).lower(): DEVICES[board] for board, names in REPORTED.items() for name in names}


_BY_NAME = {name.lower(): board for name, board in DEVICES.items()} | _BY_PLAIN_NAME


def find_device(name: str) -> Device:
    """The profile called `name`, or whose boards drivers call so, ignoring case; or what the file NAME.toml describes.

    Raises UnknownName, and UsageError for a file that describes none.
    """
    if (found := _BY_NAME.get(plain_name(name).lower())) is not None:
        return found
    if name.endswith(".toml"):
        from kerngen.board_file import read_board

        return read_board(name)
    raise UnknownName("device", name, DEVICES)


def is_known(name: str) -> bool:
    """True for the name of a profile, and for what drivers call its boards."""
    return plain_name(name).lower() in _BY_NAME


def identify(name: str, num_sms: int, mem_gib: float) -> Device | None:
    """The profile of a GPU by what its driver reports: name, SMs, and memory in GiB. None where it is of none.

    Neither is a part of a board (a MIG slice says so in its name), nor one with SMs or memory that the profile has not:
    vGPUs, engineering samples. Drivers keep up to a tenth of the memory for themselves (T4: 14.6 of 16).
    """
    found = _BY_PLAIN_NAME.get(plain_name(name).lower())
    if found is None or is_slice(name) or num_sms != found.num_sms:
        return None
    return found if 0.88 * found.mem_gib <= mem_gib <= 1.02 * found.mem_gib else None


def is_slice(name: str) -> bool:
    """True for the name of a part of a board: "NVIDIA H200 MIG 1g.18gb"."""
    return " MIG " in f"{name} "


def distance(a: Device, b: Device) -> float:
    """How far two boards are apart: the most that their SMs, memory bandwidths or L2 sizes differ by, in octaves.

    Compare it with SAME and NEAR. Boards of two architectures, whose shared memory and code differ, are infinitely far
    apart; so is one of which a figure is unknown (0) from one of which it is not. A slice of a board is as far as its
    SMs say: an eighth of an H200 is 3.0 from it. A metric: symmetric, 0 from itself, no detour is shorter.
    """
    if a.arch != b.arch:
        return inf
    return max(_octaves(a.num_sms, b.num_sms), _octaves(a.mem_gbps, b.mem_gbps), _octaves(a.l2_bytes, b.l2_bytes))


def _octaves(x: float, y: float) -> float:
    if x == y:
        return 0.0
    return abs(log2(x) - log2(y)) if x > 0 and y > 0 else inf


def nearest(device: Device) -> Device | None:
    """The profile of `device`'s arch that it is nearest to; None where none is at a finite distance."""
    found = min(DEVICES.values(), key=lambda d: distance(device, d))
    return found if distance(device, found) < inf else None
