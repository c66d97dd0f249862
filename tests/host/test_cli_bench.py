"""`kerngen bench`: what comes first, which GPU it takes, how it ends where a case fails. The GPUs are pretended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import ROOT, Kerngen

from kerngen.arch import Target, find_device
from kerngen.errors import DeviceError, UsageError
from kerngen.report.bench.runs import read_run
from kerngen.runtime import backend, launcher
from kerngen.timing.measure import Ceilings
from kerngen.timing.step_compare import Compared
from kerngen.tuning_db import Store
from kerngen.workload.steps import ALL_STEPS, STEPS, Ratio, Step

TINY, ASSISTANT = (str(ROOT / "examples" / "tiny" / f"gemma-4-tiny-{name}") for name in ("w4a16", "assistant"))
ROW = {
    "p50_us": 2.0, "p10_us": 1.9, "p90_us": 2.1, "gbps": 1.0, "share_read": 0.1, "tflops": 0.1, "share_matmul": 0.1,
}  # fmt: skip


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two H200s. What torch was told to take, in order."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: taken.append(torch.device(d).index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[-1] if taken else 0)
    monkeypatch.setattr(launcher, "_probed", lambda index: find_device("H200" if index == 0 else "H100"))
    return taken


def test_a_device_that_is_named_becomes_the_current_one(current: list[int]) -> None:
    assert backend.use_gpu(None) == 0
    assert launcher.probe_device().name == "H200"
    assert backend.use_gpu("cuda:1") == 1
    assert current == [0, 1]
    assert launcher.probe_device().name == "H100", "what asks for the GPU at hand gets that one"
    assert launcher.probe_device(0).name == "H200"
    with pytest.raises(DeviceError, match=r"cuda:2.*has 2"):
        backend.use_gpu("cuda:2")
    with pytest.raises(UsageError, match="--device cpu is no GPU"):
        backend.use_gpu("cpu")


@pytest.mark.parametrize("name", ["torch", "cuda"])
def test_a_backend_runs_on_the_device_that_is_named(
    current: list[int], name: str, kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = backend.open_backend(name, device="cuda:1")
    assert ops.device == torch.device("cuda", 1)
    assert current == [1]
    if name == "cuda":
        assert ops.executor.launcher.target.device.name == "H100"  # type: ignore[attr-defined]


def _pretend(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> None:
    limit = Ceilings(4500.0, 4100.0, 780.0, {"gpu": "H200", "driver": "580", "torch": "2"})
    monkeypatch.setattr("kerngen.timing.measure.ceilings", lambda: limit)
    monkeypatch.setattr("kerngen.timing.measure.bench_row", lambda *_: rows.pop(0))
    target = SimpleNamespace(target=Target.of(find_device("H200")), build=lambda asked, jobs, say: list(asked))
    monkeypatch.setattr(launcher, "Launcher", lambda *_, **__: target)


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("how", [(), ("--json",)])
def test_a_case_that_fails_fails_the_command(
    kerngen: Kerngen, current: list[int], monkeypatch: pytest.MonkeyPatch, fails: bool, how: tuple[str, ...]
) -> None:
    good = {"kernel": "moe_route", "case": "a", **ROW}
    bad = {"kernel": "moe_route", "case": "b", "error": "it was refused"}
    from kerngen.templates import find_kernel

    count = len(find_kernel("moe_route").bench.BENCH_CASES)
    _pretend(monkeypatch, [bad if fails and i == 1 else good for i in range(count)])
    code, out, err = kerngen("bench", "kernel", "moe_route", "--device", "cuda:1", *how, "--report", "k.html")
    assert code == (1 if fails else 0)
    assert (f"1 of {count} cases failed" in err) == fails
    assert len(read_run(kerngen.folder / "k.html", "kernel")["rows"]) == count
    assert ("it was refused" in out) == fails
    assert current == [1]


def test_the_times_of_a_model_come_last(kerngen: Kerngen) -> None:
    args = ("bench", "model", TINY, "--backend", "torch", "--context", "8", "--tokens", "2", "--report", "m.html")
    out = kerngen.ok(*args)
    head, row = out.splitlines()[-2:]
    assert head.split() == ["context", "batch", "prefill", "ms", "step", "ms", "least-most"], "a CPU has no floor"
    assert row.split()[:2] == ["8", "1"]
    assert "computed by PyTorch, as on any machine" in out
    report = json.loads(kerngen(*args, "--json", "--against", "m.html")[1])
    assert read_run(kerngen.folder / "m.html", "model") == report
    assert list(report["outside"]) == ["everything"]
    assert report["configurations"] == {}


@pytest.mark.parametrize("draft", [(), ("--draft", ASSISTANT)], ids=["alone", "drafts"])
def test_sequences_that_decode_together_are_timed(kerngen: Kerngen, draft: tuple[str, ...]) -> None:
    args = ("bench", "model", TINY, "--backend", "torch", "--context", "9", "--tokens", "3", "--prefill-chunk", "8")
    out = kerngen.ok(*args, "--batch", "3", *draft)
    assert out.splitlines()[-1].split()[:2] == ["9", "3"]
    assert ("tokens/s" in out) == bool(draft)
    (one,) = json.loads(kerngen(*args, *draft, "--json")[1])["rows"]
    (three,) = json.loads(kerngen(*args, "--batch", "3", *draft, "--json")[1])["rows"]
    assert (one["batch"], three["batch"]) == (1, 3)
    assert one["step_bytes"] < three["step_bytes"] < 3 * one["step_bytes"]
    assert 1 <= three["acceptance_length"] <= (4 if draft else 1)
    assert 0 < three["step_ms_min"] <= three["step_ms"] <= three["step_ms_max"]


@pytest.mark.parametrize(("args", "message"), [
    ((TINY, "--draft"), "no drafter goes with"),
    (("gemma-4-31b", "--draft", "medusa"), "has no drafter called medusa\n  --draft assistant or dflash"),
    ((TINY, "--assume-acceptance", "0.5"), "--assume-acceptance 0.5 goes with --draft"),
    ((TINY, "--num-draft-tokens", "2"), "--num-draft-tokens 2 goes with --draft"),
    ((TINY, "--draft", ASSISTANT, "--assume-acceptance", "0.5", "--tensor-parallel", "2"), "is for one GPU"),
])  # fmt: skip
def test_what_does_not_go_with_a_models_drafts_is_said(kerngen: Kerngen, args: tuple[str, ...], message: str) -> None:
    code, _, err = kerngen("bench", "model", *args)
    assert code == 2
    assert message in err


def test_configurations_are_listed_where_they_are_asked_for(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "context": 8, "prefill_ms": 1.0, "step_ms": 1.0, "step_ms_min": 1.0, "step_ms_max": 1.0, "runs": 5,
        "floor_ms": 0.0, "acceptance_length": 1.0, "batch": 1, "density": {5: 0.25, 11: 0.5},
    }  # fmt: skip
    report = {
        "model": "m", "device": "H200", "backend": "cuda", "dtype": "bf16", "weight_gb": 1.0, "build_s": 1.0,
        "read_gbps": 4500.0, "rows": [row], "configurations": {"user: exact device (measured)": 2}, "outside": {},
        "kernels": ["embed[hidden=8] [threads=64] from user", "rmsnorm[hidden=8] [threads=64] from user"],
        "draft_weights": "int4", "tensor_parallel": 1,
    }  # fmt: skip
    monkeypatch.setattr("kerngen.timing.model_bench.time_model", lambda *_, **__: report)
    of_ranks = kerngen("bench", "model", "gemma-4-31b", "--draft")[1]  # whose parts are not timed apart
    assert of_ranks.splitlines()[-1].split() == ["8", "1", "1.0", "1.000", "1.00", "1000.0"]
    brief = kerngen("bench", "model", "gemma-4-31b")[1]
    assert brief.splitlines()[-1].split() == ["8", "1", "1.0", "1.000", "1.000-1.000"]
    assert "generated weights, the drafter's in int4, 1.00 GB" in brief
    assert "configurations: 2 user: exact device (measured)" in brief
    assert "threads=64" not in brief
    assert "layer 5" not in brief
    assert "--verbose lists the 2 configurations that ran" in brief
    more = kerngen("bench", "model", "gemma-4-31b", "-v")[1]
    assert all(f"  {line}\n" in more for line in report["kernels"])
    read = "context 8: prompts read 37.5% of the tiles of keys in full-attention layers (layer 5 25.0%, layer 11 50.0%)"
    assert read in " ".join(more.split())
    assert more.splitlines()[-2:] == brief.splitlines()[-2:]


def test_a_problem_that_is_written_out_is_timed_in_place_of_the_cases(
    kerngen: Kerngen, current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    _pretend(monkeypatch, [])
    monkeypatch.setattr(
        "kerngen.timing.measure.bench_row",
        lambda _, kernel, case: asked.append(case) or {"kernel": kernel.name, "case": case.name, **ROW},
    )
    texts = ("n=8192,k=2816,num_tokens=48", "n=96,k=64,num_tokens=3,gated=true")
    out = kerngen.ok("bench", "kernel", "w4a16_gemm", "--problem", texts[0], "--problem", texts[1])
    assert [c.name for c in asked] == list(texts)
    assert [(c.problem.n, c.problem.num_tokens, c.problem.gated) for c in asked] == [(8192, 48, False), (96, 3, True)]
    assert all(text in out for text in texts)
    for args, says in (
        (("embed", "rmsnorm", "--problem", "num_tokens=1"), "--problem is of one kernel"),
        (("w4a16_gemm", "--problem", "tokens=1"), "unknown problem field 'tokens'"),
    ):
        code, _, err = kerngen("bench", "kernel", *args)
        assert (code, says in err) == (2, True), err


def test_baselines_are_summed_up(kerngen: Kerngen, current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    given = ((3.0, 9.0), (1.8, "RuntimeError: group 32"), (4.0, 2.0))
    rows = [
        {"kernel": "w4a16_gemm", "case": f"c{i}", **ROW, "baseline_marlin_us": marlin, "baseline_machete_us": machete}
        for i, (marlin, machete) in enumerate(given)
    ]
    _pretend(monkeypatch, rows)
    problems = [x for n in (1, 2, 3) for x in ("--problem", f"n=96,k=64,num_tokens={n}")]
    out = kerngen.ok("bench", "kernel", "w4a16_gemm", *problems)
    assert "marlin over ours: 0.90 at least (w4a16_gemm c1), 1.50 in the median of 3" in out
    assert "machete over ours: 1.00 at least (w4a16_gemm c2), 2.75 in the median of 2" in out


def test_defaults_are_nobodys_choice(kerngen: Kerngen) -> None:
    code, _, err = kerngen("bench", "kernel", "embed", "--untuned", "--db", "x.db")
    assert code == 2
    assert "--untuned times the defaults" in err


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """What was compared: how many databases each contender has, by its name. A step of 5 ms, then one of 1 ms."""
    seen: list[dict[str, int]] = []

    def side_by_side(
        model: Any, contenders: dict[str, list[Any]], *, pairs: int, seed: int, steps: Any
    ) -> Iterator[Compared]:
        seen.append({name: len(sources) for name, sources in contenders.items()})
        assert steps == STEPS
        others = list(contenders)[1:]
        for s, weight, us, gain in ((Step.decode(1, 512), 1.0, 5000.0, 0.9), (Step.draft(1, 512), 0.25, 1000.0, 1.0)):
            ratios = {name: Ratio(gain, 0.001, us) for name in others}
            yield Compared(s, weight, us, ratios, dict.fromkeys(contenders, 3), 4)

    limit = Ceilings(4500.0, 4100.0, 780.0, {"gpu": "H200", "driver": "580", "torch": "2"})
    monkeypatch.setattr("kerngen.timing.measure.ceilings", lambda: limit)
    monkeypatch.setattr("kerngen.timing.step_compare.side_by_side", side_by_side)
    return seen


def test_all_steps_are_compared_where_they_are_asked_for(
    kerngen: Kerngen, current: list[int], compared: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "kerngen.timing.step_compare.side_by_side", lambda *_, steps, **__: iter(asked.append(steps) or ())
    )
    kerngen.ok("bench", "step", "gemma-4-31b", "--all-steps")
    assert asked == [ALL_STEPS]
    assert {step.name for step, _ in ALL_STEPS} >= {"decode, batch 128, context 512", "prefill 64 tokens of 64"}


def test_databases_are_compared_with_the_first_and_one_with_the_defaults(
    kerngen: Kerngen, current: list[int], compared: list[dict[str, int]], tmp_path: Path
) -> None:
    a, b = (str(tmp_path / name) for name in ("a.sqlite", "b.sqlite"))
    for path in (a, b):
        Store.open(path).close()
    out = kerngen.ok("bench", "step", "gemma-4-31b", "--db", a, "--db", b)
    assert f"decode, batch 1, context 512: 5.000 ms with {a}" in out
    assert f"0.9000 of that (+-0.0010) with {b}, which tuned 3 of its 4 problems" in out
    assert f"all steps, by their weight: {0.9**0.8:.4f} with {b}" in out
    drawn = ("--report", str(tmp_path / "step.html"))
    _, told, err = kerngen("bench", "step", "gemma-4-31b", "--db", a, "--json", *drawn)
    assert "step.html: 1 figure," in err
    said = json.loads(told)
    assert read_run(tmp_path / "step.html", "step") == said
    assert kerngen("bench", "step", "gemma-4-31b", "--db", a, *drawn, "--against", drawn[1])[0] == 0
    assert "The run of " in (tmp_path / "step.html").read_text()
    assert said["contenders"] == ["untuned", a]
    assert said["means"] == {a: pytest.approx(0.9**0.8)}
    assert said["steps"][0]["name"] == "decode, batch 1, context 512"
    kerngen("bench", "step", "gemma-4-31b", "--db", a, "--db", b, "--untuned")
    assert [list(c) for c in compared] == [[a, b], ["untuned", a], ["untuned", a], ["untuned", a, b]]
    assert compared[1]["untuned"] == 0, "no database is asked"
    assert compared[1][a] == 1
