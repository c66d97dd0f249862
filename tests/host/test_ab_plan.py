"""The files of `kerngen bench ab`: what they may say, and which candidates follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import ROOT

from kerngen.arch import Target, find_arch, find_device
from kerngen.compiler.render import render
from kerngen.errors import KerngenError, UsageError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel
from kerngen.tuning import ab
from kerngen.tuning.ab_plan import AGAIN, Candidate, Entry, Written, drawn, patched, read_plan
from kerngen.tuning.plan import rank
from kerngen.workload.steps import Step
from kerngen.workload.workload import find_model

H200, V100 = Target.of(find_device("H200")), Target.of(find_arch("sm70"))
RECORDED = ROOT / "data" / "ab" / "h200" / "recorded.toml"
NORM = find_kernel("add_norm")
FILE = r"""
about = "norms"
device = "H200"
measured = {read_gbps = 4580}

[step]
model = "gemma-4-31b"
phase = "verify"
tokens = 4

[[entry]]
kernel = "add_norm"
problem = "hidden=5376,num_tokens=4"
note = "two launches a layer"
configs = ["rows_per_block=2", {config = "vecs_per_thread=1", note = "before", smem_kb = 1, expected_us = [3, 4.5]}]
[[entry.patch]]
name = "late"
wrong = true
[[entry.patch.replace]]
this = "    pdl_launch_dependents();\n"
by = ""
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "ab.toml"
    path.write_text(text)
    return path


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    plan = read_plan(_file(tmp_path, FILE))
    assert (plan.about, plan.device) == ("norms", "H200")
    assert plan.step == {"model": "gemma-4-31b", "phase": "verify", "tokens": 4}
    (entry,) = plan.entries
    assert entry.problem == NORM.problem_type(hidden=5376, num_tokens=4)
    assert entry.written == (
        Written("rows_per_block=2"), Written("vecs_per_thread=1"),
        Written("", "late", (("    pdl_launch_dependents();\n", ""),), True),
    )  # fmt: skip


ENTRY = "[[entry]]\nkernel = 'add_norm'\nproblem = 'hidden=5376'\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no 'entry'"), ("entry = []", "has no entries"), ("entry = 1", "entry is 1, no list"),
        ("x = 1\n" + ENTRY, "'x' is not one of: about"),
        ("[[entry]]\nkernel = 'add_norm'", r"entry 1 has no 'problem'"),
        (ENTRY, r"entry 1 \(add_norm\) has nothing to compare"),
        (ENTRY.replace("add_norm", "add_nom") + "random = 1", r"entry 1 \(add_nom\): unknown kernel 'add_nom'"),
        (ENTRY.replace("hidden", "hide") + "random = 1", "unknown problem field 'hide'"),
        (ENTRY + "random = true", "random is True, no int"), (ENTRY + "config = []", "'config' is not one of: kernel"),
        (ENTRY + "configs = [3]", "configs: 3 is no table"),
        (ENTRY + "configs = [{note = 'a'}]", "configs has no 'config'"),
        (ENTRY + "configs = [{config = 'a=1', us = 3}]", "'us' is not one of: config, note"),
        (ENTRY + "[[entry.patch]]\nwrong = true", "patch has no 'name'"),
        (ENTRY + "[[entry.patch]]\nname = 'a'\nwrong = 'no'", "wrong is 'no', no bool"),
        (ENTRY + "[[entry.patch]]\nname = 'a'\n[[entry.patch.replace]]\nthis = 'x'", "patch 'a', replace has no 'by'"),
        (ENTRY + "grid = [{a = 1}]", "grid is a list of fields"),
        (ENTRY + "random = 1\nname = '../x'", "a name is letters"),
        (2 * (ENTRY + "random = 1\nname = 'x'\n"), "add_norm-x is there twice"),
        ("step = {phase = 'decode'}\n" + ENTRY + "random = 1", "step has no 'model'"),
        ("[[entry]", "ab.toml is no TOML"),
    ],
)  # fmt: skip
def test_a_file_that_says_anything_else_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_plan(_file(tmp_path, text))


def test_what_is_replaced_stands_there_once() -> None:
    two = Candidate(None, "v", (("a", "b"), ("bc", "d")))
    assert patched("xacx", two) == "xdx", "one behind the other"
    for text, count in (("xbcx", 0), ("aabc", 2)):
        with pytest.raises(UsageError, match=f"v: the source has {count} times 'a'"):
            patched(text, two)
    with pytest.raises(UsageError, match="4 times ''"):
        patched("abc", Candidate(None, "v", (("", "x"),)))


