"""`kerngen soak`: what it asks, that a sound engine passes, and that each thing it looks for is found."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import ROOT, Kerngen
from tiny_gemma import load, load_assistant, make_assistant, make_target

from kerngen.cli.soak import lines
from kerngen.errors import UsageError
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.engine import Engine
from kerngen.runtime.engine.pages import PagePool
from kerngen.runtime.engine.runner import Runner
from kerngen.runtime.model import Gemma4
from kerngen.soak import check, drive
from kerngen.soak.drafts import ERR_EVERY, RememberingDrafter
from kerngen.soak.drive import Settings
from kerngen.soak.faults import Faults, growth, parts_at
from kerngen.soak.models import Opened
from kerngen.soak.report import Report, soak
from kerngen.soak.requests import SAMPLED, SHARED, Arrivals, RandomRequests
from kerngen.soak.samples import Memory

TINY = ROOT / "examples" / "tiny"
SMALL = Settings(seconds=2.0, check_seconds=2.0, max_batch=5, max_prompt=40, max_new_tokens=24, cancel=0.3,
                 cache_bytes=95_000, page_size=4, prefill_chunk=16, seed=1)  # fmt: skip
STEP_S = 0.01  # of the clock that tests run by


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Gemma4, MtpDrafter]:
    root: Path = tmp_path_factory.mktemp("soak")
    make_target(root / "dense", "dense")
    make_assistant(root / "assistant", "dense")
    model = load(root / "dense")
    return model, load_assistant(root / "assistant", model)


@pytest.fixture
def opened(pair: tuple[Gemma4, MtpDrafter]) -> Opened:
    model, drafter = pair
    return Opened("dense", model, RememberingDrafter(drafter, model.ops), "random weights", 0.0)


@pytest.fixture
def by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on a little whenever someone looks at it: as many steps on a busy machine as on an idle one."""
    now = [0.0]

    def monotonic() -> float:
        now[0] += STEP_S
        return now[0]

    for module in (drive, check):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))


def run(opened: Opened, drafting: str = "both", settings: Settings = SMALL, max_growth_mb: float = 256.0) -> Report:
    return soak(opened, settings, drafting, max_growth_mb, lambda over, total, text: None)


# -- requests


def test_a_request_follows_from_the_seed_and_its_number() -> None:
    requests = RandomRequests(96, 40, 24, 0.3, seed=1)
    asked = [requests.ask(i) for i in range(300)]
    again = [RandomRequests(96, 40, 24, 0.3, seed=1).ask(i) for i in reversed(range(300))][::-1]
    assert [(list(a.request.prompt), a.request.sampling, a.cancel_after) for a in asked] == [
        (list(a.request.prompt), a.request.sampling, a.cancel_after) for a in again
    ]
    assert [list(RandomRequests(96, 40, 24, 0.3, seed=2).ask(i).request.prompt) for i in range(300)] != [
        list(a.request.prompt) for a in asked
    ]
    lengths = [len(a.request.prompt) for a in asked]
    assert (min(lengths), max(lengths)) == (1, 40)
    assert sorted(lengths)[150] < 20, "short ones are more frequent than long ones"
    assert {8, 24} <= {a.request.max_new_tokens for a in asked} <= set(range(8, 25))
    assert abs(sum(not a.request.sampling.is_greedy for a in asked) / 300 - SAMPLED) < 0.1
    assert abs(sum(a.cancel_after is not None for a in asked) / 300 - 0.3) < 0.1
    assert sum(bool(a.request.stop_ids) for a in asked) > 10 < sum(a.request.stops is not None for a in asked)
    beginnings = [tuple(a.request.prompt[:4]) for a in asked if len(a.request.prompt) > 4]
    assert sum(beginnings.count(b) > 5 for b in beginnings) / len(beginnings) > SHARED / 2


def test_the_shortest_requests_are_possible() -> None:
    for number in range(50):
        asked = RandomRequests(1000, 1, 1, 1.0, seed=0).ask(number)
        assert (len(asked.request.prompt), asked.request.max_new_tokens) == (1, 1)


def test_arrivals_wander_between_nobody_and_more_than_run_at_once() -> None:
    arrivals, live, seen, came = Arrivals(16, 50, seed=0), 0, [], []
    for step in range(4000):
        came.append(arrivals.now(live))
        live += came[-1]
        live -= live > 0 and step % 3 == 0
        seen.append(live)
    assert min(seen[100:]) <= 2
    assert 16 < max(seen) <= 25
    assert max(came) >= 3


