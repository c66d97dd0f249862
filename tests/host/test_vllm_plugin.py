"""What vLLM is given as it starts, and what is refused. vLLM is played; tests/in_vllm has its own Python."""

from __future__ import annotations

import logging
import re
import sys
import tomllib
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
from command import ROOT
from packaging.requirements import Requirement

from kerngen.errors import UsageError
from kerngen.vllm import PARTS, plugin, register
from kerngen.vllm.plugin import chosen_parts, release_of

NEWEST = "0.33.0"
OLDEST = "0.26.0"  # which every part knows


class _Cuda:
    """vLLM's platform of a board."""

    def __init__(self, capability: tuple[int, int] | None, is_cuda: bool = True) -> None:
        self.capability, self._is_cuda = capability, is_cuda

    def is_cuda(self) -> bool:
        return self._is_cuda

    def get_device_capability(self) -> tuple[int, int] | None:
        return self.capability


class Played:
    """A process of vLLM's. installed: what was registered, each time that it was."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.installed: list[str] = []
        self.envs = ModuleType("vllm.envs")
        self.envs.environment_variables = {}  # type: ignore[attr-defined]
        self._patch = patch
        self.vllm, self.platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
        self.vllm.envs = self.envs  # type: ignore[attr-defined]
        for module in (self.vllm, self.envs, self.platforms):
            patch.setitem(sys.modules, module.__name__, module)
        for name, part in PARTS.items():
            for release in part.releases:
                module = ModuleType(part.module_for(release))
                module.install = lambda name=name: self.installed.append(name)  # type: ignore[attr-defined]
                patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(plugin, "_said", set())
        patch.delenv(plugin.ENV, raising=False)
        self.is_on()

    def is_on(self, version: str = OLDEST, capability: tuple[int, int] | None = (9, 0), is_cuda: bool = True) -> None:
        self.vllm.__version__ = version  # type: ignore[attr-defined]
        self.platforms.current_platform = _Cuda(capability, is_cuda)  # type: ignore[attr-defined]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Played:
    caplog.set_level(logging.INFO, "vllm.kerngen")
    return Played(monkeypatch)


def test_one_line_says_what_is_served_however_often_it_is_called(
    vllm: Played, caplog: pytest.LogCaptureFixture
) -> None:
    register()
    register()
    assert set(vllm.installed) == set(PARTS)
    (line,) = caplog.messages
    assert "\n" not in line
    for said in (
        f"vLLM {OLDEST} on sm90",
        "W4A16 linear layers (linear)",
        "GELU (model)",
        "pages (attention)",
        "stay vLLM's",
    ):
        assert said in line


def test_a_part_that_does_not_know_the_release_is_left_out(vllm: Played, caplog: pytest.LogCaptureFixture) -> None:
    vllm.is_on(NEWEST)
    register()
    assert vllm.installed == ["linear"]
    (line,) = caplog.messages
    assert "; model, exchange, attention, moe, head: not for this release of vLLM" in line


def test_vllms_compile_cache_is_another_one(vllm: Played) -> None:
    register()
    (state,) = (get() for get in vllm.envs.environment_variables.values())
    assert "linear" in state


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.26.0", "dev", "0.260.0"])
def test_another_release_gets_nothing_and_is_told_why(
    vllm: Played, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    vllm.is_on(version)
    register()
    assert vllm.installed == []
    assert vllm.envs.environment_variables == {}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"vLLM {version} is none of the releases" in record.getMessage()
    assert "0.26, 0.27" in record.getMessage()


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.30.0rc1", "0.29.1.dev3+gabc", "0.33.0+cu130"])
def test_versions_of_a_release_are_served(vllm: Played, version: str) -> None:
    vllm.is_on(version)
    register()
    assert vllm.installed == [name for name, part in PARTS.items() if release_of(version) in part.releases]
    assert "linear" in vllm.installed


@pytest.mark.parametrize(("capability", "is_cuda", "why"), [
    ((6, 1), True, "compute capability.*6.1"), (None, True, "sees no GPU"), ((9, 4), False, "not CUDA"),
])  # fmt: skip
def test_a_board_without_kernels_gets_nothing_and_is_told_why(
    vllm: Played, caplog: pytest.LogCaptureFixture, capability: Any, is_cuda: bool, why: str
) -> None:
    vllm.is_on(capability=capability, is_cuda=is_cuda)
    register()
    assert vllm.installed == []
    assert vllm.envs.environment_variables == {}
    (line,) = caplog.messages
    assert re.search(why, line), line


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 6), (10, 3), (12, 1)])
def test_other_boards_are_served(vllm: Played, capability: tuple[int, int]) -> None:
    vllm.is_on(capability=capability)
    register()
    assert vllm.installed == list(PARTS)


def test_parts_are_chosen_and_a_wrong_name_stops_vllm(
    vllm: Played, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(plugin.ENV, "liner")
    with pytest.raises(UsageError, match=r"KERNGEN_VLLM=liner names 'liner'.*did you mean linear\?") as caught:
        register()
    assert f"parts: {', '.join(PARTS)}" in str(caught.value)
    assert vllm.installed == []
    monkeypatch.setenv(plugin.ENV, "")
    register()
    assert vllm.installed == []
    assert "is empty" in caplog.text
    monkeypatch.setenv(plugin.ENV, " linear ,")
    register()
    assert vllm.installed == ["linear"]
    monkeypatch.setenv(plugin.ENV, "model")
    with pytest.raises(UsageError, match="names model, which serves nothing without linear") as caught:
        register()
    assert "KERNGEN_VLLM=linear,model" in str(caught.value)


def test_names_and_versions_are_read() -> None:
    assert chosen_parts(None) == list(PARTS)
    assert chosen_parts("") == chosen_parts(" , ") == []
    assert {release_of(v) for v in ("0.26.0", "0.26", "0.26.1+cu")} == {"0.26"}
    assert {release_of(v) for v in ("dev", "", "0", "0.26rc1")} == {""}


def test_the_installation_says_the_same() -> None:
    """The extra's releases are those of the parts, and the entry point is there and in the packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (wanted,) = (r for r in map(Requirement, project["project"]["optional-dependencies"]["vllm"]) if r.name == "vllm")
    releases = {release for part in PARTS.values() for release in part.releases}
    minors = {f"0.{minor}" for minor in range(60) if wanted.specifier.contains(f"0.{minor}.0")}
    assert minors == releases
    (target,) = project["project"]["entry-points"]["vllm.general_plugins"].values()
    module, _, name = target.partition(":")
    assert getattr(import_module(module), name) is register
    assert module in project["tool"]["setuptools"]["packages"]


def test_vllm_is_not_imported_before_it_calls() -> None:
    assert plugin.log.name.startswith("vllm."), "vLLM shows lines of its own loggers' children"
    assert all(part.module.startswith("kerngen.vllm.") for part in PARTS.values())
