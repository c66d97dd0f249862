"""That memory ran out is said with numbers and with what would take less, whoever of torch says it."""

from __future__ import annotations

import pytest
import torch

from kerngen.errors import DeviceError
from kerngen.runtime.backend import explaining_memory

GPU = torch.device("cuda:0")


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),  # outside of torch's allocator
])  # fmt: skip
@pytest.mark.parametrize("less", ["", "a smaller --context"])
def test_on_a_gpu(error: RuntimeError, less: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 10**9, 24 * 10**9))
    with pytest.raises(DeviceError, match=r"cuda:0.*3\.0 of 24\.0 GB") as caught, \
         explaining_memory(GPU, *[less] * bool(less)):  # fmt: skip
        raise error
    assert (
        caught.value.hint
        == f"{less or 'fewer --max-new-tokens, a shorter prompt'}, a W4A16 checkpoint, or a larger GPU"
    )


def test_on_a_cpu() -> None:
    with pytest.raises(DeviceError, match=r"memory.*CPU"), explaining_memory(torch.device("cpu")):
        torch.empty(1 << 58, dtype=torch.uint8)


def test_other_errors_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="illegal memory"), explaining_memory(GPU):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