def test_a_remembering_drafter_says_what_came_before(pair: tuple[Gemma4, MtpDrafter]) -> None:
    model, untaught = pair
    drafter = RememberingDrafter(untaught, model.ops)
    tokens = [(7 * i) % 96 for i in range(20)]
    drafter.remember(30, tokens)
    engine = Engine(model, untaught, max_len=64, max_batch=2, num_draft_tokens=3)
    hidden = torch.zeros(2, model.config.hidden_size)
    ids, lengths = torch.tensor([tokens[1], 95]), torch.tensor([31, 31])
    with torch.inference_mode():
        own = untaught.propose(ids, hidden, lengths, engine.cache, 3, 64)
        drafts = drafter.propose(ids, hidden, lengths, engine.cache, 3, 64)
    assert drafts[0].tolist() == tokens[2:5]
    assert drafts[1].tolist() == own[1].tolist(), "of what it has not seen it knows nothing"
    assert any(p % ERR_EVERY == 0 for p in range(31, 50)), "and some of what it has seen it forgets"
    at = 40 - 30
    with torch.inference_mode():
        there = drafter.propose(torch.tensor([tokens[at], 0]), hidden, torch.tensor([40, 40]), engine.cache, 1, 64)
        known = untaught.propose(torch.tensor([tokens[at], 0]), hidden, torch.tensor([40, 40]), engine.cache, 1, 64)
    assert there.tolist() == known.tolist()


# -- an engine that is sound


@pytest.mark.parametrize("how", [{}, {"reproducible": True}], ids=["as is", "reproducible"])
def test_every_answer_is_the_one_that_its_request_gets_alone(
    opened: Opened, by_steps: None, how: dict[str, Any]
) -> None:
    report = run(opened, settings=replace(SMALL, num_draft_tokens=3, **how))
    assert report.failures == []
    assert not report.stopped
    result = report.as_dict()
    for phase, compared in zip(result["phases"], report.checks, strict=True):
        assert phase["preemptions"] >= phase["preempted"] > 2
        assert phase["cancelled"] > 2
        assert phase["finished"] > 10
        assert phase["asked"] == phase["finished"] + phase["cancelled"]
        assert len(phase["samples"]) >= drive.NUM_SAMPLES
        assert max(s["max_running"] for s in phase["samples"]) >= 3
        assert compared.unchecked == compared.sampled_unchecked == 0
        assert compared.equal > compared.preempted_equal > 0
        assert compared.sampled_equal > 0
        assert not compared.sampled_different
        assert compared.distinct > 2
    assert [p["name"] for p in result["phases"]] == ["without drafts", "with drafts"]
    assert (len(result["phases"][0]["drafted"]), len(result["phases"][1]["drafted"])) == (0, 3)
    accepted = [a / d for a, d in zip(result["phases"][1]["accepted"], result["phases"][1]["drafted"], strict=True)]
    assert all(0 < share < 1 for share in accepted), "drafts of several numbers are accepted"
    equal, different = result["between_phases"]
    assert equal > 10
    assert different == 0
    text = "\n".join(lines(json.loads(json.dumps(result))))
    assert text.endswith("no failure")


def test_prefixes_are_found_where_there_is_room_to_keep_them(opened: Opened, by_steps: None) -> None:
    report = run(opened, "off", replace(SMALL, cache_bytes=1_000_000))
    assert report.failures == []
    assert report.as_dict()["phases"][0]["found_in_cache"] > 20
    assert report.checks[0].equal > 10


def test_answers_are_asked_again_in_order_of_what_they_tell_until_time_is_up(opened: Opened, by_steps: None) -> None:
    report = run(opened, "off", replace(SMALL, check_seconds=5 * STEP_S))
    (phase,), (compared,) = report.phases, report.checks
    assert 0 < compared.equal + len(compared.different) <= 5
    assert compared.preempted_equal == compared.equal
    order = check.in_order(phase.answers)
    assert compared.unchecked == sum(a.is_greedy for a in order) - compared.equal
    keys = [(not a.is_greedy, a.num_preemptions == 0) for a in order]
    assert keys == sorted(keys)
    assert report.failures == []


def test_half_of_the_time_goes_to_long_answers_and_half_to_short_ones() -> None:
    def answer(number: int, prompt: int, tokens: int) -> drive.Answer:
        return drive.Answer(number, array("q", range(tokens)), "stop", True, prompt, 0, 0)

    sizes = [(0, 10), (25600, 5), (0, 40), (0, 1), (0, 0), (0, 60)]  # tokens of prompt and answer
    answers = [answer(i, *size) for i, size in enumerate(sizes)]
    assert [a.number for a in check.in_order(answers)] == [1, 3, 0, 2, 5]


# -- what is not


def wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Engine._take

    def other(self: Engine, handle: Any, num_drafts: int, tokens: list[int], is_finite: bool) -> list[int]:
        if self.max_batch > 1 and handle.order % 7 == 3 and len(handle.tokens) == 5:
            tokens = [(t + 1) % 96 for t in tokens]
        return take(self, handle, num_drafts, tokens, is_finite)

    monkeypatch.setattr(Engine, "_take", other)


