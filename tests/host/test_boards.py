"""Which board a GPU is, and how far boards are apart."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import inf, isclose
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import Kerngen
from hypothesis import given
from hypothesis import strategies as st

from kerngen.boards import (
    DEVICES,
    MIB,
    NEAR,
    REPORTED,
    SAME,
    Device,
    distance,
    find_device,
    identify,
    is_slice,
    nearest,
    plain_name,
)  # fmt: skip
from kerngen.cli.doctor import _kin
from kerngen.errors import UnknownName
from kerngen.runtime import launcher

# As drivers report them: name, SMs, GiB, and the profile.
SEEN = [
    ("Tesla V100-SXM2-32GB", 80, 31.7, "V100"),
    ("Tesla V100-SXM2-16GB", 80, 15.8, "V100-16"),
    ("Tesla T4", 40, 14.6, "T4"),
    ("NVIDIA A100-SXM4-80GB", 108, 79.3, "A100"),
    ("NVIDIA A100-SXM4-40GB", 108, 39.4, "A100-40"),
    ("A100-SXM4-40GB", 108, 39.6, "A100-40"),  # a driver of 2020
    ("NVIDIA A100-PCIE-40GB", 108, 39.4, "A100-40"),
    ("NVIDIA A100 80GB PCIe", 108, 79.3, "A100-PCIe"),
    ("GeForce RTX 3090", 82, 23.7, "RTX3090"),
    ("NVIDIA GeForce RTX 3090", 82, 23.6, "RTX3090"),
    ("NVIDIA RTX A6000", 84, 47.5, "RTXA6000"),
    ("NVIDIA A10", 72, 22.0, "A10"),
    ("NVIDIA L4", 58, 22.0, "L4"),
    ("NVIDIA L40S", 142, 44.4, "L40S"),
    ("NVIDIA RTX 6000 Ada Generation", 142, 47.4, "RTX6000Ada"),
    ("NVIDIA GeForce RTX 4090", 128, 23.6, "RTX4090"),
    ("NVIDIA H100 80GB HBM3", 132, 79.1, "H100"),
    ("NVIDIA H100 PCIe", 114, 79.1, "H100-PCIe"),
    ("NVIDIA H200", 132, 139.8, "H200"),
    ("NVIDIA B200", 148, 178.4, "B200"),
    ("NVIDIA GeForce RTX 5090", 170, 31.4, "RTX5090"),
]
NOT_THESE = [
    ("NVIDIA H200 MIG 1g.18gb", 16, 16.0), ("NVIDIA H200 MIG 7g.141gb", 132, 139.8),
    ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42, 19.6), ("NVIDIA H200", 16, 16.0), ("NVIDIA H200", 132, 16.0),
    ("NVIDIA H200 NVL", 132, 139.8), ("NVIDIA H100 NVL", 132, 93.1), ("NVIDIA GH200 480GB", 132, 94.5),
    ("NVIDIA A10G", 80, 22.2), ("NVIDIA L40", 142, 44.4), ("NVIDIA GeForce RTX 4090 D", 114, 23.6),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, 15.7), ("Tesla V100-PCIE-16GB", 80, 15.8), ("Tesla T4", 40, 7.3),
    ("", 0, 0.0),
]  # fmt: skip
A_MIG_SLICE = replace(find_device("H200"), name="H200 MIG 1g.18gb", num_sms=16, mem_gib=16.0, l2_bytes=60 * MIB // 8,
                      source="probed")  # fmt: skip


@pytest.mark.parametrize(("name", "num_sms", "mem_gib", "board"), SEEN)
def test_a_board_is_known_by_what_its_driver_says(name: str, num_sms: int, mem_gib: float, board: str) -> None:
    assert identify(name, num_sms, mem_gib) == DEVICES[board] == find_device(name)


@pytest.mark.parametrize(("name", "num_sms", "mem_gib"), NOT_THESE)
def test_what_is_like_a_board_is_not_taken_for_it(name: str, num_sms: int, mem_gib: float) -> None:
    assert identify(name, num_sms, mem_gib) is None


def test_each_profile_has_names_of_its_own() -> None:
    assert list(REPORTED) == list(DEVICES)
    names = [plain_name(name) for names in REPORTED.values() for name in names]
    assert len(set(names)) == len(names)
    assert {board for *_, board in SEEN} == set(DEVICES), "a profile that is identified by nothing"
    with pytest.raises(UnknownName, match="H200 MIG"):
        find_device("NVIDIA H200 MIG 1g.18gb")


FIGURES = st.builds(
    Device, name=st.just("x"), arch=st.sampled_from(["sm80", "sm90"]), num_sms=st.integers(0, 200),
    mem_gbps=st.floats(0, 9000), mem_gib=st.floats(1, 300), l2_bytes=st.integers(0, 2**28),
    clock_mhz=st.just(1000), tensor_tflops=st.just(1.0), source=st.just("drawn"),
) | st.sampled_from(list(DEVICES.values()))  # fmt: skip


@given(FIGURES, FIGURES, FIGURES)
def test_distance_is_a_metric_of_the_figures(a: Device, b: Device, c: Device) -> None:
    figures = [(d.arch, d.num_sms, d.mem_gbps, d.l2_bytes) for d in (a, b)]
    assert distance(a, a) == 0.0
    assert distance(a, b) == distance(b, a) >= 0.0
    assert (distance(a, b) == 0.0) <= (figures[0] == figures[1] or isclose(a.mem_gbps, b.mem_gbps))
    assert distance(a, c) <= distance(a, b) + distance(b, c) + 1e-9
    renamed = replace(b, name="y", mem_gib=1.0, clock_mhz=5, tensor_tflops=2.0, source="probed")
    assert distance(a, renamed) == distance(a, b), "a name, a clock and room for more change no configuration"


def _within(a: str | Device, b: str | Device, low: float, high: float) -> None:
    one, other = (d if isinstance(d, Device) else DEVICES[d] for d in (a, b))
    assert low < distance(one, other) <= high, f"{one} and {other} are {distance(one, other):.3f} apart"


def test_boards_are_told_apart() -> None:
    _within("V100", "V100-16", -1, 0)
    _within("A100", "A100-PCIe", SAME, NEAR)
    _within("A100", "A100-40", SAME, NEAR)
    _within("H100", "H200", NEAR, 1)
    _within("H100", "H100-PCIe", NEAR, 1)
    _within("L4", "RTX4090", 1, 2)
    _within("L40S", "RTX6000Ada", SAME, NEAR)
    _within("RTX3090", "RTX4090", 100, inf)
    _within(A_MIG_SLICE, "H200", 2.9, inf)
    for board in DEVICES.values():
        _within(A_MIG_SLICE, board, NEAR, inf)


@pytest.mark.parametrize(
    ("board", "mem_gbps", "mib"),
    [("H200", 4814.3, 60), ("H100", 3352.3, 50), ("B200", 8184.0, 126.5), ("A100", 2039.0, 40), ("V100", 898.0, 6)],
)
def test_a_board_is_the_same_as_its_profile_whatever_its_datasheet_rounds(
    board: str, mem_gbps: float, mib: float
) -> None:
    probed = replace(DEVICES[board], mem_gbps=mem_gbps, l2_bytes=int(mib * MIB), source="probed")
    assert distance(probed, DEVICES[board]) <= SAME
    assert nearest(probed) == DEVICES[board]


@pytest.mark.parametrize(
    ("name", "num_sms", "gib", "named"),
    [("NVIDIA A100-SXM4-40GB", 108, 39.4, "A100-40"), ("NVIDIA H200 MIG 1g.18gb", 16, 16.0, "H200 MIG 1g.18gb")],
)
def test_a_probed_gpu_has_the_name_of_its_profile(
    monkeypatch: pytest.MonkeyPatch, name: str, num_sms: int, gib: float, named: str
) -> None:
    seen = SimpleNamespace(name=name, major=8, minor=0, multi_processor_count=num_sms, total_memory=int(gib * 2**30),
                           L2_cache_size=40 * MIB)  # fmt: skip
    driver = SimpleNamespace(
        CUdevice_attribute=SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_CLOCK_RATE=1_410_000, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE=1_215_000,
            CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH=5120,
        ),
        cuInit=lambda _: (0,), cuDeviceGetAttribute=lambda value, _: (0, value),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: seen)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(launcher, "_driver", lambda: driver)
    probed = launcher._probed.__wrapped__(0)
    assert (probed.name, probed.num_sms, probed.mem_gib, probed.source) == (named, num_sms, gib, "probed")
    assert isclose(probed.mem_gbps, 1555.2)


def test_the_commands_say_what_drivers_call_a_board(kerngen: Kerngen) -> None:
    listed: dict[str, Any] = {d["name"]: d for d in json.loads(kerngen("arch", "ls", "--json")[1])["devices"]}
    for name, board in DEVICES.items():
        shown = json.loads(kerngen("arch", "show", name.lower(), "--json")[1])
        assert shown == listed[name] == asdict(board) | {"reported": list(REPORTED[name])}
    code, out, _ = kerngen("arch", "show", "Tesla T4")
    assert (code, "reported               Tesla T4\n" in out) == (0, True)
    assert kerngen("arch", "show", "sm70")[0] == 0
    code, _, err = kerngen("arch", "show", "sm71")
    assert (code, "unknown arch or board 'sm71'" in err) == (2, True)


@pytest.mark.parametrize(("device", "says"), [
    (DEVICES["H200"], ""),
    (A_MIG_SLICE, ", a slice, tuned for by itself"),
    (replace(DEVICES["H100"], name="GH200 480GB", mem_gbps=4022), ", a board without a profile, near to H200"),
    (
        replace(DEVICES["L4"], name="RTX 2000 Ada", num_sms=22, mem_gbps=256, l2_bytes=12 * MIB),
        ", a board without a profile, far from L4",
    ),
    (replace(DEVICES["L4"], name="?", mem_gbps=0), ", a board without a profile"),
], ids=str)  # fmt: skip
def test_doctor_says_what_a_strange_board_is_near_to(device: Device, says: str) -> None:
    assert _kin(device) == says
    assert is_slice(device.name) == (device is A_MIG_SLICE)
