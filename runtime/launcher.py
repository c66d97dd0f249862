"""From (kernel, problem) to a function that runs it: find the winner, load its cubin, launch on torch's stream.

Launches go through cuLaunchKernelEx, so that a kernel can ask for programmatic dependent launch or a cluster, and
are safe to capture in a CUDA graph: nothing is allocated or copied between two launches of the same Function, but for
arrays of addresses before the first launch with their tensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import torch

from kerngen.arch import Device, Target, arch_of_capability, borrowed
from kerngen.boards import identify, plain_name
from kerngen.compiler.cache import CachedCompiler, CompileCache, compiling_is_forbidden
from kerngen.errors import DeviceError, KerngenError, LaunchError, ToolchainError
from kerngen.runtime import tensor_maps
from kerngen.runtime.selection import Choice, Selector
from kerngen.system.files import locked, make_folder, make_room_for_cupy
from kerngen.templates import find_kernel
from kerngen.templates.call import Call
from kerngen.templates.kernel import Arg, Kernel, Launch, describe
from kerngen.templates.values import lies_in_pages, page_strides

if TYPE_CHECKING:
    from kerngen.compiler.compile import Cubin
    from kerngen.tuning_db import Source
    from kerngen.tuning_db.read.boards import PerBoard

log = logging.getLogger(__name__)

PLANS_KEPT = 512  # grids of a Function that are remembered
_CTYPES: dict[str, Any] = {
    "ptr": ctypes.c_void_p, "ptrs": ctypes.c_void_p, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "f32": ctypes.c_float, "map": None,
}  # fmt: skip


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise ToolchainError(
            f"cannot import cuda-bindings: {e}", hint="pip install 'kerngen[cuda12]' or 'kerngen[cuda13]'"
        ) from e
    return driver


def _check(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]) != 0:
        raise LaunchError(f"{what}: {result[0].name}")
    return result[1] if len(result) > 1 else None


def probe_device(index: int | None = None) -> Device:
    """The GPU at hand as a Device, named as its profile (boards.py) or, where it has none, as its driver names it.

    mem_gbps is what its clocks and bus promise; measure.ceilings says what it gives.

    index: None for torch's current one. Raises DeviceError where torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise DeviceError("torch sees no CUDA device", hint="kerngen doctor says what this machine can do")
    return _probed(torch.cuda.current_device() if index is None else index)


@cache
def gpu_uuid() -> str:
    """The identity of torch's current GPU, or of that slice of one, as NVML writes it: "GPU-...", "MIG-..."."""
    kind = "MIG" if " MIG " in probe_device().name else "GPU"
    driver = _driver()
    _check(driver.cuInit(0), "cuInit")
    get = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid  # CUDA 13 has one name for it
    identity = _check(get(torch.cuda.current_device()), "cuDeviceGetUuid")
    return f"{kind}-{UUID(bytes=bytes(identity.bytes))}"


def probe_target(index: int | None = None) -> Target:
    """As probe_device, with the arch whose cubins run there."""
    device = probe_device(index)
    return Target(arch_of_capability(*torch.cuda.get_device_capability(index)), device)


@cache
def _probed(index: int) -> Device:
    p = torch.cuda.get_device_properties(index)
    driver = _driver()
    torch.cuda.current_stream(index)
    attribute = driver.CUdevice_attribute

    def read(name: str) -> int:
        return int(_check(driver.cuDeviceGetAttribute(getattr(attribute, name), index), name))

    _check(driver.cuInit(0), "cuInit")
    khz = read("CU_DEVICE_ATTRIBUTE_CLOCK_RATE")
    mem_khz, bits = (
        read("CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE"),
        read("CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH"),
    )
    arch = arch_of_capability(p.major, p.minor)
    mem_gib = round(p.total_memory / 2**30, 1)
    profile = identify(p.name, p.multi_processor_count, mem_gib)
    return Device(
        name=profile.name if profile is not None else plain_name(p.name),
        arch=arch.name,
        num_sms=p.multi_processor_count,
        mem_gbps=2 * mem_khz * bits / 8 / 1e6,
        mem_gib=mem_gib,
        l2_bytes=p.L2_cache_size,
        clock_mhz=khz // 1000,
        tensor_tflops=round(2 * arch.tensor_fmas * p.multi_processor_count * khz / 1e9, 1),
        source="probed",
    )


