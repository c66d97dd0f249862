"""`kerngen compile` and `kerngen kernel`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kerngen.arch import Target, find_arch
from kerngen.cli import cli
from kerngen.compiler.cache import CompileCache
from kerngen.compiler.compile import source_key
from kerngen.compiler.render import render
from kerngen.errors import KerngenError, TuningMiss
from kerngen.runtime.selection import DEFAULT
from kerngen.templates import find_kernel, kernel_names
from kerngen.tuning.checks import why_not_cubin


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KERNGEN_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setattr("kerngen.tuning_db.read.places.PREBUILT", tmp_path / "none")  # that has its own test


def _run(*args: str) -> str:
    return CliRunner().invoke(cli, args, catch_exceptions=False, standalone_mode=False).stdout


def _fails(*args: str) -> BaseException:
    result = CliRunner().invoke(cli, args, standalone_mode=False)
    assert result.exception is not None
    return result.exception


def test_a_workload_is_built_and_listed() -> None:
    args = ("--model", "gemma-4-31b", "--kernel", "embed,rmsnorm", "--jobs", "2")
    text = _run("compile", "--arch", "sm70,sm90", *args)
    made = json.loads(_run("compile", "--arch", "sm70,sm90", *args, "--json"))
    assert made["targets"] == [["sm70", "V100"], ["sm90", "H200"]]
    assert made["kind"] == "cubin"
    assert {(b["arch"], b["kernel"]) for b in made["builds"]} == {
        (a, k) for a in ("sm70", "sm90") for k in ("embed", "rmsnorm")
    }
    cache = CompileCache()
    for row in made["builds"]:
        cubin = cache.get(row["key"])
        assert len(cubin.image) == row["bytes"]
        assert why_not_cubin(cubin.image, find_arch(row["arch"])) is None
        assert set(row["chosen_by"]) == {DEFAULT}
        assert row["code_from"] == "compile cache", "the first run left it there"
        assert row["serves"]
        assert all(e["registers"] > 0 for e in row["entries"].values())
    served = sum(len(b["serves"]) for b in made["builds"] if (b["arch"], b["kernel"]) == ("sm70", "embed"))
    assert served == 14, "every token count of the workload must be served"
    assert f"{len(made['builds'])} builds: {len(made['builds'])} from: NVRTC" in text


def test_the_winners_are_what_is_compiled_and_their_code_comes_from_the_database(tmp_path: Path) -> None:
    _run("tune", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed", "--jobs", "1")
    shutil.rmtree(tmp_path / "cache")
    made = json.loads(_run("compile", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed", "--json"))
    assert {s for b in made["builds"] for s in b["chosen_by"]} == {"user: predicted for V100 (predicted)"}
    assert {b["code_from"] for b in made["builds"]} == {"database"}
    assert not list((tmp_path / "cache").rglob("*.cubin")), "nothing was built anew"


def test_no_compile_names_what_is_missing_and_the_way_on(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("compile", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed,rmsnorm", "--jobs", "1")
    _run(*args[:-3], "embed", "--jobs", "1")
    monkeypatch.setenv("KERNGEN_NO_COMPILE", "1")
    assert _run(*args[:-3], "embed", "--jobs", "1").count("from: compile cache") == 1
    error = _fails(*args)
    assert isinstance(error, TuningMiss)
    assert error.message.startswith(
        "4 of 6 builds for sm70 are in no database that was asked, and not in the compile cache"
    )
    assert "rmsnorm(hidden=5376, dtype=fp16" in error.message
    assert "embed" not in error.message
    assert str(error.hint).startswith("without KERNGEN_NO_COMPILE, here or elsewhere: kerngen compile --arch sm70")
    assert " ".join(args) not in str(error.hint), "what was just run is no advice"


def test_ptx_of_the_test_cases_can_be_found_by_source(tmp_path: Path) -> None:
    out = tmp_path / "ptx"
    _run("compile", "--arch", "sm70", "--kernel", "embed", "--cases", "--ptx", "-o", str(out))
    made = json.loads(_run("compile", "--arch", "sm70", "--kernel", "embed", "--cases", "--ptx", "--json"))
    kernel, arch = find_kernel("embed"), find_arch("sm70")
    by_key = {b["source_key"]: b for b in made["builds"]}
    cases = [c for c in kernel.cases.CASES if kernel.why_unsupported(c.problem, Target.of(arch)) is None]
    assert cases
    for case in cases:
        source = render(kernel, case.problem, kernel.default_config(case.problem, Target.of(arch)), Target.of(arch))
        key = source_key(source, arch.ptx_target)
        assert case.name in by_key[key]["serves"]
        for cache in (CompileCache(), CompileCache(out)):  # GPU tests read it from the one that KERNGEN_CACHE_DIR names
            ptx = cache.get_ptx(key)
            assert b".target sm_70" in ptx.image
    assert any("bf16" in note for note in made["notes"]), "what the arch cannot run must be said"


def test_kernel_ls_names_every_kernel() -> None:
    text = _run("kernel", "ls")
    rows: list[dict[str, Any]] = json.loads(_run("kernel", "ls", "--json"))
    assert [r["kernel"] for r in rows] == list(kernel_names())
    assert all(name in text for name in kernel_names())
    assert all(r["about"] for r in rows)


@pytest.mark.parametrize("arch", ["sm70", "sm90"])
def test_kernel_show_says_what_it_takes_and_why_others_are_refused(arch: str) -> None:
    shown = json.loads(_run("kernel", "show", "attn_decode", "--arch", arch, "--problem", "head_dim=512", "--json"))
    kernel = find_kernel("attn_decode")
    assert shown["num_valid"] + sum(r["count"] for r in shown["refused"]) == shown["space_size"]
    assert all(any(c.isdigit() for c in r["reason"]) for r in shown["refused"]), "a refusal names its numbers"
    assert set(shown["entries"]) <= {e for b in kernel.spec.BODIES for e in b.args}
    assert f"constexpr int ARCH = {arch[2:]};" in shown["source"]
    assert shown["problem"]["dtype"] == ("fp16" if arch == "sm70" else "bf16")
    assert shown["predicted"]["latency_us"] > 0
    text = _run("kernel", "show", "attn_decode", "--arch", arch, "--problem", "head_dim=512")
    assert "registers a thread" in text
    assert "configurations can run" in text
    assert 'extern "C" __global__' in text


def test_kernel_check_needs_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: tests/gpu checks the kernels")
    error = _fails("kernel", "check", "embed")
    assert isinstance(error, KerngenError | click.ClickException)
    assert "no CUDA device" in str(error)


def test_show_announces_no_refusals_where_there_are_none() -> None:
    text = _run("kernel", "show", "embed", "--arch", "sm90", "--no-source")
    assert text.endswith("12 of 12 configurations can run, none is refused\n")
    text = _run("kernel", "show", "rmsnorm", "--arch", "sm90", "--no-source")
    assert "refused, with one example each:\n  " in text
