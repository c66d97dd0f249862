"""What the launcher loads for a problem: the winner, what is left of it, or the default. The GPU is played."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kerngen.arch import DEVICES, Target, find_arch
from kerngen.compiler.cache import CompileCache
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import render
from kerngen.errors import LaunchError
from kerngen.runtime import launcher
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Arg, fields_of
from kerngen.tuning_db import problem_key

KERNEL = find_kernel("rmsnorm")
PROBLEM = KERNEL.problem_type(hidden=5376)
SM90 = find_arch("sm90")
CONFIG = KERNEL.config_type(vecs_per_thread=3, rows_per_block=2)


class Played:
    """Stands for Function: remembers what it was given, and refuses what the driver would refuse."""

    refuses: bytes | None = None

    def __init__(self, kernel: Any, config: Any, target: Any, image: bytes, source: str, index: int) -> None:
        if image == self.refuses:
            raise LaunchError("the driver cannot load it")
        self.config, self.image, self.source = config, image, source


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(launcher, "probe_device", lambda index=0: DEVICES["H200"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(launcher, "Function", Played)
    monkeypatch.setattr(Played, "refuses", None)

    def resolve(winner: Any = None) -> Any:
        bound = SimpleNamespace(answer=lambda problem: winner)
        monkeypatch.setattr("kerngen.tuning_db.WinnerTable", lambda *args: bound, raising=False)
        stores: Any = [] if winner is None else ["a store"]
        return launcher.Launcher(stores, CompileCache(tmp_path)).function(KERNEL, PROBLEM)

    return resolve


def _winner(**changes: Any) -> Any:
    cubin = compile_cubin(render(KERNEL, PROBLEM, CONFIG, Target.of(SM90)), SM90)
    fields = {"config": fields_of(CONFIG), "cubin": cubin, "stale": False, "source": "user", "provenance": "measured",
              "problem": problem_key(KERNEL, PROBLEM)}  # fmt: skip
    return SimpleNamespace(**fields | changes)


def test_the_winner_is_loaded_as_it_was_stored(resolve: Any) -> None:
    winner = _winner()
    found = resolve(winner)
    assert (found.image, found.config, found.source) == (winner.cubin.image, CONFIG, "user (measured)")


@pytest.mark.usefixtures("resolve")
def test_what_is_asked_for_is_compiled_ahead(tmp_path: Path) -> None:
    cache, said = CompileCache(tmp_path), []
    here = launcher.Launcher([], cache)
    here.build([[(KERNEL, PROBLEM), (KERNEL, PROBLEM)]], 1, lambda *told: said.append(told))
    assert said == [(0, 1, KERNEL.name)]
    text = render(KERNEL, PROBLEM, KERNEL.default_config(PROBLEM, here.target), here.target)
    assert (built := cache.find(text, SM90)) is not None
    assert here.function(KERNEL, PROBLEM).image == built.image


@pytest.mark.usefixtures("resolve")
def test_the_first_group_is_there_meanwhile_and_the_others_at_the_end(tmp_path: Path) -> None:
    cache, steps = CompileCache(tmp_path), list[str]()
    here = launcher.Launcher([], cache)
    problems = [PROBLEM, replace(PROBLEM, hidden=72)]

    def is_built(problem: Any) -> bool:
        text = render(KERNEL, problem, KERNEL.default_config(problem, here.target), here.target)
        return cache.find(text, SM90) is not None

    def groups() -> Iterator[list[tuple[Any, Any]]]:
        for problem in problems:
            steps.append("asked")
            yield [(KERNEL, problem)]

    def meanwhile() -> None:
        assert is_built(problems[0])
        steps.append("meanwhile")

    here.build(groups(), 1, meanwhile=meanwhile)
    assert steps == ["asked", "asked", "meanwhile"]
    assert all(map(is_built, problems))
    steps.clear()
    here.build(groups(), 1, meanwhile=meanwhile)  # all of it is in the cache
    here.build([], 1, meanwhile=meanwhile)
    assert steps == ["asked", "asked", "meanwhile", "meanwhile"]


def test_what_serves_all_lengths_is_loaded_ahead_with_its_scratch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, resolve: Any
) -> None:
    """Then no launch of any of them compiles, loads or allocates."""
    kernel = find_kernel("w4a16_gemm")
    problem, most = kernel.problem_type(n=64, k=128), 40
    scratch: dict[Any, int] = {}

    class Planned(Played):
        def plan(self, problem: Any) -> tuple[tuple[()], int]:
            return (), kernel.workspace_bytes(problem, self.config, here.target)

        def workspace(self, num_bytes: int) -> None:
            assert self not in scratch, "it would grow, and the smaller one be kept for graphs"
            scratch[self] = num_bytes

    monkeypatch.setattr(launcher, "Function", Planned)
    cache = CompileCache(tmp_path)
    monkeypatch.setattr(cache, "get_or_compile", lambda text, arch: cache.find(text, arch))  # all were built before
    here = launcher.Launcher([], cache)
    single = replace(problem, n=96, num_tokens=700)
    loaded = here.load_ahead([(kernel, problem)], most, jobs=2, exactly=[(kernel, single)])
    assert here.function(kernel, single) in loaded
    assert not any(choice.problem.n == 96 and choice.problem.num_tokens <= most for choice in here._by_choice)
    for tokens in range(1, most + 1):
        asked = replace(problem, num_tokens=tokens)
        assert (function := here.function(kernel, asked)) in loaded, f"{tokens} tokens"
        assert function.plan(asked)[1] <= scratch.get(function, 0), f"{tokens} tokens"
    assert len(loaded) > 1
    assert len(scratch) > 0


def test_without_a_winner_the_default_is_compiled(resolve: Any) -> None:
    found = resolve()
    assert found.config == KERNEL.default_config(PROBLEM, Target.of(SM90))
    assert found.source == "default configuration"


@pytest.mark.parametrize("changes", [{"stale": True}, {"cubin": None}], ids=["stale", "not kept"])
def test_a_configuration_without_its_code_is_compiled(resolve: Any, changes: dict[str, Any]) -> None:
    found = resolve(_winner(**changes))
    assert found.config == CONFIG
    assert found.image == compile_cubin(render(KERNEL, PROBLEM, CONFIG, Target.of(SM90)), SM90).image


def test_code_that_the_driver_refuses_is_compiled_anew(resolve: Any, caplog: pytest.LogCaptureFixture) -> None:
    real = _winner()
    newer = replace(real.cubin, image=real.cubin.image + b"by a newer CUDA")
    Played.refuses = newer.image
    with caplog.at_level(logging.WARNING):
        found = resolve(_winner(cubin=newer))
    assert found.image == real.cubin.image
    assert "compiling it here instead" in caplog.text


def _array(addresses: launcher.Addresses, *tensors: int | None) -> int:
    return addresses.array("many", Arg("layers", "ptrs", align=8), tensors)


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def test_an_array_of_addresses_is_made_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    addresses = launcher.Addresses(torch.device("cpu"))
    first = _array(addresses, 64, None, 128)
    assert _words(first, 3) == [64, 0, 128]
    second = _array(addresses, 64, 8, 128)
    assert first != second
    assert _words(first, 3) == [64, 0, 128], "a captured graph may name it"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _array(addresses, 64, None, 128) == first
    with pytest.raises(LaunchError, match=r"layers .* being captured") as caught:
        _array(addresses, 64, None, 256)
    assert "run it once" in str(caught.value.hint)


def test_each_of_several_tensors_is_checked() -> None:
    addresses = launcher.Addresses(torch.device("cpu"))
    with pytest.raises(LaunchError, match=r"layers .*tuple of CUDA tensors.* 64"):
        addresses.array("many", Arg("layers", "ptrs"), 64)
    with pytest.raises(LaunchError, match=r"layers\[1\] .*CUDA tensor"):
        addresses.array("many", Arg("layers", "ptrs"), (64, torch.zeros(2)))
