"""Where a step's time is: launches that overlap count by how far they move its end, kernels by all their launches."""

from __future__ import annotations

import json
import pickle
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
from command import Kerngen

from kerngen.arch import find_arch
from kerngen.report.bench.runs import read_run
from kerngen.runtime.executors.collectives import Noted
from kerngen.runtime.world import World
from kerngen.templates import find_kernel
from kerngen.timing.measure import Ceilings
from kerngen.timing.step_profile import IDLE, Profile, Span, _span, moved, rows_of
from kerngen.workload.steps import Step, launch_counts
from kerngen.workload.workload import find_model

ATTENTION = find_kernel("attn_decode").problem_type(head_dim=256, num_q_heads=32, num_kv_heads=16, kv_len=2048)
NORM = find_kernel("add_norm").problem_type()


def test_a_launch_counts_by_how_far_it_moves_the_end() -> None:
    spans = [
        Span("first", 0, 10), Span("inside", 2, 8), Span("longer", 4, 15), Span("later", 17, 20), Span("first", 19, 21),
    ]  # fmt: skip
    found = moved(reversed(spans))
    assert found == {
        "first": (2, 11, 12),
        "inside": (1, 0, 6),
        "longer": (1, 5, 11),
        IDLE: (1, 2, 2),
        "later": (1, 3, 3),
    }
    assert sum(us for _, us, _ in found.values()) == 21, "what passed from the first's begin to the last's end"


def test_the_first_launch_counts_from_its_own_begin() -> None:
    assert moved([Span("only", 1e6, 1e6 + 3)]) == {"only": (1, 3, 3)}
    assert moved([]) == {}


def test_of_torchs_kernels_the_name_stays() -> None:
    when = SimpleNamespace(start=1.0, end=3.0)
    signature = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::Opaque, 4>(int, float*)"
    assert _span(SimpleNamespace(name=signature, time_range=when)) == Span("at::native::CatArrayBatchedCopy", 1, 3)
    assert _span(SimpleNamespace(name="attn_decode", time_range=when)).name == "attn_decode"


def test_a_kernels_entry_points_are_one_row_with_the_bytes_of_all_its_calls() -> None:
    calls = {("attn_decode", ATTENTION): 2, ("add_norm", NORM): 1}
    one = [
        Span("attn_decode", 0, 8), Span("attn_combine", 7, 9), Span("add_norm", 9, 10),
        Span("void at::native::copy", 10, 14),
    ]  # fmt: skip
    two = [Span(s.name, s.start_us + 14, s.end_us + 14) for s in one]
    rows = {r.kernel: r for r in rows_of(one + two, 2, calls, read_gbps=4000.0)}
    assert [*rows] == ["attn_decode", "void at::native::copy", "add_norm"], "the largest first"
    attention, other = rows["attn_decode"], rows["void at::native::copy"]
    assert (attention.launches, attention.moved_us, attention.each_us) == (2, 9, 5)
    assert attention.bytes == 2 * find_kernel("attn_decode").cost(ATTENTION).bytes
    assert attention.flops == 2 * find_kernel("attn_decode").cost(ATTENTION).flops > 0
    assert attention.floor_us == pytest.approx(attention.bytes / 4e6)
    assert (other.launches, other.moved_us, other.bytes, other.floor_us) == (1, 4, 0, 0)


