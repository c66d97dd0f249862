"""Every kernel and every architecture's body against its fp32 reference, on the cases that it declares.

Bodies of older architectures run as PTX through the driver's JIT. PTX for sm70 needs NVRTC 12: on a machine with
NVRTC 13 it is read from the compile cache, which `kerngen compile --ptx --cases --arch sm70` fills elsewhere.
"""

from __future__ import annotations

import pytest

from kerngen.arch import ARCHES, Arch, Target
from kerngen.errors import ToolchainError
from kerngen.templates import Case, find_kernel, kernel_names

BODIES = ("sm70", "sm75", "sm80", "sm86", "sm89", "own")


def _cases() -> list[tuple[str, Case]]:
    return [(name, case) for name in kernel_names() for case in find_kernel(name).cases.CASES]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("name", "case"), _cases(), ids=lambda v: str(v))
def test_against_reference(name: str, case: Case, body: str) -> None:
    from kerngen.runtime.launcher import probe_device
    from kerngen.timing.measure import check_case

    kernel = find_kernel(name)
    own = ARCHES[probe_device().arch]
    arch: Arch = own if body == "own" else ARCHES[body]
    if arch.number > own.number:
        pytest.skip(f"{arch} code does not run on {own}")
    if (why := kernel.why_unsupported(case.problem, Target.of(arch))) is not None:
        pytest.skip(why)
    try:
        result = check_case(kernel, case, arch=arch)
    except ToolchainError as e:
        pytest.skip(str(e))
    assert result.ok, result.message
