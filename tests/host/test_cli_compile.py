"""`kerngen compile` and `kerngen kernel`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kerngen.arch import Target, find_arch
from kerngen.cache import CompileCache
from kerngen.cli import cli
from kerngen.compile import source_key
from kerngen.errors import ConfigRefused, KerngenError, UnknownName, UsageError
from kerngen.render import render
from kerngen.templates import find_kernel, kernel_names
from kerngen.tuning.checks import why_not_cubin


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KERNGEN_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setattr("kerngen.tuning_db.resolve.PREBUILT", tmp_path / "none")  # what is shipped has its own test


def _run(*args: str) -> str:
    return CliRunner().invoke(cli, args, catch_exceptions=False, standalone_mode=False).stdout


def _fails(*args: str) -> BaseException:
    result = CliRunner().invoke(cli, args, standalone_mode=False)
    assert result.exception is not None
    return result.exception


def test_a_workload_becomes_files_and_a_manifest(tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ("--model", "gemma-4-31b", "--kernel", "embed,rmsnorm", "-o", str(out), "--jobs", "2")
    text = _run("compile", "--arch", "sm70,sm90", *args)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["arches"] == ["sm70", "sm90"]
    assert manifest["kind"] == "cubin"
    assert {(f["arch"], f["kernel"]) for f in manifest["files"]} == {
        (a, k) for a in ("sm70", "sm90") for k in ("embed", "rmsnorm")
    }
    for row in manifest["files"]:
        image = (out / row["file"]).read_bytes()
        assert len(image) == row["bytes"]
        assert why_not_cubin(image, find_arch(row["arch"])) is None
        assert row["origin"] == "default configuration"
        assert row["serves"]
        assert all(e["registers"] > 0 for e in row["entries"].values())
    served = sum(len(f["serves"]) for f in manifest["files"] if (f["arch"], f["kernel"]) == ("sm70", "embed"))
    assert served == 14, "every token count of the workload must be served"
    assert f"{len(manifest['files'])} files in {out}" in text
    again = json.loads(_run("compile", "--arch", "sm70,sm90", *args, "--json"))
    assert again["files"] == manifest["files"]


def test_the_winners_are_what_is_compiled() -> None:
    _run("tune", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed", "--jobs", "1")
    manifest = json.loads(_run("compile", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed", "--json"))
    assert all("predicted" in f["origin"] for f in manifest["files"])


def test_ptx_of_the_test_cases_can_be_found_by_source(tmp_path: Path) -> None:
    out = tmp_path / "ptx"
    _run("compile", "--arch", "sm70", "--kernel", "embed", "--cases", "--ptx", "-o", str(out))
    manifest = json.loads((out / "manifest.json").read_text())
    kernel, arch = find_kernel("embed"), find_arch("sm70")
    by_key = {f["source_key"]: f for f in manifest["files"]}
    cases = [c for c in kernel.cases.CASES if kernel.why_unsupported(c.problem, Target.of(arch)) is None]
    assert cases
    cache = CompileCache()
    for case in cases:
        source = render(kernel, case.problem, kernel.default_config(case.problem, Target.of(arch)), Target.of(arch))
        key = source_key(source, arch.ptx_target)
        assert ".target sm_70" in (out / by_key[key]["file"]).read_text()
        assert case.name in by_key[key]["serves"]
        assert cache.get_ptx(key) is not None, "GPU tests read it from the compile cache"
    assert any("bf16" in note for note in manifest["notes"]), "what the arch cannot run must be said"


def test_what_cannot_be_compiled_is_refused(tmp_path: Path) -> None:
    assert isinstance(_fails("compile", "--arch", "sm70"), UsageError)
    assert isinstance(_fails("compile", "--arch", "sm70", "--model", "gemma-4-31b", "--cases"), UsageError)
    assert isinstance(_fails("compile", "--arch", "sm7", "--model", "gemma-4-31b"), UnknownName)
    assert isinstance(_fails("compile", "--arch", "sm70", "--model", "gemma"), UnknownName)
    unwritable = _fails(
        "compile", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embed", "-o", "/proc/cubins"
    )
    assert isinstance(unwritable, KerngenError)
    assert "/proc/cubins" in unwritable.message
    assert unwritable.exit_code == 1


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


def test_kernel_show_refuses_with_the_numbers() -> None:
    error = _fails("kernel", "show", "attn_decode", "--arch", "sm70", "--config", "num_warps=12,split_d=8")
    assert isinstance(error, ConfigRefused)
    assert "split_d=8" in error.message
    assert isinstance(_fails("kernel", "show", "attn_decode", "--arch", "sm70", "--config", "warps=12"), UsageError)
    assert isinstance(_fails("kernel", "show", "atn_decode", "--arch", "sm70"), UnknownName)
    assert isinstance(_fails("kernel", "show", "w4a16_gemm", "--arch", "sm70"), UsageError)


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