def lost_page(monkeypatch: pytest.MonkeyPatch) -> None:
    release, calls = PagePool.release, [0]

    def forgetful(self: PagePool, pages: Any) -> None:
        pages = list(pages)
        calls[0] += 1
        release(self, pages[1:] if calls[0] == 30 else pages)

    monkeypatch.setattr(PagePool, "release", forgetful)


def failing_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = Engine._step, [0]

    def failing(self: Engine) -> Any:
        calls[0] += 1
        if calls[0] == 60:
            raise RuntimeError("an illegal memory access was encountered")
        return step(self)

    monkeypatch.setattr(Engine, "_step", failing)


def nan_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = Engine._step, [0]

    def poisoned(self: Engine) -> Any:
        calls[0] += 1
        if calls[0] == 60 or (calls[0] > 60 and not self.scheduler.running):
            self.cache.pages(self.model.config.donor("full")).v_cache.fill_(float("nan"))
        return step(self)

    monkeypatch.setattr(Engine, "_step", poisoned)


def growing_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MB a sample, and captured steps that may be why."""
    seen, captured = iter(range(10_000)), iter(range(100_000))
    monkeypatch.setattr(Memory, "now", staticmethod(lambda *_: Memory(500.0, 0.0, 0.0, 100.0 * next(seen))))
    monkeypatch.setattr(Runner, "num_graphs", property(lambda self: next(captured)))


@pytest.mark.parametrize(("plant", "found"), [
    (lost_page, "pages of the"),
    (failing_step, "RuntimeError: an illegal memory access was encountered \\(test_soak.py, line"),
    (nan_in_the_cache, "the model computed NaN or infinity"),
    (growing_memory, r"device memory grew by \d+ MB after the warm-up, more than 256; \d+ graphs were captured"),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_a_planted_fault_is_found(
    opened: Opened, by_steps: None, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None],
    found: str,
) -> None:  # fmt: skip
    plant(monkeypatch)
    report = run(opened, "off", replace(SMALL, check_seconds=3 * STEP_S))
    assert [f for f in report.failures if re.search(found, f)], report.failures
    assert "FAILED: " in "\n".join(lines(report.as_dict()))


def test_nothing_is_asked_of_a_gpu_that_has_failed(
    opened: Opened, by_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its context is lost: whatever comes after the error raises again, and the report is still printed."""
    step, calls = Engine._step, [0]

    def lost(*args: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    def failing(self: Engine) -> Any:
        calls[0] += 1
        if calls[0] == 60:
            monkeypatch.setattr(Memory, "now", staticmethod(lost))
            monkeypatch.setattr(Engine, "cancel", lost)
            monkeypatch.setattr(Engine, "__init__", lost)
            monkeypatch.setattr(Runner, "run", lost)
        return lost() if calls[0] >= 60 else step(self)

    monkeypatch.setattr(Engine, "_step", failing)
    report = run(opened, "both")
    assert len(report.phases) == 1
    assert report.phases[0].answers
    assert report.phases[0].samples
    assert report.checks == []
    assert len(report.failures) == 2
    assert all("an illegal memory access" in failure for failure in report.failures)
    assert "\n".join(lines(report.as_dict())).count("FAILED") == 2


def test_a_wrong_token_is_found_and_in_16_bits_counted(
    opened: Opened, by_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_token(monkeypatch)
    report = run(opened, "off")
    (compared,) = report.checks
    assert {(d.number % 7, d.index) for d in compared.different} == {(3, 5)}
    assert all((d.alone + 1) % 96 == d.together for d in compared.different)
    assert [f for f in report.failures if "greedy answers differ from the ones alone" in f], report.failures
    assert "FAILED: " in "\n".join(lines(report.as_dict()))
    monkeypatch.setattr(Report, "is_exact", False)
    assert report.failures == []


def test_memory_is_judged_after_the_warm_up() -> None:
    def grown(*device: float) -> dict[str, float]:
        return growth([{"host": 1.0, "device": mb} for mb in device])

    assert grown(0, 100, 100) == {}, "too few to tell"
    assert grown(0, 900, 800, 900)["device"] == 0
    assert grown(0, 100, 100, 140) == {"host": 0, "device": 40}
    assert growth([{"a": 1.0}, {}, {"b": 5.0}, {"a": 3.0, "b": 9.0}]) == {"a": 2.0}, "b came after the warm-up"
    assert growth([{"a": 1.0}, {}, {"a": 5.0}, {}]) == {}, "a has ended"


def test_where_answers_part() -> None:
    assert parts_at("same", "same") is None
    assert parts_at([1, 2, 3], [1, 2]) == 2
    assert parts_at(array("i", [1, 2, 3]), [1, 5, 3]) == 1
    assert (parts_at("", "a"), parts_at("", "")) == (0, None)


def test_many_faults_are_counted_and_some_are_shown() -> None:
    found = Faults()
    for i in range(23):
        found.add(f"fault {i}")
    assert [*found.lines()][-2:] == ["fault 19", "and 3 more errors"]


def test_a_cache_without_room_for_the_longest_request_is_refused(opened: Opened) -> None:
    with pytest.raises(UsageError, match=r"longest request.* 64 tokens"):
        run(opened, "off", replace(SMALL, cache_bytes=20_000))
    with pytest.raises(UsageError, match="adapts"):
        run(opened, "both", replace(SMALL, reproducible=True))


# -- the command

ARGS = ("soak", str(TINY / "gemma-4-tiny-w4a16"), "--draft", str(TINY / "gemma-4-tiny-assistant"), "--minutes", "0.02",
        "--check-minutes", "0.02", "--max-batch", "3", "--max-prompt", "30", "--max-new-tokens", "8", "--page-size",
        "8", "--backend", "torch", "--dtype", "fp32")  # fmt: skip


@pytest.mark.parametrize("how", [(), ("--generated", "--reproducible")], ids=["checkpoint", "generated"])
def test_the_command_on_the_tiny_model(kerngen: Kerngen, by_steps: None, how: tuple[str, ...]) -> None:
    code, out, err = kerngen(*ARGS, *how, "--json")
    report = json.loads(out)
    assert (code, report["failures"]) == (0, []), err
    assert report["weights"] == ("generated weights" if how else f"weights of {ARGS[1]}")
    assert report["is_exact"]
    assert report["settings"]["num_draft_tokens"] == (3 if how else None)
    assert all(c["equal"] > 0 and not c["different"] for c in report["checks"])


def test_the_command_on_a_divided_model(kerngen: Kerngen, by_steps: None) -> None:
    """Drafts of rank 0, which knows answers, are accepted: the other rank verifies the same."""
    code, out, err = kerngen(*ARGS, "--device", "cpu", "--tensor-parallel", "2", "--json")
    report = json.loads(out)
    assert (code, report["failures"]) == (0, []), err
    assert report["tensor_parallel"] == 2
    assert [p["name"] for p in report["phases"]] == ["without drafts", "with drafts"]
    assert all(c["equal"] > 0 and not c["different"] for c in report["checks"])
    assert report["between_phases"][0] > 0
    assert not report["between_phases"][1]
    assert sum(report["phases"][1]["accepted"]) > 0
    assert "float32, divided among 2 ranks)" in next(lines(report))


def test_a_failure_fails_the_command(kerngen: Kerngen, by_steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lost_page(monkeypatch)
    code, out, _ = kerngen(*ARGS[:2], *ARGS[4:], "--drafting", "off")
    assert code == 1
    assert "FAILED: without drafts: 1 pages of the" in out


def test_what_stops_it_gets_the_report_so_far(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = Engine._step, [0]

    def interrupted(self: Engine) -> Any:
        calls[0] += 1
        if calls[0] == 40:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "_step", interrupted)
    code, out, err = kerngen(*ARGS, "--minutes", "60")
    assert code == 130
    assert "without drafts: " in out
    assert "with drafts: " not in out.replace("without drafts: ", "")
    assert out.endswith("stopped before its end\nno failure\n")
    assert "Traceback" not in err


@pytest.mark.parametrize(("args", "said"), [
    (("--drafting", "off", "--num-draft-tokens", "2"), "contradicts"),
    (("--max-prompt", "5000"), "5008 tokens of context; the model takes 2,048"),
    (("--kv-memory", "1e-6"), "a larger --kv-memory"),
    (("--draft", "nowhere"), "nowhere"),
    (("--concurrency", "3"), "--concurrency is of a server"),
])  # fmt: skip
def test_what_cannot_be_is_refused(kerngen: Kerngen, args: tuple[str, ...], said: str) -> None:
    if "off" in args:
        code, _, err = kerngen("soak", ARGS[1], *args)
    else:
        code, _, err = kerngen(*ARGS, *args)
    assert code in (1, 2)
    assert said in err
    assert "Traceback" not in err


def test_no_drafter_is_said_and_not_passed_over(kerngen: Kerngen, tmp_path: Path) -> None:
    folder = tmp_path / "shapes"
    folder.mkdir()
    (folder / "config.json").write_bytes((TINY / "gemma-4-tiny-w4a16" / "config.json").read_bytes())
    code, _, err = kerngen("soak", str(folder))
    assert code == 2
    assert "no drafter goes with it" in err
    assert "--drafting off" in err
