"""A tune by several workers: each problem once, whatever becomes of whom, and the winners of a single run."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from command import ROOT, Kerngen
from postgres import postgresql_server, postgresql_url, queue_url
from sqlalchemy import text

from kerngen.arch import Target, find_arch
from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.errors import DatabaseError, UsageError
from kerngen.job_queue.compiling import compile_ahead, fetch_images, forget_images
from kerngen.job_queue.job import Job, code_digest, jobs_for
from kerngen.job_queue.queue import KEPT_HOURS, TUNE, Queue, State, Worker
from kerngen.job_queue.submit import Plan, collect, status_lines, submit, wait, why_idle
from kerngen.job_queue.worker import able_arches, measuring_lock
from kerngen.tuning.objective import Predicted
from kerngen.tuning.tuner import Tuner
from kerngen.tuning_db import Store
from kerngen.workload.workload import find_workload

__all__ = ["postgresql_server", "postgresql_url", "queue_url"]

V100 = Target.of(find_arch("sm70"))
# Of the 31B's set on sm70. KERNGEN_TEST_CLUSTER=all takes all of it, which two cores are some minutes at.
KERNELS = None if os.environ.get("KERNGEN_TEST_CLUSTER") == "all" else ["embed", "rmsnorm", "add_norm"]
TRIALS = 2
BEAT_S = 0.3  # a worker is dead after six
WAIT_S = 120 if KERNELS else 1800


@pytest.fixture(scope="module")
def plan() -> Plan:
    load = find_workload("gemma-4-31b", find_arch("sm70"))
    items = (load if KERNELS is None else load.only(KERNELS)).items
    return Plan(items, V100, "predicted", TRIALS, 0, load.model)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def single(plan: Plan, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds for the same problems."""
    path = tmp_path_factory.mktemp("single") / "tuning.db"
    with Store.open(path) as store, CachedCompiler(2, CompileCache(cache)) as compiler:
        Tuner(Predicted(V100), store, compiler, trials=TRIALS).run(plan.items)
        return found(store)


def found(store: Store) -> dict[str, Any]:
    return {w.problem.id: (w.config, w.latency_us, w.provenance, w.build_id) for w in store.winners()}


@pytest.fixture
def url(queue_url: str) -> str:
    """A database without tables."""
    return queue_url


