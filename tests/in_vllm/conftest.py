"""vLLM's Python without a GPU, played as CUDA once its modules are imported. `make test-vllm` says where it lies."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).parent
if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

    def pytest_report_header() -> str:
        return "tests/in_vllm: vLLM is not installed here; make test-vllm brings it"


def capability(major: int, minor: int) -> Any:
    """A platform's method that says so of every GPU."""
    from vllm.platforms.interface import DeviceCapability

    return classmethod(lambda cls, device_id=0: DeviceCapability(major, minor))


def serves(part: str) -> bool:
    """Whether that part is for the release of vLLM that is here."""
    import vllm

    from kerngen.vllm.plugin import PARTS, release_of

    return release_of(vllm.__version__) in PARTS[part].releases


def rank(this: int = 0, of: int = 1) -> Any:
    """A group of vLLM's, as one of its ranks sees it. Ranks are played one by one: a sum is that rank's summand."""
    return SimpleNamespace(rank_in_group=this, world_size=of, is_first_rank=this == 0, is_last_rank=this == of - 1,
                           all_reduce=lambda summand: summand)  # fmt: skip


def recorded(run: Callable[[], Any]) -> list[Any]:
    """The calls of kernels that `run` makes."""
    from kerngen.ops.devices import CPU

    calls: list[Any] = []
    execute = type(CPU).run

    def record(self: Any, call: Any, name: str) -> Any:
        calls.append(call)
        return execute(self, call, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(CPU), "run", record)
        run()
    return calls


@pytest.fixture(scope="session")
def vllm_on_h100() -> Iterator[None]:
    """vLLM believes that it runs on an H100: a rank of one. Modules that ask for compiled code come before that."""
    modules = ["model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16"]
    if serves("model"):
        modules += ["model_executor.models.gemma4", "compilation.backends"]
    for name in modules:
        importlib.import_module(f"vllm.{name}")
    from vllm.distributed import parallel_state
    from vllm.platforms import PlatformEnum, current_platform

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "_enum", PlatformEnum.CUDA)
        patch.setattr(type(current_platform), "get_device_capability", capability(9, 0))
        for group in ("_TP", "_PP"):
            patch.setattr(parallel_state, group, rank())
        yield


@pytest.fixture(scope="session")
def registered(vllm_on_h100: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """By vLLM's own search for plug-ins, in what pyproject.toml says, twice."""
    import tomllib

    from vllm import plugins

    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("installed")
    info = folder / "kerngen_here-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kerngen-here\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["vllm.general_plugins"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    sys.path.insert(0, str(folder))
    try:
        for _ in range(2):
            plugins.plugins_loaded = False
            plugins.load_general_plugins()
        yield
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def gated_gelu(registered: None) -> Iterator[None]:
    """Operators of vLLM's compiled code that its layers look up, and do not call here."""
    import torch

    library = torch.library.Library("_C", "FRAGMENT")  # they are there as long as it is
    for name in ("gelu_tanh_and_mul", "gelu_and_mul"):
        library.define(f"{name}(Tensor! out, Tensor x) -> ()")
    yield
    del library