def test_a_profile_is_printed_in_80_columns_and_drawn(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {("attn_decode", ATTENTION): 2, ("add_norm", NORM): 1}
    long = "at::native::vectorized_elementwise_kernel"
    spans = [Span("attn_decode", 0, 8), Span("add_norm", 9, 10), Span(long, 10, 14)]
    rows = rows_of(spans, 1, calls, read_gbps=4000.0)
    limit = Ceilings(4000.0, 4100.0, 780.0, {"gpu": "H200", "driver": "580", "torch": "2"})
    monkeypatch.setattr("kerngen.timing.measure.ceilings", lambda: limit)
    monkeypatch.setattr("kerngen.runtime.backend.use_gpu", lambda _: 0)
    monkeypatch.setattr(
        "kerngen.timing.step_profile.profile_step", lambda _, step, *__, **___: Profile(step, 14.0, 4e3, rows)
    )
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("kerngen.cli.tables.line_width", lambda **_: 80)  # as on a terminal
    out = kerngen.ok("bench", "profile", "gemma-4-31b", "--untuned", "--report", "p.html")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "vectorized_elementwise_kernel " in out
    assert out.splitlines()[-1].split()[:2] == ["all", "14.0"]
    run = read_run(kerngen.folder / "p.html", "profile")
    assert run["matmul_tflops"] == 780.0
    assert [r["kernel"] for r in run["rows"]] == ["attn_decode", long, "(idle)", "add_norm"]


def test_a_ranks_sums_are_launches_with_bytes() -> None:
    model = find_model("gemma-4-31b").divided(World(0, 2))
    calls = launch_counts(model, Step.decode(32, 512), find_arch("sm90"))
    names = {name for name, _ in calls}
    assert "exchange_norm" in names
    assert not names & {"w4a16_norm", "decode_layers"}, "of few tokens these sum over the ranks"
    times = 2 * len(model.target.layers)
    spans = [Span("exchange_norm", 4 * i, 4 * i + 4) for i in range(times)]
    (row,) = rows_of(spans, 1, calls, read_gbps=4000.0)
    assert (row.launches, row.moved_us) == (times, 4 * times)
    assert row.bytes == sum(count * find_kernel(n).cost(p).bytes for (n, p), count in calls.items() if n == row.kernel)
    assert row.floor_us > 0


def test_every_rank_profiles_its_own_part(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent to the ranks is a value that another process can read, and says the part by the rank it gets to."""
    parts: list[Any] = []

    def profiled(model: Any, step: Step, sources: Any, *, seed: int, collectives: Any) -> Profile:
        parts.append((model, sources, seed, collectives.world))
        return Profile(step, 14.0, 4e3, rows_of([Span("exchange_norm", 0, 14)], 1, {}, 4e3))

    def open_divided(size: int, config: Any, opens: Any, device: str | None) -> Any:
        assert config.share is None
        sent = pickle.loads(ForkingPickler.dumps(opens))
        first, _ = (sent(Noted(World(rank, size), lambda *_: None), f"cuda:{rank}", None) for rank in range(size))
        return first

    limit = Ceilings(4000.0, 4100.0, 780.0, {"gpu": "H200", "driver": "580", "torch": "2"})
    monkeypatch.setattr("kerngen.timing.measure.ceilings", lambda: limit)
    monkeypatch.setattr("kerngen.runtime.backend.use_gpu", lambda _: 0)
    monkeypatch.setattr("kerngen.runtime.session.open_divided", open_divided)
    monkeypatch.setattr("kerngen.timing.step_profile.profile_step", profiled)
    out = kerngen.ok("bench", "profile", "gemma-4-31b", "--tensor-parallel", "2", "--untuned", "--seed", "3", "--json")
    assert json.loads(out)["model"] == "gemma-4-31b-tp2"
    whole = find_model("gemma-4-31b")
    assert parts == [(whole.divided(World(rank, 2)), [], 3, World(rank, 2)) for rank in range(2)]


@pytest.mark.parametrize(("options", "told"), [
    (["--phase", "prefill", "--batch", "2"], "a prefill is of one sequence"),
    (["--tokens", "4"], "decode has one a sequence"),
    (["--untuned", "--db", "x.sqlite"], "leave out --db"),
    (["--batch", "0"], "0 is not in the range"),
    (["--tensor-parallel", "5"], "it can among 2 or 3 or 4 or 8"),
])  # fmt: skip
def test_options_that_do_not_go_together_are_refused(kerngen: Kerngen, options: list[str], told: str) -> None:
    code, _, err = kerngen("bench", "profile", "gemma-4-31b", *options)
    assert code == 2
    assert told in err