def load_module(what: str, image: bytes, entries: Iterable[str], device: torch.device) -> tuple[Any, dict[str, Any]]:
    """(CuPy's module of `image`, its kernels by name). Raises LaunchError, of `what`, where the driver does not load
    it on that GPU, or one of `entries` is not in it.
    """
    make_room_for_cupy()
    from cupy.cuda.function import Module

    module = Module()
    with torch.cuda.device(device):
        torch.zeros(1, device=device)  # makes torch's primary context current, which CuPy then shares
        try:
            module.load(image)
            return module, {name: module.get_function(name) for name in entries}
        except Exception as e:
            raise LaunchError(f"{what}: the driver cannot load it on this GPU: {e}") from e


class Function:
    """One kernel, loaded for one compiled-in problem and configuration on the GPU `index`.

    Call it with the runtime problem and every argument by name, or `run` it with them in a mapping. Tensors must be
    contiguous, or lie as their `Arg` says, and 16-byte aligned. `source` says where the configuration came from.
    """

    def __init__(
        self,
        kernel: Kernel,
        config: Any,
        target: Target,
        image: bytes,
        source: str = "given",
        index: int = 0,
    ) -> None:
        self.kernel, self.config, self.target, self.source = kernel, config, target, source
        self._args = kernel.body(config, target.arch).args
        self._device = torch.device("cuda", index)
        what = f"{kernel.name} {describe(config)}"
        self._module, self._entries = load_module(what, image, self._args, self._device)
        self._limits: dict[str, int] = {}
        self._plans: dict[Any, tuple[tuple[Launch, ...], int]] = {}
        self._workspace: torch.Tensor | None = None
        self._retired: list[torch.Tensor] = []  # still named by graphs captured earlier
        self._addresses = Addresses(self._device)
        self._maps: dict[tuple[str, int, tuple[int, ...]], tensor_maps.Encoded] = {}

    def plan(self, problem: Any) -> tuple[tuple[Launch, ...], int]:
        """(launches, workspace bytes) for a runtime problem; refused with the numbers if it cannot run."""
        if (found := self._plans.get(problem)) is None:
            self.kernel.require_valid(problem, self.config, self.target)
            launches = self.kernel.launches(problem, self.config, self.target)
            found = launches, self.kernel.workspace_bytes(problem, self.config, self.target)
            for launch in launches:
                self._allow_smem(launch)
            if len(self._plans) == PLANS_KEPT:  # lengths never end; what is asked again soon is there again soon
                self._plans.clear()
            self._plans[problem] = found
        return found

    def _allow_smem(self, launch: Launch) -> None:
        if launch.smem_bytes <= self._limits.get(launch.entry, 0):
            return
        from cupy_backends.cuda.api import driver

        max_dynamic_shared_size_bytes = 8  # CUfunction_attribute
        try:
            driver.funcSetAttribute(self._entries[launch.entry].ptr, max_dynamic_shared_size_bytes, launch.smem_bytes)
        except Exception as e:
            raise LaunchError(
                f"{launch.entry}: {launch.smem_bytes:,} B of shared memory refused by this GPU: {e}"
            ) from e
        self._limits[launch.entry] = launch.smem_bytes

    def address(self, symbol: str) -> int:
        """Where a variable of the module lies on the device. Raises LaunchError where it has none of that name."""
        try:
            return int(self._module.get_global_var(symbol))
        except Exception as e:
            raise LaunchError(f"{self.kernel.name} has no {symbol}: {e}") from e

    def workspace(self, num_bytes: int) -> torch.Tensor:
        """At least `num_bytes` of scratch, zeroed when first made; the same for every launch of this Function."""
        if self._workspace is None or self._workspace.numel() < num_bytes:
            if self._workspace is not None:
                self._retired.append(self._workspace)
            self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._workspace

    def __call__(self, problem: Any, **arguments: Any) -> None:
        self.run(problem, arguments)

    def run(self, problem: Any, arguments: Mapping[str, Any], *, in_forward: bool = False, alone: bool = False) -> None:
        """in_forward: what a launch that reads ahead reads was complete when a kernel before the last one began. alone:
        no other stream of this GPU runs kernels whose blocks wait for each other.
        """
        launches, workspace_bytes = self.plan(problem)
        if workspace_bytes:
            arguments = {**arguments, "workspace": self.workspace(workspace_bytes)}
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for launch in launches:
            self._launch(problem, launch, arguments, stream, _attributes(launch, in_forward, alone))

    def _launch(
        self, problem: Any, launch: Launch, arguments: Mapping[str, Any], stream: int, attributes: list[Any]
    ) -> None:
        driver = _driver()
        values, types = [], []
        for arg in self._args[launch.entry]:
            if arg.only and not getattr(problem, arg.only):
                continue
            types.append(_CTYPES[arg.kind])
            if arg.kind == "map":
                values.append(self._map(problem, arg, arguments[arg.of]))
                continue
            try:
                value = arguments[arg.name]
            except KeyError:
                if arg.name != "workspace":
                    raise LaunchError(f"{self.kernel.name}: argument {arg.name!r} is missing") from None
                value = None
            if arg.kind == "ptr":
                value = _pointer(self.kernel.name, arg, arg.name, value, problem)
            elif arg.kind == "ptrs":
                value = self._addresses.array(self.kernel.name, arg, value)
            values.append(value)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.smem_bytes
        config.hStream = stream
        config.attrs, config.numAttrs = attributes, len(attributes)
        result = driver.cuLaunchKernelEx(
            config, driver.CUfunction(self._entries[launch.entry].ptr), (tuple(values), tuple(types)), 0
        )
        _check(result, f"{launch.entry} grid={launch.grid} block={launch.block} smem={launch.smem_bytes}")

    def _map(self, problem: Any, arg: Arg, value: Any) -> tensor_maps.Encoded:
        """The tensor map of a tensor, made when it is first launched with; zeros where the kernel will not use it."""
        if value is not None and not isinstance(value, torch.Tensor):
            raise LaunchError(f"{self.kernel.name}: {arg.of} must be a CUDA tensor, not {value!r}")
        address, shape = (0, ()) if value is None else (value.data_ptr(), tuple(value.shape))
        if (found := self._maps.get((arg.of, address, shape))) is None:
            seen = self.kernel.tensor_map(problem, self.config, arg.of, shape) if shape else None
            what = f"{self.kernel.name}: {arg.of}"
            found = tensor_maps.Encoded() if seen is None else tensor_maps.encode(what, seen, address)
            if len(self._maps) == PLANS_KEPT:
                self._maps.clear()
            self._maps[arg.of, address, shape] = found
        return found


