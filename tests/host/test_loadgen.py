"""Load and soak of servers: figures are what they are called, and what is wrong is found."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from io import BytesIO

import numpy as np
import pytest
from click.testing import CliRunner
from command import Kerngen
from stub_server import Stub, stubbed

from kerngen.cli.bench_serve import print_runs, serve
from kerngen.errors import UsageError
from kerngen.loadgen import arrivals
from kerngen.loadgen.arrivals import Plan, delays
from kerngen.loadgen.asking import Leaves, Outcome, Shape, _picture
from kerngen.loadgen.figures import figures
from kerngen.loadgen.http import Answer, Server, ServerGone, _Chunks
from kerngen.loadgen.metrics import drafting
from kerngen.loadgen.processes import processes_of, resident_mb
from kerngen.soak.server import Settings, Soak

SHORT = ("--prompt-tokens", "8", "--answer-tokens", "6", "--vocab", "1024")
SOAK = (*SHORT, "--minutes", "0.01", "--concurrency", "6", "--reference", "3")


def test_figures_are_vllms() -> None:
    good = [Outcome(10.0, [10.5, 10.6, 10.9], 100, 4), Outcome(11.0, [11.1], 50, 1)]
    bad = [Outcome(12.0, [12.5], 10, 1, error="HTTP 500: x"), Outcome(12.0, error="HTTP 500: x")]
    found = figures([*good, *bad], 2.0)
    assert (found["completed"], found["failed"], found["errors"]) == (2, 2, {"HTTP 500: x": 2})
    assert (found["requests_per_s"], found["answer_tokens_per_s"], found["tokens_per_s"]) == (1.0, 2.5, 77.5)
    assert found["ttft_ms"]["p50"] == pytest.approx(300)
    assert found["ttft_ms"]["p99"] == pytest.approx(np.percentile([500, 100], 99))
    assert found["itl_ms"]["mean"] == pytest.approx(200)
    assert found["tpot_ms"] == pytest.approx(dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 400 / 3))
    assert found["e2el_ms"]["max"] == pytest.approx(900)
    assert figures([], 1.0)["ttft_ms"] is None


@pytest.mark.parametrize("columns", ["60", "200"])
def test_runs_fit_the_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    bad = figures([Outcome(10.0, [10.5, 12.9], 100, 4), Outcome(12.0, error="HTTP 500: x")], 2.0)
    none = figures([], 1.0)
    print_runs([{"rate": 2.5, "concurrency": 4, "drafting": None, **bad},
                {"rate": None, "concurrency": None, "drafting": {"acceptance_rate": 0.5, "acceptance_length": 2.5},
                 **none}])  # fmt: skip
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(columns)
    for what in ("TTFT p50/p90/p99 ms", "500.0/500.0/500.0", "2900/2900/2900", "50%, 2.50 a step", "2.5/s", "any"):
        assert what in " ".join(out.split()), out
    assert out.endswith("at rate 2.5/s: 1 times HTTP 500: x\n")


def test_arrivals_are_poissons() -> None:
    assert delays(None, 3, 0) == [0.0] * 3
    at = delays(4.0, 2000, 1)
    assert at[-1] == pytest.approx(500)
    gaps = np.diff([0.0, *at])
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1)
    assert at != delays(4.0, 2000, 2)


def test_prompts_are_what_was_asked() -> None:
    shape = Shape(100, 40, 0.5, vocab_size=1100)
    drawn = [shape.draw(i) for i in range(200)]
    assert drawn == [shape.draw(i) for i in range(200)]
    assert {len(ids) for ids, _ in drawn} <= set(range(50, 151))
    assert {count for _, count in drawn} <= set(range(20, 61))
    assert len({len(ids) for ids, _ in drawn}) > 50
    assert {i for ids, _ in drawn for i in ids} <= set(range(550, 1100))
    assert all((len(ids), count) == (7, 9) for ids, count in map(Shape(7, 9).draw, range(9)))


def test_pictures_are_another_one_for_each_prompt() -> None:
    from PIL import Image

    urls = [_picture((96, 40), number) for number in (1, 2, 1)]
    assert _picture((96, 40), 1) is urls[2], "one that all prompts show is drawn once"
    assert urls[0] == urls[2] != urls[1]
    with Image.open(BytesIO(base64.b64decode(urls[0].partition(",")[2]))) as picture:
        assert (picture.size, picture.format) == ((96, 40), "JPEG")


@pytest.mark.parametrize(("options", "says"), [
    (["--image", "1920"], "--image '1920' is no size of a picture"),
    (["--image", "99999999x99999999"], "--image 99999999x99999999: servers take images of at most 50,000,000 pixels"),
    (["--image", "0x5", "--as", "chat"], "--image '0x5' is no size"),
    (["--image", "3x5"], "pictures are shown in chats"),
    (["--same-image", "--as", "chat"], "pictures are shown in chats"),
])  # fmt: skip
def test_pictures_that_cannot_be_shown_are_refused(options: list[str], says: str) -> None:
    found = CliRunner().invoke(serve, options)
    assert isinstance(found.exception, UsageError)
    assert says in str(found.exception)


def test_chunks_are_taken_apart_wherever_they_are_cut() -> None:
    whole = b"5;x=y\r\nhello\r\n1\r\n!\r\n0\r\n\r\n"
    for size in range(1, len(whole) + 1):
        chunks = _Chunks()
        found = b"".join(chunks.push(whole[i : i + size]) for i in range(0, len(whole), size))
        assert (found, chunks.is_over) == (b"hello!", True)
    with pytest.raises(ServerGone):
        _Chunks().push(b"no number\r\n")


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_are_taken_apart_wherever_they_are_cut(end: bytes) -> None:
    """Of a server that says no length, and ends lines as it likes; a comment keeps the connection open."""
    events = [b"data: 1", b": ping", b"event: x" + end + b"data:2", b"data: [DONE]"]
    whole = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(event + end + end for event in events)

    async def taken(size: int) -> list[bytes]:
        reader = asyncio.StreamReader()

        async def feed() -> None:
            for i in range(0, len(whole), size):
                reader.feed_data(whole[i : i + size])
                await asyncio.sleep(0)
            reader.feed_eof()

        feeding = asyncio.ensure_future(feed())
        answer = Answer(reader, None)  # type: ignore[arg-type]
        await answer.read_head()
        found = [event async for event in answer.events()]
        await feeding
        return found

    for size in (*range(1, 9), len(whole)):
        assert asyncio.run(taken(size)) == [b"1", b"2", b"[DONE]"], size


def test_what_drafting_came_to() -> None:
    before = {"spec_decode_num_drafts_total": 10.0, "spec_decode_num_draft_tokens_total": 30.0}
    after = {"spec_decode_num_drafts_total": 14.0, "spec_decode_num_draft_tokens_total": 42.0,
             "spec_decode_num_accepted_tokens_total": 6.0}  # fmt: skip
    assert drafting(before, after) == {"acceptance_rate": 0.5, "acceptance_length": 2.5}
    assert drafting(after, after) is None


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:x", "h" * 70, "http://h\udcff", "http://h/\udcff"])
def test_what_is_no_server(url: str) -> None:
    with pytest.raises(UsageError):
        Server.at(url)


def test_a_server_is_put_under_load(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with stubbed(Stub(pause_s=0.004)) as stub:
        code, out, err = kerngen("bench", "serve", stub.url + "/v1", *SHORT, "--concurrency", "4", "--sweep", "2",
                                 "--requests", "16", "--seconds", "0.2", "--json")  # fmt: skip
        said = json.loads(out)
        assert (code, err) == (0, "")
        rates = [run["rate"] for run in said["runs"]]
        most = said["runs"][-1]["requests_per_s"]
        assert rates == [pytest.approx(most / 3), pytest.approx(2 * most / 3), None]
        for run in said["runs"]:
            assert run["completed"] == run["requests"] > 0
            assert run["answer_tokens"] == 6 * run["completed"]
            assert run["itl_ms"]["p50"] >= 4
            assert run["drafting"] == {"acceptance_rate": 0.75, "acceptance_length": 4.0}
        assert said["runs"][-1]["requests"] == 16
        assert all(body["ignore_eos"] and len(body["prompt"]) == 8 for body in stub.bodies)  # type: ignore[arg-type]
        prompts = [tuple(body["prompt"]) for body in stub.bodies]  # type: ignore[arg-type]
        assert len(set(prompts)) == len(prompts), "a prompt that was asked before would be found in the cache"
        out = kerngen.ok("bench", "serve", stub.url, *SHORT, "--rate", "200,inf", "--requests", "5")
        assert [line.split()[0] for line in out.splitlines()[2:]] == ["200/s", "inf"]


def test_nobody_leaves_the_warm_up_before_all_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers one more at each step: all are there at once, then ever fewer."""
    plan = Plan(Shape(4, 64), 12, 24, 1.0, 12, 5.0, "m")
    at_work: list[int] = []
    going: set[int] = set()

    async def follow(server: object, asked: object, timeout_s: float, leaves: Leaves) -> None:
        mine = len(going)
        going.add(mine)
        await asyncio.sleep(0.002 * mine)
        chunks = 0
        while not leaves(chunks := chunks + 1):
            at_work.append(len(going))
            await asyncio.sleep(0.002)
        going.discard(mine)

    monkeypatch.setattr(arrivals, "follow", follow)
    asyncio.run(arrivals._warm(Server("127.0.0.1", 1), "m", plan, lambda *_: None))
    assert not going
    assert at_work.index(11) > 12, "the first has more than a chunk of the last"
    assert set(at_work) == set(range(1, 13)), "batches of all sizes"


