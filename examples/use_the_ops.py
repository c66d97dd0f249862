"""kerngen's ops on torch tensors: an MLP with int4 weights from a checkpoint, eager and compiled. Needs no GPU.

python examples/use_the_ops.py

On the CPU the ops are answered by their fp32 references; where there is a GPU, the same function runs on it in 16 bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

import kerngen
from kerngen.ops import W4Weights
from kerngen.runtime.weights.safetensors import SafetensorsFile

CHECKPOINT = Path(__file__).parent / "tiny" / "gemma-4-tiny-w4a16" / "model.safetensors"
LAYER = "model.language_model.layers.0"


def read_mlp() -> tuple[W4Weights, W4Weights]:
    """gate_proj and up_proj as one matrix, and down_proj, with scales in bf16."""
    file = SafetensorsFile(CHECKPOINT)

    def tensor(projection: str, part: str) -> Tensor:
        return file.tensor(f"{LAYER}.mlp.{projection}_proj.weight_{part}")

    gate_up = [torch.cat([tensor(p, part) for p in ("gate", "up")]) for part in ("packed", "scale")]
    down = [tensor("down", part) for part in ("packed", "scale")]
    return kerngen.ops.pack_w4(*gate_up), kerngen.ops.pack_w4(*down)


def mlp(x: Tensor, gate_up: W4Weights, down: W4Weights) -> Tensor:
    """down(gelu(gate(h)) * up(h)) of h = norm(x)."""
    h = kerngen.ops.rmsnorm(x, None, 1e-6, x.dtype)
    return kerngen.ops.w4a16_gemm(kerngen.ops.gelu_gate(kerngen.ops.w4a16_gemm(h, gate_up)), down)


def in_torch(x: Tensor, gate_up: W4Weights, down: W4Weights) -> Tensor:
    """The same in dense fp32."""
    h = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)
    gate, up = (h @ gate_up.dense().T).chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up) @ down.dense().T


def main() -> None:
    """Print how far the ops are from dense torch, on the CPU and on a GPU if there is one."""
    gate_up, down = read_mlp()
    print(f"gate|up {gate_up.out_features} x {gate_up.in_features} int4 in groups of {gate_up.group_size}")
    x = torch.randn(4, gate_up.in_features, generator=torch.Generator().manual_seed(0))
    places = [("cpu", torch.float32)]
    if torch.cuda.is_available():
        places.append(("cuda", torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16))
    for device, dtype in places:
        there = x.to(device, dtype), gate_up.to(device, dtype), down.to(device, dtype)
        eager = mlp(*there)
        compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")(*there)
        wanted = in_torch(there[0].float().cpu(), *(w.to("cpu") for w in there[1:]))
        error = float((eager.float().cpu() - wanted).abs().max() / wanted.abs().max())
        print(f"{device} in {dtype}: {error:.1e} from dense fp32, compiled equal: {torch.equal(eager, compiled)}")


if __name__ == "__main__":
    try:
        main()
    except kerngen.KerngenError as e:
        sys.exit(str(e))
