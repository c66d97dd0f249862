"""A model divided among two GPUs of this host: one GPU's tokens, with no NCCL where they reach each other's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kerngen.runtime.config import read_model_config
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.session import Session, load

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "gemma-4-tiny-w4a16"
PROMPTS = ["Once upon a time", "The cat", "Why is the sky blue?"]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def divided() -> Iterator[Session]:
    session = load(TINY, num_draft_tokens=3, max_len=256, tensor_parallel=2)
    yield session
    assert session.ranks is not None
    session.ranks.close()


@needs_two
def test_two_gpus_make_one_gpus_tokens(divided: Session) -> None:
    """Greedy and sampled, with drafts. Sums over ranks are rounded otherwise than one GPU's: the first tokens count."""
    alone = load(TINY, num_draft_tokens=3, max_len=256)
    for temperature in (0.0, 0.8):
        want, made = (
            s.generate_many(PROMPTS, chat=False, max_new_tokens=24, temperature=temperature) for s in (alone, divided)
        )
        for one, two in zip(want, made, strict=True):
            assert two.tokens[:8] == one.tokens[:8], (one.text, two.text)


@needs_two
def test_few_tokens_are_summed_in_one_launch(divided: Session) -> None:
    ops = divided.ops
    assert isinstance(ops, KernelOps)
    assert ops.executor.peers, "these GPUs do not reach each other's memory: NCCL has served"
    divided.generate(PROMPTS[0], chat=False, max_new_tokens=4)
    launched = {name for name, _, _ in ops.executor.launcher.functions}  # type: ignore[attr-defined]
    assert {"exchange_norm", "exchange_best"} <= launched
    assert "the chosen token's logit" not in ops.outside()


@needs_two
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_killed_rank_ends_what_waits_on_the_device(temperature: float) -> None:
    """In a process of its own, which has one group of ranks. Sampled steps have NCCL's kernels in their graphs: where
    NCCL keeps the thread from coming back the process says the same as it ends.
    """
    script = (
        "import os, signal, sys, threading\n"
        "from kerngen.runtime.session import load\n"
        "from kerngen.errors import RankFailed\n"
        "if __name__ == '__main__':\n"
        "    s = load(sys.argv[1], draft=False, max_len=1024, tensor_parallel=2)\n"
        "    s.generate('Once', chat=False, max_new_tokens=4)\n"
        "    threading.Timer(0.3, os.kill, (s.ranks._ranks[0].pid, signal.SIGKILL)).start()\n"
        "    try:\n"
        "        while True:\n"
        "            s.generate('Once', chat=False, max_new_tokens=900, temperature=float(sys.argv[2]))\n"
        "    except RankFailed as e:\n"
        "        print(e.message)\n"
    )
    command = [sys.executable, "-c", script, str(TINY), str(temperature)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "was killed by SIGKILL" in done.stdout + done.stderr, done.stderr[-2000:]
    assert done.returncode == (0 if done.stdout else 1), done.stderr[-2000:]


@needs_two
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_process_ends_with_the_exit_code_that_it_has(is_closed: bool) -> None:
    """Also with graphs that have NCCL's kernels: those of sampled steps, whose logits are gathered."""
    script = (
        "import sys\n"
        "from kerngen.runtime.session import load\n"
        "if __name__ == '__main__':\n"
        "    s = load(sys.argv[1], draft=False, max_len=256, tensor_parallel=2)\n"
        "    s.generate('Once', chat=False, max_new_tokens=20, temperature=0.8)\n"
        "    if sys.argv[2] == 'True':\n"
        "        s.ranks.close()\n"
        "    sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(TINY), str(is_closed)], capture_output=True, text=True,
                          timeout=120)  # fmt: skip
    assert (done.returncode, done.stderr) == (3, "")


@needs_two
def test_a_soak_of_a_divided_model_finds_nothing() -> None:
    """In a process of its own, which has one group of ranks: graphs of both phases, with drafts that rank 0 knows."""
    command = [sys.executable, "-m", "kerngen", "soak", str(TINY), "--tensor-parallel", "2", "--minutes", "0.5",
               "--check-minutes", "0.2", "--max-batch", "8", "--max-prompt", "300", "--max-new-tokens", "40",
               "--num-draft-tokens", "3", "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["tensor_parallel"] == 2
    assert sum(report["phases"][1]["accepted"]) > 0
    assert all(check["equal"] > 0 for check in report["checks"])


@needs_two
@pytest.mark.parametrize(
    ("batch", "summing", "launches"),
    [(1, "decode_layers", 1), (16, "exchange_norm", 2 * len(read_model_config(TINY).layers))],
)
def test_a_profile_has_rank_0s_launches(batch: int, summing: str, launches: int) -> None:
    """In a process of its own: one token goes through all layers in one launch, more have two sums over the ranks a
    layer; the choice is one launch, and nothing is NCCL's.
    """
    command = [sys.executable, "-m", "kerngen", "bench", "profile", str(TINY), "--tensor-parallel", "2",
               "--batch", str(batch), "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["kernel"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows[summing]["launches"] == launches
    assert rows[summing]["bytes"] > 0
    assert rows["exchange_best"]["launches"] == 1
    assert not [name for name in rows if "nccl" in name.lower()]