def test_runs_that_ended_are_told_where_the_server_ends(kerngen: Kerngen) -> None:
    options = (*SHORT, "--warmup", "0", "--requests", "4", "--concurrency", "1", "--rate", "inf,inf")
    with stubbed(Stub("gone", since=6)) as stub:  # one alone, four of a run, and one more
        code, out, err = kerngen("bench", "serve", stub.url, *options, "--json")
        assert (code, "Connection refused" in err) == (1, True), err
    assert [run["completed"] for run in json.loads(out)["runs"]] == [4]


def test_failures_under_load(kerngen: Kerngen) -> None:
    with stubbed(Stub("500", since=9)) as stub:
        code, out, _ = kerngen("bench", "serve", stub.url, *SHORT, "--requests", "4", "--warmup", "6")
        assert code == 1
        assert "2 times HTTP 500: planted" in out or "1 times HTTP 500: planted" in out
        code, _, err = kerngen("bench", "serve", stub.url, *SHORT)
        assert (code, "the first request was not answered: HTTP 500: planted" in err) == (2, True)
    for arguments, status, says in (
        ((stub.url,), 1, "Connection refused"), (("--rate", "0"), 2, "--rate '0'"),
        (("--rate", "x"), 2, "no list of rates"),
        (("--sweep", "2", "--rate", "1"), 2, "one of the two"), (("ftp://x",), 2, "no address"),
    ):  # fmt: skip
        code, _, err = kerngen("bench", "serve", *arguments)
        assert (code, says in err) == (status, True), err


