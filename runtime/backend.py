"""Chooses and opens a backend: which device, which dtype, which implementation of `Ops`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kerngen.errors import DeviceError, UsageError
from kerngen.runtime.executors.collectives import Collectives
from kerngen.runtime.ops import Ops
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE

BACKENDS = ("torch", "cuda")


def open_backend(name: str = "auto", *, device: str | None = None, dtype: str | None = None,
                 db_url: str | None = None, bundle: str | None = None,
                 collectives: Collectives | None = None) -> Ops:  # fmt: skip
    """The backend `name` ("torch", "cuda" or "auto": cuda where there is a GPU) on `device` ("cpu", "cuda:0").

    dtype: "fp32", "bf16", "fp16" or None for the device's own: fp32 on a CPU, bf16 from sm80 on, fp16 before. db_url:
    the tuning database (path or URL) that the cuda backend looks winners up in, None for the usual places. bundle: the
    file that answers in their place (bundle.py), None for $KERNGEN_BUNDLE. collectives: of a rank of a divided model.
    Raises DeviceError where there is no such GPU, UsageError on a combination that cannot run.
    """
    if name not in (*BACKENDS, "auto"):
        raise UsageError(f"unknown backend {name!r}", hint=f"known: {', '.join(BACKENDS)}, auto")
    if dtype is not None and dtype not in TORCH_DTYPE:
        raise UsageError(f"unknown dtype {dtype!r}", hint=f"known: {', '.join(TORCH_DTYPE)}")
    where = _device(name, device)
    if name == "auto":
        name = "cuda" if where.type == "cuda" else "torch"
    if name == "cuda" and where.type != "cuda":
        raise UsageError(f"the cuda backend does not run on {where}", hint="leave --device out, or use --backend torch")
    kind = TORCH_DTYPE[dtype] if dtype else _default_dtype(where)
    if where.type == "cuda":
        torch.cuda.set_device(where)  # what torch allocates without a word about it lies there too
    if name == "cuda":
        from kerngen.bundles.bundle import sources_for
        from kerngen.runtime.executors.launch import Launch
        from kerngen.runtime.launcher import Launcher
        from kerngen.runtime.ops.kernels import KernelOps

        sources, cache, shipped = sources_for(db_url, bundle)
        launcher = Launcher(sources, cache, index=where.index or 0)
        arch = launcher.target.arch
        if shipped is not None:
            shipped.require(arch)
        if kind == torch.float32 or (kind == torch.bfloat16 and not arch.has_bf16):
            raise UsageError(
                f"the cuda backend has no {dtype or kind} kernels on {arch}",
                hint=f"use --dtype {arch.dtype}, or --backend torch",
            )
        return KernelOps(Launch(launcher, in_forwards=True, collectives=collectives), kind)
    for option, value in (("--db", db_url), ("--bundle", bundle)):
        if value:
            raise UsageError(
                f"{option} {value}: the torch backend looks nothing up", hint="leave it out, or use --backend cuda"
            )
    from kerngen.runtime.ops.eager import TorchOps

    return TorchOps(where, kind, collectives)


def use_gpu(device: str | None) -> int:
    """Make the GPU `device` ("cuda", "cuda:1"; None for the first) torch's current one, and return its index.

    Raises DeviceError where there is none, UsageError where `device` names none.
    """
    if device is None and not torch.cuda.is_available():
        raise DeviceError("there is no CUDA device here", hint="kerngen doctor says what this machine can do")
    where = _device("cuda", device)
    if where.type != "cuda":
        raise UsageError(f"--device {device} is no GPU", hint="for example: cuda, cuda:1")
    torch.cuda.set_device(where)
    return where.index or 0


@contextmanager
def explaining_memory(device: torch.device, less: str = "fewer --max-new-tokens, a shorter prompt") -> Iterator[None]:
    """Turns torch's complaint that memory ran out into a DeviceError with the numbers. less: what would take less."""
    try:
        yield
    except RuntimeError as e:
        # of the allocator on a GPU, or of what asks for memory beside it; then of the one on a CPU
        if isinstance(e, torch.OutOfMemoryError) or "out of memory" in str(e):
            free, total = torch.cuda.mem_get_info(device)
            raise DeviceError(
                f"out of memory on {device}: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free",
                hint=f"{less}, a W4A16 checkpoint, or a larger GPU",
            ) from e
        if "can't allocate memory" in str(e):
            hint = f"{less}, --dtype bf16, or a machine with more memory"
            raise DeviceError("out of memory on the CPU", hint=hint) from e
        raise


def _device(backend: str, device: str | None) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if device is None:
        if backend == "cuda" and not has_gpu:
            raise DeviceError("there is no CUDA device here", hint="use --backend torch, or see: kerngen doctor")
        return torch.device("cuda:0" if has_gpu and backend != "torch" else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError:
        raise UsageError(f"unknown device {device!r}", hint="for example: cpu, cuda, cuda:1") from None
    if where.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is not supported", hint="known: cpu, cuda, cuda:N")
    if where.type == "cuda":
        if not has_gpu:
            raise DeviceError(f"there is no CUDA device here, so no {device}", hint="use --device cpu")
        index = where.index or 0
        if index >= torch.cuda.device_count():
            raise DeviceError(f"there is no {device}: this machine has {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", index)
    return where


def _default_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    major, _ = torch.cuda.get_device_capability(device)  # of any GPU: torch runs where kernels do not
    return torch.bfloat16 if major >= 8 else torch.float16