class Started:
    """A worker in a process of its own, with what it says."""

    def __init__(self, url: str, cache: Path, *options: str) -> None:
        command = [sys.executable, "-m", "kerngen", "worker", "--db", url, "--kind", "predict", "--arch", "sm70",
                   "--jobs", "1", "--heartbeat", str(BEAT_S), *options]  # fmt: skip
        environment = os.environ | {"KERNGEN_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1",
                                    "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, text=True, env=environment)  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += (line.rstrip() for line in self.process.stderr)

    @property
    def name(self) -> str:
        return f":{self.process.pid}:"

    def end(self, timeout: float = WAIT_S) -> int:
        """Wait for it; its exit code."""
        code = self.process.wait(timeout)
        self._reader.join(10)
        return code

    def done(self) -> list[int]:
        """The jobs that it says it did."""
        return [int(n) for line in self.lines for n in re.findall(r"^done: job (\d+),", line)]


@pytest.fixture
def start(url: str, cache: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def begin(*options: str) -> Started:
        started.append(Started(url, cache, *options))
        return started[-1]

    yield begin
    for worker in started:
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGCONT)
            worker.process.kill()
        worker.end()


def embed_alone(plan: Plan, wider: int = 0) -> Plan:
    """One job, with more to try, so that it takes a while. wider: of a row, elements; what is wider is asked anew."""
    embed = [i for i in plan.items if i.kernel == "embed"]
    items = (replace(i, problem=replace(i.problem, hidden=i.problem.hidden + wider)) for i in embed)
    return replace(plan, items=tuple(items), trials=12)


class Unheard:
    def update(self, done: int, total: int, text: str) -> None: ...


def until(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.05)
    return answer


def at(queue: Queue, worker: Started) -> State | None:
    """The job that `worker` is at."""
    return next((s for s in queue.states() if s.status == "doing" and worker.name in s.worker), None)


def stopped_at(queue: Queue, worker: Started) -> State | None:
    """As `at`, with the worker stopped in the middle of it; it goes on where it is between two jobs."""
    worker.process.send_signal(signal.SIGSTOP)
    time.sleep(0.05)  # what it said has arrived
    state = at(queue, worker)
    if state is not None and state.id not in worker.done():
        return state
    worker.process.send_signal(signal.SIGCONT)
    time.sleep(0.1)
    return None


# ---- two workers


def test_two_workers_one_killed_half_way(
    url: str, plan: Plan, single: dict[str, Any], start: Callable[..., Started]
) -> None:
    Store.open(url).close()
    with Queue.open(url) as queue, Store.open(url) as store:
        ids = submit(queue, plan)
        victim, survivor = start("--until-empty"), start("--until-empty")
        lost = until(lambda: victim.done() and stopped_at(queue, victim))
        children = psutil.Process(victim.process.pid).children(recursive=True)
        victim.process.kill()
        states = wait(queue, ids, Unheard(), 0.1)
        assert victim.end() == -signal.SIGKILL
        assert survivor.end() == 0, survivor.lines
        assert not psutil.wait_procs(children, timeout=10)[1], "its compilers went with it"

        assert {s.status for s in states} == {"succeeded"}
        assert Counter(victim.done() + survivor.done()) == dict.fromkeys(ids, 1), "each job was done once"
        assert {s.id: s.attempts for s in states} == dict.fromkeys(ids, 1) | {lost.id: 2}
        assert lost.id in survivor.done()
        assert sum(f"job {lost.id} " in line and "lost its worker" in line for line in survivor.lines) == 1

        told = Counter(str(sorted(r["problem"].items())) + s.job.kernel for s in states for r in s.result["results"])
        assert set(told.values()) == {1}
        assert len(told) == len(plan.items), "every problem once"
        with store.reading() as connection:
            searched = connection.execute(text("SELECT problem_id, count(*) FROM search GROUP BY problem_id")).all()
        assert {count for _, count in searched} == {1}
        rows = Counter((o.measurement.problem.id, str(o.measurement.config)) for o in store.measurements())
        assert set(rows.values()) == {1}, "no trial twice"
        assert found(store) == single
        assert len(single) == len(plan.items)

        report = collect(store, plan, states)
        assert [r.item for r in report.results] == list(plan.items)
        assert all(r.winner is not None and r.default_us and r.num_tried for r in report.results)
        assert not report.interrupted
        assert report.how.endswith("by 2 workers") or lost.worker in {s.worker for s in states}
        assert submit(queue, plan) != ids, "what is over may be asked for again"


def test_one_that_was_silent_ends_when_it_comes_back(url: str, plan: Plan, start: Callable[..., Started]) -> None:
    """Stopped, as by a host that hangs: another has its job by then, and only one of them ends it."""
    with Queue.open(url) as queue:
        (id,) = submit(queue, embed_alone(plan))
        silent = start()
        until(lambda: stopped_at(queue, silent))
        other = start("--until-empty")
        until(lambda: at(queue, other))
        silent.process.send_signal(signal.SIGCONT)
        assert silent.end() == 1
        assert any(f"job {id} was given to another worker" in line for line in silent.lines), silent.lines
        assert other.end() == 0
        assert (silent.done(), other.done()) == ([], [id])


def test_one_that_is_told_to_end_puts_its_job_back(url: str, plan: Plan, start: Callable[..., Started]) -> None:
    with Queue.open(url) as queue:
        for again in range(5):  # it may be at the job's last step, and then ends it
            (id,) = submit(queue, embed_alone(plan, wider=64 * again))
            first = start()
            until(lambda at=first: stopped_at(queue, at))
            first.process.terminate()
            first.process.send_signal(signal.SIGCONT)
            assert first.end(30) == 0
            if id not in first.done():
                break
        assert any(f"stopped: job {id}" in line for line in first.lines)
        (state,) = queue.states([id])
        assert state.status == "todo"
        assert not queue.workers(BEAT_S), "it said goodbye"
        second = start("--until-empty")
        assert second.end() == 0
        assert second.done() == [id]
        (state,) = queue.states([id])
        assert state.result["num_from_database"] >= 0
        assert state.status == "succeeded"


def test_cancelled_it_stops_and_is_not_done_again(url: str, plan: Plan, start: Callable[..., Started]) -> None:
    with Queue.open(url) as queue:
        ids = submit(queue, plan)
        worker = start("--until-empty")
        until(lambda: at(queue, worker))
        assert queue.cancel(ids) == len(ids)
        states = wait(queue, ids, Unheard(), 0.1)
        assert worker.end() == 0
        assert {s.status for s in states} <= {"cancelled", "aborted", "succeeded"}
        assert Counter(s.status for s in states)["cancelled"] >= len(ids) - 2
        with Store.open(url) as store:
            assert collect(store, plan, states).interrupted


def test_what_the_dead_leave_is_put_back_once_or_given_up(url: str, plan: Plan, start: Callable[..., Started]) -> None:
    """One that took two workers with it takes no third; one that is in the queue again is done as that."""
    with Queue.open(url) as queue:
        jobs = plan.jobs()
        ids = submit(queue, plan)
        deadly, twin = 0, min(range(1, len(jobs)), key=lambda i: len(jobs[i].problems))
        queue.cancel(ids[i] for i in range(len(ids)) if i not in (deadly, twin))
        died = "UPDATE procrastinate_jobs SET status = 'doing', attempts = %s WHERE id = %s"
        queue._connection.execute(died, [2, ids[deadly]])
        queue._connection.execute(died, [0, ids[twin]])
        task = queue._app.configure_task(
            TUNE, queue=jobs[twin].queue, lock=jobs[twin].lock, queueing_lock=jobs[twin].id
        )
        again = task.defer(job=jobs[twin].as_json())
        worker = start("--until-empty")
        assert worker.end() == 0
        assert worker.done() == [again]
        given_up = {s.id: s for s in queue.states(ids) if s.status == "failed"}
        assert set(given_up) == {ids[deadly], ids[twin]}
        assert "died of it" in given_up[ids[deadly]].result["error"]
        assert "another job" in given_up[ids[twin]].result["error"]
        assert any("died of it" in line for line in status_lines(queue.states(), []))


# ---- jobs


def test_jobs_are_all_problems_once_the_most_urgent_first(plan: Plan) -> None:
    jobs = jobs_for(plan.items, V100, "predicted", trials=3, seed=0, model="m")
    items = [i for _, members in jobs for i in members]
    assert sorted(map(str, items)) == sorted(map(str, plan.items))
    for job, members in jobs:
        assert [(i.kernel, i.problem) for i in job.items()] == [(i.kernel, i.problem) for i in members]
        assert job.target() == V100
        again = Job.of_json(json.loads(json.dumps(job.as_json())))
        assert again == job
        assert (again.id, again.lock, again.queue) == (job.id, job.lock, job.queue)
    first = {u.phase for i in jobs[0][1] for u in i.uses}
    assert "decode" in first, "what one waits for at each token"
    assert len({job.id for job, _ in jobs}) == len({job.lock for job, _ in jobs}) == len(jobs)
    job = jobs[0][0]
    assert replace(job, model="another").id == job.id, "whose it is makes it no other work"
    assert replace(job, seed=1).id != job.id
    assert replace(job, seed=1).lock == job.lock, "and yet not at the same time"


def test_queues_are_of_a_board_an_arch_and_the_code(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    (job, *_) = plan.jobs()
    assert job.queue == f"predict-sm70-{code_digest()}"
    measured = replace(plan, kind="measured").jobs()
    assert {j.queue.rsplit("-", 1)[0] for j in measured} == {"measure-V100", "compile-sm70"}
    tunes, compiles = measured[: len(measured) // 2], measured[len(measured) // 2 :]
    assert [measuring_lock(j) for j in compiles] == [j.lock for j in tunes]
    monkeypatch.setattr("kerngen.job_queue.job.MODEL", "roofline-0")
    assert job.code != code_digest(), "a worker with another cost model takes none of them"


def test_what_is_in_the_queue_is_not_put_there_again(url: str, plan: Plan) -> None:
    with Queue.open(url) as queue, Queue.open(url) as other:
        ids = submit(queue, plan)
        assert submit(other, plan) == ids
        assert submit(other, replace(plan, seed=1)) != ids
        assert len(queue.states()) == 2 * len(ids)
        assert other.cancel(ids) == len(ids)
        assert {s.status for s in queue.states(ids)} == {"cancelled"}
        assert queue.cancel(ids) == 0, "they are over"
        again = submit(queue, plan)
        assert not set(again) & set(ids)
        foreign = (
            """UPDATE procrastinate_jobs SET args = '{"job": {"kind": "predicted", "colour": "red"}}' WHERE id = %s"""
        )
        queue._connection.execute(foreign, again[:1])
        assert [s.id for s in queue.states(again)] == again[1:], "another version's are its workers'"


def test_what_has_long_been_over_is_cleared_away(url: str, plan: Plan) -> None:
    """By several hosts that submit at once; what was over just now stays, as what is under way does, however old."""
    jobs = plan.jobs()[:4]
    with Queue.open(url) as queue:
        by_hand: Any = queue._connection
        old, failed, fresh, under_way = queue.submit(jobs)
        for id, status in ((old, "succeeded"), (failed, "failed"), (fresh, "succeeded"), (under_way, "doing")):
            by_hand.execute("UPDATE procrastinate_jobs SET status = 'doing' WHERE id = %s", [id])
            by_hand.execute("UPDATE procrastinate_jobs SET status = %s WHERE id = %s", [status, id])
            queue.tell(id, "w", 1, 1, "done", {"results": []})
        queue.greet(Worker("long gone", (), ""))
        queue.greet(Worker("here", (), ""))
        ago = f"now() - interval '{KEPT_HOURS + 1} hours'"
        by_hand.execute(f"UPDATE procrastinate_events SET at = {ago} WHERE job_id <> %s", [fresh])
        by_hand.execute(f"UPDATE kerngen_worker SET at = {ago} WHERE name = 'long gone'")

        def host(n: int) -> list[int]:
            with Queue.open(url) as mine:
                return mine.submit(plan.jobs()[4:6])

        with ThreadPoolExecutor(6) as hosts:
            new = {tuple(ids) for ids in hosts.map(host, range(6))}
        assert len(new) == 1, "all submitted the same"
        assert {s.id for s in queue.states()} == {fresh, under_way, *new.pop()}
        told = by_hand.execute("SELECT job_id FROM kerngen_progress").fetchall()
        assert {row["job_id"] for row in told} == {fresh, under_way}
        assert by_hand.execute("SELECT name FROM kerngen_worker").fetchall() == [{"name": "here"}]


def test_the_queue_is_made_once_and_by_one_version(url: str) -> None:
    made: list[Queue] = []
    threads = [threading.Thread(target=lambda: made.append(Queue.open(url))) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(made) == 6
    with made[0].alone() as first, made[1].alone() as second:
        assert (first, second) == (True, False)
    with made[1].alone() as then:
        assert then
    me = Worker("host:1:ab", ("predict-sm70-00000000",), "no GPU")
    made[0].greet(me)
    assert made[2].workers() == [me]
    assert made[2].workers(heartbeat_s=0.0) == [], "it was silent for as long"
    made[0].part(me)
    assert made[2].workers() == []
    schema = re.findall(r"kerngen_test_\w+", url)[-1] + "_queue"
    made[0]._connection.execute(f"COMMENT ON SCHEMA {schema} IS 'procrastinate 2.0'")
    for queue in made:
        queue.close()
    with pytest.raises(DatabaseError, match=r"made by procrastinate 2\.0") as e:
        Queue.open(url)
    assert f"DROP SCHEMA {schema}" in str(e.value.hint)


def test_why_nothing_goes_on_is_said() -> None:
    worker = Worker("a", ("predict-sm70-00000000",), "no GPU")
    assert "start one" in why_idle([], {"measure-H200-0"})
    assert why_idle([worker], {"measure-H200-0"}) == "1 workers, none for measure-H200-0"
    assert why_idle([worker], {"predict-sm70-00000000"}) == "1 workers"


# ---- compiling ahead


def test_what_others_compiled_is_taken_and_cleared_away(plan: Plan, tmp_path: Path) -> None:
    """One machine compiles, another has that without a compile, and the database keeps the winners' alone."""
    job = next(
        j for j in replace(plan, kind="measured", trials=2).jobs() if j.kernel == "embed" and j.kind == "compile"
    )
    with Store.open(tmp_path / "tuning.db") as store:
        with CachedCompiler(1, CompileCache(tmp_path / "first")) as compiler:
            count = compile_ahead(store, compiler, job, Unheard())
            assert count > 1
            assert compile_ahead(store, compiler, job, Unheard()) == 0, "it is there"
        cache = CompileCache(tmp_path / "second")
        arch = find_arch("sm70")
        assert fetch_images(store, cache, job, find_arch("sm90")) == 0
        assert fetch_images(store, cache, job, arch) == count
        assert fetch_images(store, cache, job, arch) == 0
        with CachedCompiler(1, cache) as compiler:
            report = Tuner(Predicted(V100), store, compiler, trials=2).run(job.items())
        assert report.num_compiled == 0, "nothing was left to compile"
        kept = {store.build(w.build_id).image_sha for w in store.winners()}
        assert forget_images(store, job) == count - len(kept) > 0
        assert all(store.image(store.build(w.build_id)) is not None for w in store.winners())


def test_one_compiles_and_another_measures(url: str, plan: Plan, start: Callable[..., Started], tmp_path: Path) -> None:
    """With a GPU that times by a formula, and a compile cache each: machine code travels through the database."""
    ahead = replace(plan, items=tuple(i for i in plan.items if i.kernel == "embed"), kind="measured", trials=4)
    with Queue.open(url) as queue, Store.open(url) as store:
        (id,) = submit(queue, ahead)
        assert start("--kind", "compile", "--until-empty").end() == 0
        (measured,) = queue.states([id])
        assert (measured.status, measured.queue) == ("todo", f"measure-V100-{code_digest()}")
        (compiled,) = (s for s in queue.states() if s.job.kind == "compile")
        assert compiled.status == "succeeded"
        assert not store.measurements(), "what was compiled is not measured"
        environment = os.environ | {"KERNGEN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
        command = [sys.executable, str(Path(__file__).parent / "worker_fake.py"), url]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, done.stderr
        (measured,) = queue.states([id])
        assert measured.status == "succeeded", done.stdout
        assert measured.result["num_compiled"] < compiled.result["num_compiled"], "most of it was there"
        winners = store.winners()
        assert len(winners) == len(ahead.items)
        assert {(w.provenance, w.device.name) for w in winners} == {("measured", "V100")}
        report = collect(store, ahead, [measured])
        assert {r.winner.latency_us for r in report.results if r.winner} == {w.latency_us for w in winners}
        builds = [store.build(b) for b in {o.measurement.build_id or "" for o in store.measurements()}]
        kept = {b.image_sha for b in builds if store.image(b) is not None}
        assert kept == {store.build(w.build_id).image_sha for w in winners}, "and no more than what won"
        (again,) = queue.submit([compiled.job])
        assert start("--kind", "compile", "--until-empty").end() == 0
        assert queue.states([again])[0].status == "succeeded"
        assert forget_images(store, compiled.job) == 0, "who compiles too late clears away after itself"


# ---- the commands


def test_the_commands(url: str, plan: Plan, kerngen: Kerngen) -> None:
    code, out, err = kerngen("tune", "--db", url, "--status")
    assert (code, out, err) == (0, "the queue is empty\n", "")
    with Queue.open(url) as queue:
        ids = submit(queue, plan)
    out = kerngen.ok("tune", "--db", url, "--status")
    assert f"{len(ids)} todo" in out
    assert "nothing is under way: no worker" in out
    said = json.loads(kerngen("tune", "--db", url, "--status", "--json")[1])
    assert [j["id"] for j in said["jobs"]] == ids
    assert {j["status"] for j in said["jobs"]} == {"todo"}
    assert json.loads(kerngen("tune", "--db", url, "--cancel", "--arch", "sm90", "--json")[1]) == {"cancelled": 0}
    assert kerngen("tune", "--db", url, "--cancel", "--model", plan.model)[1] == f"{len(ids)} jobs cancelled\n"


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "procrastinate", None)
    with pytest.raises(DatabaseError, match=r"procrastinate.*installed") as e:
        Queue.open("postgresql+psycopg://kerngen@localhost/none")
    assert e.value.hint == "pip install 'kerngen[pg]'"


@pytest.mark.skipif(find_spec("procrastinate") is None, reason="what needs it fails above, and says so")
def test_a_server_that_accepts_and_stays_silent_is_given_up(monkeypatch: pytest.MonkeyPatch, kerngen: Kerngen) -> None:
    monkeypatch.setattr("kerngen.tuning_db.store.engine.CONNECT_S", 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"postgresql+psycopg://me@127.0.0.1:{server.getsockname()[1]}/name"
        code, out, err = kerngen("worker", "--db", url, "--arch", "sm70")
    assert (code, out) == (1, "")
    assert "connection timeout expired\n  is that server up" in err


@pytest.mark.skipif(find_spec("procrastinate") is None, reason="what needs it fails above, and says so")
def test_a_password_is_not_shown() -> None:
    with pytest.raises(DatabaseError) as e:
        Queue.open("postgresql+psycopg://kerngen:secret@localhost:1/none")
    assert "secret" not in str(e.value)
    with pytest.raises(UsageError):
        Queue.open("sqlite:///tuning.db")
    assert {a.name for a in able_arches(["sm70"])} == {"sm70"}