@cache
def _attributes(launch: Launch, in_forward: bool, alone: bool) -> list[Any]:
    driver = _driver()
    found = []
    if launch.pdl and (in_forward or not launch.reads_ahead):
        a = driver.CUlaunchAttribute()
        a.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        a.value.programmaticStreamSerializationAllowed = 1
        found.append(a)
    if launch.cooperative and not alone:
        a = driver.CUlaunchAttribute()
        a.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        a.value.cooperative = 1
        found.append(a)
    if launch.cluster != (1, 1, 1):
        a = driver.CUlaunchAttribute()
        a.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z = launch.cluster
        found.append(a)
    return found


class Addresses:
    """Arrays of addresses on `device`, each made when its tensors are first launched with, and kept: graphs name it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: dict[tuple[int, ...], torch.Tensor] = {}

    def array(self, kernel: str, arg: Arg, tensors: Any) -> int:
        """The address of an array of int64: of each tensor its address, of None 0.

        Raises LaunchError where it would have to be made while a CUDA graph is being captured.
        """
        if not isinstance(tensors, tuple | list):
            raise LaunchError(f"{kernel}: {arg.name} must be a tuple of CUDA tensors, not {tensors!r}")
        addresses = tuple(_pointer(kernel, arg, f"{arg.name}[{i}]", t) for i, t in enumerate(tensors))
        if (found := self._arrays.get(addresses)) is None:
            if torch.cuda.is_current_stream_capturing():  # what fills it would become part of the graph
                raise LaunchError(
                    f"{kernel}: the addresses of {arg.name} are not on the GPU, and a CUDA graph is being captured",
                    hint="run it once with these tensors before the capture",
                )
            found = self._arrays[addresses] = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        return found.data_ptr()


def _pointer(kernel: str, arg: Arg, name: str, value: Any, problem: Any = None) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        raise LaunchError(f"{kernel}: {name} must be a CUDA tensor, not {value!r}")
    require_layout(kernel, arg, name, value, problem)
    address = value.data_ptr()
    if address % arg.align:
        raise LaunchError(f"{kernel}: {name} starts at an address that is not a multiple of {arg.align} bytes",
                          hint="pass a copy of it: x.clone()")  # fmt: skip
    return address


def require_layout(kernel: str, arg: Arg, name: str, value: torch.Tensor, problem: Any) -> None:
    """Raises LaunchError unless `value` lies in memory as the argument and the problem say."""
    if page_heads := getattr(problem, arg.page_heads) if arg.page_heads else 0:
        if not lies_in_pages(value, page_heads):
            raise LaunchError(
                f"{kernel}: {name} {tuple(value.shape)} has strides {value.stride()}; in pages of {page_heads} heads "
                f"they are {page_strides(value.shape, page_heads)}"
            )
    elif arg.contiguous and not value.is_contiguous():
        shape, strides = tuple(value.shape), value.stride()
        raise LaunchError(
            f"{kernel}: {name} {shape} is not contiguous (strides {strides})", hint="x.contiguous() copies it"
        )


def shares_sms() -> bool:
    """Whether kernels of other processes may run beside this one's: a CUDA MPS server is there."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()


