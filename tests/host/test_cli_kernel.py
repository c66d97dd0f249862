"""`kerngen kernel`: what an author looks at, on any laptop."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil

import pytest
from command import Kerngen

from kerngen.arch import find_arch
from kerngen.cli.kernel_show import example
from kerngen.templates import TEMPLATES_VARIABLE, find_kernel
from kerngen.workload.workload import find_model, workload

# -- ls --model


@pytest.mark.parametrize("arch", ["sm70", "sm90"])
def test_a_models_problems_are_listed_with_what_to_paste(kerngen: Kerngen, arch: str) -> None:
    out = kerngen.ok("kernel", "ls", "--model", "gemma-4-31b", "--arch", arch, "--json")
    rows, items = json.loads(out), workload(find_model("gemma-4-31b"), find_arch(arch)).items
    assert sum(len(row["points"]) for row in rows) == len(items)
    text = kerngen.ok("kernel", "ls", "--model", "gemma-4-31b", "--arch", arch)
    assert f"{len(items)} problems of {len({i.kernel for i in items})} kernels" in text
    assert all(row["show"] in text for row in rows)
    for row in rows:
        problem = find_kernel(row["kernel"]).problem_type(**row["static"], **row["points"][0])
        assert row["show"] == example(find_kernel(row["kernel"]), problem, find_arch(arch))
    seen = next(row for row in rows if row["kernel"] == "embed")
    out = kerngen.ok(*shlex.split(seen["show"])[1:], "--no-source", "--json")
    assert json.loads(out)["problem"] == {**seen["static"], **seen["points"][0]}


# -- show


@pytest.mark.parametrize("arch", ["sm70", "sm90"])
def test_a_field_without_a_default_is_asked_for_with_an_example(kerngen: Kerngen, arch: str) -> None:
    code, _, err = kerngen("kernel", "show", "w4a16_gemm", "--arch", arch, "--problem", "n=256")
    assert code == 2
    assert "w4a16_gemm needs k: there is no default" in err
    pasted = re.search(r"for example: kerngen (.*)", err)
    out = kerngen.ok(*shlex.split(pasted[1]), "--no-source")
    assert f"on {arch}" in out
    code, _, err = kerngen("kernel", "show", "w4a16_gemm", "--arch", arch, "--problem", "m=256")
    assert (code, "unknown problem field 'm'" in err) == (2, True), "an unknown field is the clearer complaint"


def test_default_and_tuned_are_told_apart(kerngen: Kerngen) -> None:
    """The shipped database has the 31B's winners on sm90."""
    show = ("kernel", "show", "dense_gemv", "--arch", "sm90", "--problem", "n=262144,k=5376", "--no-source")
    _, out, _ = kerngen(*show)
    assert re.search(r"^  configuration \[.*\]: the default$", out, re.M)
    tuned = re.search(r"^  tuned: --config (\S+)\n    prebuilt .*: [\d.]+ us measured for H200$", out, re.M)
    _, out, _ = kerngen(*show, "--config", tuned[1])
    assert re.search(r"^  configuration \[.*\]: the tuned one$", out, re.M)
    assert "  the default is [" in out
    found = json.loads(kerngen(*show, "--config", tuned[1], "--json")[1])
    assert found["tuned"]["config"] == found["config"] != found["default"]
    _, out, _ = kerngen("kernel", "show", "rmsnorm", "--arch", "sm70", "--problem", "hidden=64", "--no-source")
    assert "]: the default\n  nothing tuned serves this problem here" in out


def test_ptx(kerngen: Kerngen) -> None:
    out = kerngen.ok("kernel", "show", "embed", "--arch", "sm80", "--no-source", "--ptx")
    assert ".target sm_80" in out
    assert ".entry embed(" in out


def test_sass_needs_a_disassembler(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    show = ("kernel", "show", "embed", "--arch", "sm80", "--no-source", "--sass")
    monkeypatch.setattr("kerngen.compiler.disassemble.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", f"{kerngen.folder / 'bin'}:/usr/bin:/bin")
    code, out, err = kerngen(*show)
    assert (code, out) == (1, "")
    assert "pip install nvidia-cuda-nvdisasm" in err

    tool = kerngen.folder / "bin" / "nvdisasm"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "too old" >&2; exit 1\n')
    tool.chmod(0o755)
    code, _, err = kerngen(*show)
    assert (code, f"no nvdisasm here reads sm80 code: {tool}: too old" in err) == (1, True)

    tool.write_text('#!/bin/sh\necho "IMAD of $(head -c 4 "$2" | tail -c 3)"\n')
    out = kerngen.ok(*show)
    assert out.startswith("IMAD of ELF"), "it is given the cubin"


def test_sass_of_a_real_disassembler(kerngen: Kerngen) -> None:
    from kerngen.compiler.disassemble import find_tools

    if not find_tools():
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    out = kerngen.ok("kernel", "show", "embed", "--arch", "sm80", "--no-source", "--sass")
    assert "EXIT" in out
    assert ".text.embed" in out


# -- new


def test_a_new_kernel_works_where_it_lies(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    out = kerngen.ok("kernel", "new", "first")
    assert f"export KERNGEN_TEMPLATES={kerngen.folder / 'kernels'}" in out
    assert "new_kernel" not in "".join(p.read_text() for p in (kerngen.folder / "kernels" / "first").iterdir())
    assert kerngen("--templates", "kernels", "kernel", "new", "second")[0] == 0
    out = kerngen.ok("--templates", "kernels", "compile", "--arch", "sm70,sm90", "--kernel", "first,second",
                           "--cases", "--jobs", "1", "--json")  # fmt: skip
    assert {f["kernel"] for f in json.loads(out)["builds"]} == {"first", "second"}
    assert TEMPLATES_VARIABLE not in os.environ, "the option ends with its command"


@pytest.mark.parametrize(
    "name", ["rmsnorm", "kernel", "common", "Upper", "my-kernel", "../up", "2nd", "class", "float", ""]
)
def test_a_name_that_cannot_be_is_refused(kerngen: Kerngen, name: str) -> None:
    code, out, err = kerngen("kernel", "new", name)
    assert (code, out) == (2, "")
    assert err.startswith("UsageError: ")
    assert kerngen.files() == []


def test_what_is_there_is_left_alone(kerngen: Kerngen) -> None:
    (kerngen.folder / "kernels" / "first").mkdir(parents=True)
    code, _, err = kerngen("kernel", "new", "first")
    assert (code, "kernels/first is there already" in err) == (2, True)
    assert kerngen.files() == []
    shutil.rmtree(kerngen.folder / "kernels")
    assert kerngen("kernel", "new", "first")[0] == 0
