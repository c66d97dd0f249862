"""`--tensor-parallel`: the answer of one rank, what a rank takes, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Kerngen
from served import served
from test_tensor_parallel_ends import assert_gone

from kerngen.arch import find_arch
from kerngen.workload.workload import find_model, joined, workload

TINY = ROOT / "examples" / "tiny" / "gemma-4-tiny-w4a16"
RUN = ("run", str(TINY), "--backend", "torch", "--device", "cpu", "--temperature", "0", "-n", "12")
DIVIDED = ("--tensor-parallel", "2")


def test_run_answers_as_one_rank_does(kerngen: Kerngen, tmp_path: Path) -> None:
    """One prompt, and a file of them, with the drafter that lies beside the model."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"prompt": text, "seed": 3, "temperature": t}) + "\n"
                             for text, t in (("Once", 0), ("A cat", 0.9), ("Why?", 0))))  # fmt: skip
    alone = json.loads(kerngen.ok(*RUN, "--prompt", "Once upon a time", "--json"))
    code, out, err = kerngen(*RUN, *DIVIDED, "--prompt", "Once upon a time", "--json")
    assert (code, err) == (0, "")
    divided = json.loads(out)
    assert divided["tokens"] == alone["tokens"]
    assert (alone["tensor_parallel"], divided["tensor_parallel"]) == (1, 2)
    each = [json.loads(x)["text"] for x in kerngen.ok(*RUN, "--prompts", str(lines)).splitlines()]
    code, out, err = kerngen(*RUN, *DIVIDED, "--prompts", str(lines))
    assert code == 0, err
    assert [json.loads(x)["text"] for x in out.splitlines()] == each
    assert "torch on cpu, float32, divided among 2 ranks" in err


def children(pid: int) -> list[int]:
    told = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line) for line in told.stdout.split()]


def test_a_server_starts_a_divided_model_again_whose_rank_has_died() -> None:
    """It answers; where nobody asks anything it is seen too that a rank has died; and it answers again."""
    asked = {"model": "gemma-4-tiny-w4a16", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    with served(*DIVIDED, "--device", "cpu") as server:

        def answer() -> Any:
            return server.http.post(f"{server.url}/v1/completions", json=asked)

        def health() -> int:
            return int(server.http.get(f"{server.url}/health").status_code)

        first = answer().json()["choices"][0]["text"]
        engine = server.engine()
        (rank,) = [pid for pid in children(engine) if b"rank_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(rank, signal.SIGKILL)
        until(lambda: health() == 503)
        assert answer().status_code == 503
        assert_gone([engine, rank])
        until(lambda: health() == 200)
        assert answer().json()["choices"][0]["text"] == first
        assert server.engine() != engine
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    assert f"rank 1 (process {rank}) was killed by SIGKILL" in "".join(server.said)


def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_plan_is_of_what_each_gpu_has(kerngen: Kerngen) -> None:
    """Two GPUs of 16 GB hold the 31B, and one does not; of two V100s each reads half of it a step."""
    asked = "run", "gemma-4-31b", "--plan", "--json", "--device", "V100", "--tensor-parallel"
    whole, half = (json.loads(kerngen.ok(*asked, n)) for n in ("1", "2"))
    alone, two = (plan["predicted"]["step_ms"] for plan in (whole, half))
    assert two.keys() == alone.keys() >= {"decode, batch 1, context 512", "prefill 8192 tokens of 8192"}
    assert all(0.45 < two[step] / alone[step] < 1.3 for step in two)
    assert two["decode, batch 1, context 512"] < 0.6 * alone["decode, batch 1, context 512"]
    assert (whole["tensor_parallel"], half["tensor_parallel"]) == (1, 2)
    assert whole["as released"]["longest"]["16"] == 0 < half["as released"]["longest"]["16"]
    assert half["as released"]["token_bytes"] * 2 == whole["as released"]["token_bytes"]
    assert "on each of 2 GPUs: weights" in kerngen.ok("run", "gemma-4-31b", "--plan", *DIVIDED)


def test_doctor_knows_the_problems_of_uneven_ranks(kerngen: Kerngen) -> None:
    ranks = find_model("gemma-4-26b-a4b").ranks(4)
    assert [r.name for r in ranks] == ["gemma-4-26b-a4b-tp4-rank0", "gemma-4-26b-a4b-tp4-rank2"]
    assert [r.name for r in find_model("gemma-4-31b").ranks(2)] == ["gemma-4-31b-tp2"]
    arch = find_arch("sm90")
    loads = [workload(rank, arch) for rank in ranks]
    both = joined(loads)
    assert {(i.kernel, i.problem) for i in both.items} == {(i.kernel, i.problem) for x in loads for i in x.items}
    assert {i.problem.inner for i in both.items if i.kernel == "moe_w4a16"} == {160, 192}
    out = kerngen.ok("doctor", "--model", "gemma-4-26b-a4b", "--tensor-parallel", "4", "--arch", "sm90", "--json")
    about = json.loads(out)["model"]
    assert any("--model gemma-4-26b-a4b --tensor-parallel 4" in command for command in about["commands"])
    assert "the chosen token's logit" not in about["outside"], "exchange_best has it"


def test_tune_is_of_what_ranks_have(kerngen: Kerngen) -> None:
    code, out, err = kerngen("tune", "--arch", "sm90", "--model", "gemma-4-26b-a4b", "--tensor-parallel", "4",
                             "--kernel", "moe_combine", "--objective", "predicted", "--dry-run")  # fmt: skip
    assert code == 0, err
    assert "gemma-4-26b-a4b-tp4-rank0 on" in out
    assert "gemma-4-26b-a4b-tp4-rank2 on" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "gemma-4-e2b", "--plan", "--tensor-parallel", "2"), "kerngen serve --replicas 2"),
        (("run", "gemma-4-31b", "--plan", "--tensor-parallel", "5"), "it can among 2 or 3 or 4 or 8"),
        ((*RUN, "--tensor-parallel", "3", "--prompt", "x"), "cannot be divided among 3 ranks"),
        ((*RUN, *DIVIDED, "--keep-repacked", "--prompt", "x"), "--keep-repacked keeps the weights of a whole model"),
        (("compile", "--cases", "--arch", "sm90", *DIVIDED), "--tensor-parallel and --engine go with --model NAME"),
        (("doctor", *DIVIDED), "go with a --model"),
        ((*RUN, "--tensor-parallel", "0", "--prompt", "x"), "x>=1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_on(kerngen: Kerngen, arguments: tuple[str, ...], says: str) -> None:
    code, _, err = kerngen(*arguments)
    assert code == 2
    assert says in err


def test_bench_model_times_a_divided_model(kerngen: Kerngen) -> None:
    """Of generated weights, with drafts."""
    shapes = str(TINY.with_name("gemma-4-tiny"))
    code, out, err = kerngen("bench", "model", shapes, *DIVIDED, "--backend", "torch", "--context", "16", "--tokens",
                             "4", "--batch", "2", "--json")  # fmt: skip
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["tensor_parallel"] == 2
    assert report["rows"][0]["step_ms"] > 0
