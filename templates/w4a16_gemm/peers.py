"""vLLM's W4A16 products on the same weights, where its operators are at hand: Marlin and Machete.

They are if vLLM is installed beside kerngen, or if torch has loaded its `_C_stable_libtorch.abi3.so` (KERNGEN_PEERS:
`kerngen.timing.measure.load_peers`). What each wants its weights to be: vLLM 0.24's
`marlin_utils.py` and `kernels/linear/mixed_precision/machete.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

# vLLM's `scalar_types.uint4b8`: 4 bits, no sign, values less 8, packed as its C++ reads it.
UINT4B8 = 4 << 8 | 8 << 17 | 1 << 50
# How Marlin wants a group's scales: the columns that one thread multiplies beside each other.
_MARLIN_SCALES = [i + 8 * j for i in range(8) for j in range(8)]
_MARLIN_SCALES_WHOLE = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
TOLERANCE = 0.02  # of the largest output: both round to 16 bits, in other orders


@cache
def operators() -> frozenset[str]:
    """Those of vLLM that torch knows here."""
    with suppress(ImportError):
        import_module("vllm._custom_ops")
    wanted = ("marlin_gemm", "gptq_marlin_repack", "machete_mm", "machete_prepack_B")
    return frozenset(name for name in wanted if hasattr(torch.ops._C, name))


def peers(x: Tensor, weight_packed: Tensor, weight_scale: Tensor, expected: Tensor) -> dict[str, Callable[[], object]]:
    """Those that are at hand, by name, each a product of `x` [M, K] by W in compressed-tensors' layout.

    expected: [M, N], the product; one that gives another is a call that says so.
    """
    made = {"marlin": (_marlin, {"marlin_gemm", "gptq_marlin_repack"}),
            "machete": (_machete, {"machete_mm", "machete_prepack_B"})}  # fmt: skip
    return {
        name: _checked(name, make, x, weight_packed, weight_scale, expected)
        for name, (make, needed) in made.items()
        if needed <= operators()
    }


_Product = Callable[[], Tensor]


def _checked(
    name: str,
    make: Callable[[Tensor, Tensor, Tensor], _Product],
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    want: Tensor,
) -> Callable[[], object]:
    try:
        product = make(x, weight, scale)
        off = float((product().float() - want.float()).abs().max() / want.float().abs().max())
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:  # a shape that it does not take
        return _refusing((str(e).strip() or type(e).__name__).splitlines()[0])
    return (
        product if off < TOLERANCE else _refusing(f"{name} is {off:.2g} of the largest output from what it should be")
    )


def _refusing(why: str) -> Callable[[], object]:
    def refuse() -> object:
        raise RuntimeError(why)

    return refuse


def _marlin(x: Tensor, weight_packed: Tensor, weight_scale: Tensor) -> _Product:
    (m, k), n = x.shape, weight_packed.shape[0]
    none = torch.empty(0, dtype=torch.int32, device=x.device)
    weights = torch.ops._C.gptq_marlin_repack(weight_packed.t().contiguous(), none, k, n, 4, False)
    scales = weight_scale.t().contiguous()
    order = _MARLIN_SCALES if len(scales) > 1 else _MARLIN_SCALES_WHOLE
    scales = scales.reshape(-1, len(order))[:, order].reshape(-1, n).contiguous()
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    workspace = torch.zeros(sms, dtype=torch.int32, device=x.device)
    return lambda: torch.ops._C.marlin_gemm(
        x, None, weights, None, scales, None, None, None, None, None, workspace, UINT4B8, m, n, k, True, False, True,
        False,
    )  # fmt: skip


def _machete(x: Tensor, weight_packed: Tensor, weight_scale: Tensor) -> _Product:
    group_size = x.shape[1] // weight_scale.shape[1]
    weights = torch.ops._C.machete_prepack_B(weight_packed.contiguous().t(), x.dtype, UINT4B8, x.dtype)
    scales = weight_scale.t().contiguous()
    return lambda: torch.ops._C.machete_mm(x, weights, UINT4B8, None, scales, None, group_size, None, None, None)