def test_what_is_no_such_server_says_so(kerngen: Kerngen) -> None:
    with stubbed(Stub(only="<html>a page</html>")) as stub:
        for options, says in (
            ((), "no list of models"), (("--model", "x"), "[DONE]"), (("--model", "x", "--as", "text"), "/detokenize"),
        ):  # fmt: skip
            code, _, err = kerngen("bench", "serve", stub.url, *SHORT, *options)
            assert (code, "UsageError" in err, says in err) == (2, True, True), err
    with stubbed(Stub(only="data: {'no': JSON}\n\n")) as stub:
        code, _, err = kerngen("bench", "serve", stub.url, *SHORT, "--model", "x")
        assert (code, "none of the API's" in err) == (2, True), err
    for command in (("soak",), ("bench", "soak")):  # as it was called before
        code, out, err = kerngen(*command, stub.url, *SOAK, "--model", "x")
        assert (code, out, "Connection refused" in err) == (1, "", True), err
    code, _, err = kerngen("soak", stub.url, "--max-batch", "3")
    assert (code, "--max-batch is of a model" in err) == (2, True), err


FOUND = {
    "500": "HTTP 500: planted", "other": "another than alone", "silent": "not done within", "busy": "there is still",
    "cut": "ended where an answer should go on", "sick": "/health: HTTP 503",
    "takes nonsense": "was answered by HTTP 200",
    "gone": "refused",
}  # fmt: skip