class Launcher:
    """Runs calls on one GPU: what `Selector` chooses, loaded once.

    sources: tuning databases in lookup order; with none, every kernel runs its default configuration.
    """

    def __init__(
        self, sources: Sequence[Source | PerBoard] = (), cache: CompileCache | None = None, index: int = 0
    ) -> None:
        self.index = index
        self.target = probe_target(index)
        if words := borrowed(self.target.arch):
            log.warning("%s", words)
        self._selector = Selector(sources, self.target)
        self._cache = cache or CompileCache()
        self._by_choice: dict[Choice, Function] = {}
        self._by_image: dict[str, Function] = {}

    def function(self, kernel: Kernel, problem: Any) -> Function:
        """The Function that serves `problem`. Raises TuningMiss where KERNGEN_NO_COMPILE forbids building it."""
        choice = self._selector.choice(kernel, problem)
        if (known := self._by_choice.get(choice)) is None:
            known = self._by_choice[choice] = self._loaded(choice)
        return known

    def choice(self, kernel: Kernel, problem: Any) -> Choice:
        """What serves `problem`. Raises ConfigRefused where nothing does."""
        return self._selector.choice(kernel, problem)

    def fuses(self, kernel: Kernel, problem: Any) -> bool:
        """Whether a step asks `kernel` for `problem`; if not, it asks the kernels that this one replaces."""
        return self._selector.fuses(kernel, problem)

    def build(
        self,
        groups: Iterable[Iterable[tuple[Kernel, Any]]],
        jobs: int,
        say: Callable[[int, int, str], None] = lambda *_: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Compile in `jobs` processes what serves these (kernel, problem) and is not built yet, group by group: what
        the first asks for is there before `meanwhile` is called, all when this returns.

        say: done, of all, what. What cannot be compiled is left to `function`, which says why.
        """
        from kerngen.compiler.render import Renderer  # Jinja is for those that must render

        with CachedCompiler(jobs, self._cache) as compiler:
            building: dict[str, tuple[str, Future[Cubin]]] = {}
            rendered, ends = Renderer(), []
            for group in groups:
                for kernel, problem in group:
                    with suppress(KerngenError):
                        choice = self._selector.choice(kernel, problem)
                        if choice.cubin is None and choice not in self._by_choice:
                            text = rendered(kernel, choice.problem, choice.config, self.target)
                            if text not in building:
                                building[text] = kernel.name, compiler.submit(text, self.target.arch)
                ends.append(len(building))
            first = ends[0] if ends else 0
            for i, (name, made) in enumerate(building.values()):
                if i == first:
                    meanwhile()
                say(i, len(building), name)
                with suppress(KerngenError):
                    made.result()
            if first == len(building):
                meanwhile()

    def load_ahead(
        self,
        asked: Iterable[tuple[Kernel, Any]],
        most: int,
        jobs: int,
        exactly: Iterable[tuple[Kernel, Any]] = (),
    ) -> list[Function]:
        """Compile in `jobs` processes, load, and give its scratch memory, what serves these (kernel, problem) at every
        value from 1 to `most` of their dynamic field, and each of `exactly` as it is. Such a launch then compiles,
        loads and allocates nothing: it may come while a CUDA graph is being captured. Returns what serves them.

        Processes of a machine that share a compile cache do this one after the other: what one compiles, the next ones
        read. Raises TuningMiss where KERNGEN_NO_COMPILE forbids building one, CompileError, ConfigRefused.
        """
        every = [
            (kernel, replace(problem, **{problem.DYNAMIC: length}))
            for kernel, problem in asked
            for length in self._selector.telling_lengths(kernel, problem, most)
        ]
        every += exactly
        if not compiling_is_forbidden():
            with ExitStack() as stack:
                with suppress(OSError):  # a folder that cannot be written to keeps nothing for the others either
                    make_folder(self._cache.dir)
                    stack.enter_context(locked(self._cache.dir / "building"))
                self.build([every], jobs)
        scratch: dict[Function, int] = {}
        for kernel, problem in every:
            function = self.function(kernel, problem)
            scratch[function] = max(scratch.get(function, 0), function.plan(problem)[1])
        for function, num_bytes in scratch.items():
            if num_bytes:
                function.workspace(num_bytes)
        return list(scratch)

    def launch(self, call: Call[Any], *, in_forward: bool = False, alone: bool = False) -> None:
        """Run `call` on torch's current stream. in_forward, alone: see Function.run."""
        function = self.function(find_kernel(call.kernel), call.problem)
        function.run(call.problem, call.arguments, in_forward=in_forward, alone=alone)

    @property
    def functions(self) -> list[tuple[str, Any, Function]]:
        """Everything loaded so far: (kernel, a problem that it was chosen for, function)."""
        return [(choice.kernel.name, choice.problem, f) for choice, f in self._by_choice.items()]

    def _loaded(self, choice: Choice) -> Function:
        if choice.cubin is not None:
            try:
                return self._load(choice, choice.cubin.image)
            except LaunchError as e:  # built by a newer CUDA than this driver, say: the configuration is still the best
                log.warning("%s\n  compiling it here instead", e)
        return self._load(choice, self._cache.get_or_compile(choice.text, self.target.arch).image)

    def _load(self, choice: Choice, image: bytes) -> Function:
        """A Function of this image, shared by all problems that it serves."""
        identity = hashlib.sha256(image + describe(choice.config).encode()).hexdigest()
        if (found := self._by_image.get(identity)) is None:
            found = self._by_image[identity] = Function(
                choice.kernel, choice.config, self.target, image, choice.source, self.index
            )
        return found
