"""`kerngen tune` as a user meets it: in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from kerngen.arch import find_arch
from kerngen.tuning.checks import why_not_cubin
from kerngen.tuning_db import Store

TUNE = ("tune", "--arch", "sm70", "--model", "gemma-4-31b")


def _environment(folder: Path) -> dict[str, str]:
    root = Path(__file__).parents[2]
    own = {"KERNGEN_CACHE_DIR": str(folder / "cache"), "KERNGEN_DB": str(folder / "tuning.db"), "HOME": str(folder)}
    return {**os.environ, **own, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def _kerngen(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kerngen", *args], env=_environment(folder), capture_output=True,
                          text=True, timeout=300, check=False)  # fmt: skip


def _json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_tunes_repeats_and_says_what_it_did(tmp_path: Path) -> None:
    first = _json(_kerngen(tmp_path, *TUNE, "--kernel", "embed", "--jobs", "2", "--json"))
    assert first["objective"] == "predicted"
    assert {r["provenance"] for r in first["results"]} == {"predicted"}
    assert all(r["spill_bytes"] == 0 and r["smem_bytes"] <= 96 * 1024 for r in first["results"])
    assert first["num_compiled"] > 0
    again = _kerngen(tmp_path, *TUNE, "--kernel", "embed")
    assert again.returncode == 0
    assert "predicted by" in again.stdout
    assert "not measured" in again.stdout
    assert "0 compiles" in again.stdout
    assert str(tmp_path / "tuning.db") in again.stdout
    (row,) = [line for line in again.stdout.splitlines() if line.startswith("embed  ")]
    (usual,) = [r for r in first["results"] if r["problem"]["num_tokens"] == 1]
    assert row.split()[-5:-3] == [f"{usual['latency_us']:.1f}", f"{usual['default_us'] / usual['latency_us']:.2f}x"]
    assert row.split()[-2] == str(len(first["results"]))
    assert "embed in a decode step, batch 1, context 512: 2.6 us" in again.stdout, "and not 0.00 ms"
    assert all(len(line) <= 160 for line in again.stdout.splitlines())
    second = _json(_kerngen(tmp_path, *TUNE, "--kernel", "embed", "--json"))
    assert [r["config"] for r in second["results"]] == [r["config"] for r in first["results"]]


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    plan = _json(_kerngen(tmp_path, *TUNE, "--kernel", "embed,rmsnorm", "--dry-run", "--json"))
    assert {k["kernel"] for k in plan["kernels"]} == {"embed", "rmsnorm"}
    assert all(k["num_compiles"] > 0 for k in plan["kernels"])
    shown = _kerngen(tmp_path, *TUNE, "--kernel", "embed", "--dry-run")
    assert "nothing is written" in shown.stdout
    assert not (tmp_path / "tuning.db").exists()


def test_killed_it_leaves_no_process_and_continues(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kerngen", *TUNE, "--kernel", "attn_decode", "--jobs", "2"]
    started = subprocess.Popen(
        command, env=_environment(tmp_path), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        children = psutil.Process(started.pid).children(recursive=True)
        if list((tmp_path / "cache").glob("v1/*/*.cubin")) and len(children) >= 2:
            break
        time.sleep(0.1)
    assert len(children) >= 2, "no compiler process was seen"
    started.send_signal(signal.SIGKILL)
    started.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, f"orphans: {alive}"
    kept = len(list((tmp_path / "cache").glob("v1/*/*.cubin")))
    assert kept > 0
    done = _json(_kerngen(tmp_path, *TUNE, "--kernel", "attn_decode", "--trials", "1", "--json"))
    assert all(r["winner" if "winner" in r else "config"] for r in done["results"])
    with Store.open(tmp_path / "tuning.db", read_only=True) as store:
        assert len(store.winners("attn_decode")) == len(done["results"])


def _heed_ctrl_c() -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_stopped_by_ctrl_c_it_keeps_what_it_has(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kerngen", *TUNE, "--kernel", "w4a16_gemm", "--jobs", "1"]
    started = subprocess.Popen(
        command, env=_environment(tmp_path), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        preexec_fn=_heed_ctrl_c,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(list((tmp_path / "cache").glob("v1/*/*.cubin"))) < 3:
        time.sleep(0.1)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "stopped" in err
    assert "what was tried is kept, and the same command continues it" in out
    assert "time ran out" not in out
    assert "Traceback" not in err
    with Store.open(tmp_path / "tuning.db", read_only=True) as store:
        assert store.measurements("w4a16_gemm")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--arch", "sm71", "--model", "gemma-4-31b"), 2, "unknown arch 'sm71'"),
        (("--arch", "sm70", "--model", "gemma-4-32b"), 2, "unknown model 'gemma-4-32b'"),
        (("--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "embd"), 2, "unknown kernel 'embd'"),
        (("--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "moe_route"), 2, "needs no moe_route"),
        (("--arch", "sm70", "--model", "gemma-4-31b", "--device", "V200"), 2, "unknown device 'V200'"),
        (("--arch", "sm70", "--model", "gemma-4-31b", "--device", "H200"), 2, "device H200 is sm90, not sm70"),
        (("--arch", "sm70", "--model", "gemma-4-31b", "--time-budget", "soon"), 2, "'soon' is no duration"),
        (("--arch", "sm70",), 2, "--model"),
        (("--arch", "sm70", "--model", "gemma-4-31b", "--db", "/proc/no/tuning.db"), 1, "/proc/no"),
    ],
)  # fmt: skip
def test_bad_requests_are_one_clear_message(tmp_path: Path, args: tuple[str, ...], code: int, message: str) -> None:
    done = _kerngen(tmp_path, "tune", *args)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_measuring_needs_the_gpu(tmp_path: Path) -> None:
    from kerngen.tuning.worker import present_arch

    if (here := present_arch()) is not None and here.name == "sm70":
        pytest.skip("this machine has an sm70 GPU")
    done = _kerngen(tmp_path, *TUNE, "--objective", "measured")
    assert done.returncode == 1
    assert "--objective predicted" in done.stderr


def test_every_problem_of_the_31b_gets_a_v100_cubin(tmp_path: Path) -> None:
    """The default of each; how deep a search goes is test_tune.py's subject."""
    done = _json(_kerngen(tmp_path, *TUNE, "--objective", "predicted", "--trials", "1", "--json"))
    assert done["missing"] == ["dense matrices"], "which torch multiplies, by choice"
    assert len(done["results"]) > 400
    for row in done["results"]:
        what = f"{row['kernel']} {row['problem']}"
        assert row["config"] is not None, f"{what}: {row['note']}"
        assert row["provenance"] == "predicted"
        assert row["smem_bytes"] <= 96 * 1024, what
        assert row["spill_bytes"] == 0 or "spills" in row["note"], what
    with Store.open(tmp_path / "tuning.db", read_only=True) as store:
        winners = store.winners(arch="sm70")
        assert len(winners) == len(done["results"])
        for build_id in {w.build_id for w in winners}:
            image = store.image(store.build(build_id))
            assert image is not None
            assert why_not_cubin(image.image, find_arch("sm70")) is None