@pytest.mark.parametrize("fault", FOUND)
def test_a_soak_finds_what_is_wrong(kerngen: Kerngen, fault: str) -> None:
    with stubbed(Stub(fault, since=3)) as stub:
        # What a stub never ends is waited for, and no longer than that.
        code, out, _ = kerngen("soak", stub.url, *SOAK, "--timeout", "0.4", "--no-memory", "--json")
    said = json.loads(out)
    assert (code, sum(said["counts"].values()) > 10) == (1, True), said
    assert any(FOUND[fault] in text for text in said["faults"]), said


def test_a_soak_finds_nothing_where_nothing_is_wrong(kerngen: Kerngen) -> None:
    with stubbed(Stub()) as stub:
        code, out, _ = kerngen("soak", stub.url, *SOAK, "--minutes", "0.03", "--no-memory", "--json")
    said = json.loads(out)
    assert (code, said["num_faults"], said["different"]) == (0, 0, 0), said
    assert set(said["counts"]) == {"read", "compared", "left", "slow", "bad", "broken off"}, said
    assert said["equal"] > 0


def test_a_difference_may_be_counted(kerngen: Kerngen) -> None:
    with stubbed(Stub("other", since=3)) as stub:
        code, out, _ = kerngen("soak", stub.url, *SOAK, "--no-memory", "--different", "counts")
    assert (code, "0 equal" in out, "no faults" in out) == (0, True, True), out
    assert "% of the answer in the median" in out, out


def test_where_answers_part_is_told() -> None:
    found = Soak(Settings(1.0, Shape(1, 1), 1))
    assert found.parted_after() == {}
    found.parted += [0.5, 0.1, 0.2]
    assert found.parted_after() == {"least": 0.1, "median": 0.2, "most": 0.5}


def test_memory_that_grows_is_found(kerngen: Kerngen) -> None:
    with stubbed(Stub("leaks", since=3)) as stub:
        assert os.getpid() in processes_of(Server.at(stub.url).port)
        code, out, _ = kerngen("soak", stub.url, *SOAK, "--minutes", "0.04", "--max-growth", "16")
    assert (code, "FAULT memory of process" in out) == (1, True), out
    assert resident_mb([os.getpid(), 1 << 30]).keys() == {os.getpid()}
    assert processes_of(1) == []


def test_growth_is_of_the_second_half() -> None:
    found = Soak(Settings(1.0, Shape(1, 1), 1))
    assert found.growth() == {}
    found.memory = [
        (0.0, {7: 10.0}, 100.0), (1.0, {7: 50.0}, 100.0), (2.0, {7: 40.0, 8: 1.0}, 130.0), (3.0, {7: 55.0}, 99.0),
    ]  # fmt: skip
    assert found.growth() == {"process 7": 5.0, "GPU": 30.0}


def test_nobody_is_asked_where_nobody_is() -> None:
    with pytest.raises(ServerGone):
        asyncio.run(Server("127.0.0.1", 1).ask("GET", "/health"))
