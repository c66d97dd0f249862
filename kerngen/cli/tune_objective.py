"""What `kerngen tune` judges by: the model's steps, the clock, or the cost model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from kerngen.arch import Arch, Target, find_device
from kerngen.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from kerngen.tuning.objective import Objective
    from kerngen.tuning.worker import GpuWorker
    from kerngen.workload.workload import Model, Workload


def worker_for(stack: ExitStack, wanted: str, arch: Arch, device_name: str | None) -> GpuWorker | None:
    """The process that measures, where --objective, --device and this machine's GPU call for it; it ends with `stack`.

    It is on its way when this returns. Raises DeviceError or UsageError where `measured` or `step` cannot be had.
    """
    from kerngen.tuning.worker import GpuWorker, present_arch

    device = find_device(device_name) if device_name else None
    if wanted in ("measured", "step"):
        if device is not None:
            raise UsageError("--device names a profile to predict for; a measurement is of the GPU that is here")
        here = present_arch()
        if here is None:
            raise DeviceError("this machine has no GPU to measure on", hint="predict instead: --objective predicted")
        if here != arch:
            raise DeviceError(
                f"this machine's GPU is {here}, not {arch}", hint="predict instead: --objective predicted"
            )
    elif device is not None and device.arch != arch.name:
        raise UsageError(f"device {device} is {device.arch}, not {arch}", hint=f"--arch {device.arch}")
    elif wanted == "predicted" or device is not None or present_arch() != arch:
        return None
    worker = stack.enter_context(GpuWorker())
    worker.start()
    return worker


def objective_for(
    stack: ExitStack,
    worker: GpuWorker | None,
    wanted: str,
    arch: Arch,
    device_name: str | None,
    model: Model,
    load: Workload,
    *,
    whole: bool,
) -> tuple[Objective, str]:
    """What is judged by, and why `auto` is that. The lock of the worker's GPU is released with `stack`.

    whole: all of the model is tuned, and not only some kernels of it: then its steps choose, where any can be timed.
    """
    from kerngen.runtime.selection import Selector
    from kerngen.timing.gpu import GpuLock
    from kerngen.tuning.objective import Measured, Predicted
    from kerngen.tuning.step_objective import Stepped
    from kerngen.tuning.step_timer import timed_steps
    from kerngen.tuning_db import default_sources

    if worker is None:
        device = None if device_name is None else find_device(device_name)
        why = f"no {arch} GPU is here" if device is None else f"--device names a profile, {device}"
        return Predicted(Target.of(device or arch)), why
    lock = GpuLock(worker.uuid())
    stack.callback(lock.release)
    here = f"on this machine's {worker.device()}"
    if wanted == "measured" or (wanted == "auto" and not whole):
        return Measured(worker, lock), f"{here}, each kernel alone: --kernel names a part of the model"
    if model.engine != "kerngen":
        return Measured(worker, lock), f"{here}, each kernel alone: no steps of {model.engine} are timed"
    fuses = Selector(default_sources(), worker.target()).fuses  # as a run on this board asks
    steps = timed_steps(worker, model, load, fuses)
    if wanted == "auto" and not steps:
        return Measured(worker, lock), f"{here}, each kernel alone: {model.name} takes none of the steps that are timed"
    return Stepped(worker, steps, load.serving, lock), f"{here}, and {len(steps)} steps of {model.name} choose"