def test_candidates_stand_beside_the_default(tmp_path: Path) -> None:
    (entry,) = read_plan(_file(tmp_path, FILE)).entries
    found = entry.candidates(H200)
    assert [c.name for c in found] == ["", "", "", "late", AGAIN]
    default, rows, _, late, again = found
    assert default.config == again.config == late.config == NORM.default_config(entry.problem, H200)
    assert rows.config.rows_per_block == 2
    text = render(NORM, entry.problem, default.config, H200)
    assert entry.source(default, H200) == entry.source(again, H200) == text
    assert entry.source(late, H200) == text.replace("    pdl_launch_dependents();\n", "")
    with pytest.raises(KerngenError):
        Entry(NORM, entry.problem, (Written("rows_per_block=1000"),)).candidates(H200)


def test_those_that_the_cost_model_expects_most_of_come_first() -> None:
    kernel = find_kernel("w4a16_gemm")
    problem = kernel.problem_type(n=5376, k=8192, num_tokens=4096)
    _, *found = Entry(kernel, problem, body="wgmma_ws.cu.jinja", most=10).candidates(H200)
    assert len(found) in (9, 10)
    us = [_expected(kernel, problem, c.config) for c in found]
    assert us == sorted(us)
    assert all(c.config.body == "wgmma_ws" for c in found)
    assert found == Entry(kernel, problem, body="wgmma_ws", most=10).candidates(H200)[1:]
    few = kernel.problem_type(n=5376, k=8192)
    assert {c.config.body for c in Entry(kernel, few, body="tma_warp", most=3).candidates(H200)[1:]} == {"tma_warp"}
    for body, says in (("x.cu", "0 bodies"), ("kernel.cu.jinja", "2 bodies")):
        with pytest.raises(UsageError, match=says):
            Entry(kernel, problem, body=body).candidates(H200)
    with pytest.raises(UsageError, match="does not serve sm70"):
        Entry(kernel, kernel.problem_type(n=512, k=256, dtype="fp16"), body="wgmma_ws.cu.jinja").candidates(V100)


def _expected(kernel: Kernel, problem: Any, config: Any) -> float:
    return rank(kernel, problem, H200, [config])[0][0]


def test_draws_are_of_every_body_and_the_same_each_time() -> None:
    places = ab.places_of(find_model("gemma-4-31b"), Step.verify(1, 4, 512), H200)
    moved = [p.launches * p.entry.kernel.cost(p.entry.problem).bytes for p in places]
    assert moved == sorted(moved, reverse=True)
    kernel, problem = places[0].entry.kernel, places[0].entry.problem
    assert kernel.name == "w4a16_gemm"
    found = drawn(kernel, problem, H200, 20, seed=0)
    assert found == drawn(kernel, problem, H200, 20, seed=0) != drawn(kernel, problem, H200, 20, seed=1)
    assert len(found) == len(set(found)) == 20
    assert kernel.default_config(problem, H200) not in found
    assert {(c.body == "gemv", c.stream) for c in found} == {(True, False), (False, True), (False, False)}
    for config in found:
        kernel.require_valid(problem, config, H200)


# -- grids and samples


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"grid": ({"threads": (33,)},)}, r"scale-x: threads is never \[33\] there; it is one of"),
        ({"grid": ({"thread": (32,)},)}, r"scale-x: the body with {} has no thread"),
        ({"grid": ({"threads": (2048,)},)}, r"scale-x: none of the grid's 9 points is valid"),
    ],
)
def test_what_a_grid_gets_wrong_is_said_of_its_problem(scale: Kernel, entry: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Entry(scale, scale.problem_type(), name="x", **entry).gridded(V100)


def test_the_h200_has_whole_grids_of_four_kernels() -> None:
    entries = read_plan(RECORDED).entries
    whole = [e for e in entries if not e.sample]
    samples = [e for e in entries if e.sample]
    assert entries == (*whole, *samples), "a cut costs the fit set first"
    assert len(whole) >= 13
    assert {e.kernel.name for e in whole} == {"attn_decode", "w4a16_gemm", "dense_gemv", "greedy_head"}
    sizes = {f"{e.kernel.name}-{e.name}": len(e.candidates(H200)) for e in whole}
    assert min(sizes.values()) >= 300, sizes
    assert sum(sizes.values()) < 10_000, "more than one session of a GPU records"
    assert len(samples) >= 30
    for wanted in whole, samples:
        assert 0.15 < sum(e.held_out for e in wanted) / len(wanted) < 0.4
    assert {e.problem.num_tokens for e in samples if e.kernel.name == "w4a16_gemm"} >= {128, 256, 512, 1024, 2048, 4096}
    assert {"attn_prefill", "moe_w4a16"} <= {e.kernel.name for e in samples}


def test_a_sample_spreads_over_bodies_values_and_predicted_times() -> None:
    entry = next(e for e in read_plan(RECORDED).entries if e.sample and getattr(e.problem, "num_tokens", 0) == 2048)
    found = entry.gridded(H200)
    assert found == entry.gridded(H200), "the same every time"
    assert len(found.configs) == entry.sample
    assert {c.body == "wgmma" for c in found.configs} == {False, True}
    for name in ("block_m", "block_k", "num_stages", "blocks_per_sm"):
        assert len({getattr(c, name) for c in found.configs}) >= 3, name
