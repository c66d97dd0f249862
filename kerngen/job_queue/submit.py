"""A whole tune by a cluster: its jobs planned and put into the queue, watched until they are over, and one report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kerngen.arch import Target
from kerngen.job_queue.job import Job, jobs_for
from kerngen.job_queue.queue import Queue, State, Worker
from kerngen.system.progress import Progress
from kerngen.templates import find_kernel
from kerngen.templates.kernel import fields_of
from kerngen.tuning.objective import Measured, Predicted
from kerngen.tuning.report import Report, Result
from kerngen.tuning_db import Store
from kerngen.tuning_db.read.ids import canonical, problem_key
from kerngen.workload.workload import Item

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A tune as jobs. kind: "measured" or "predicted". trials: configurations a problem; None for the objective's."""

    items: tuple[Item, ...]
    target: Target
    kind: str
    trials: int | None = None
    seed: int = 0
    model: str = ""

    def jobs(self) -> list[Job]:
        """The most urgent first. What is to be measured is compiled beside, by whoever has no GPU."""
        trials = self.trials or (Measured if self.kind == "measured" else Predicted).trials
        made = jobs_for(self.items, self.target, self.kind, trials=trials, seed=self.seed, model=self.model)
        tunes = [job for job, _ in made]
        if self.kind == "predicted":
            return tunes
        return [*tunes, *(Job.of_json(job.as_json() | {"kind": "compile"}) for job in tunes)]


def submit(queue: Queue, plan: Plan) -> list[int]:
    """Put the plan's jobs into the queue; returns the ids of those that tune."""
    jobs = plan.jobs()
    ids = queue.submit(jobs)
    return [id for id, job in zip(ids, jobs, strict=True) if job.kind == plan.kind]


def wait(queue: Queue, ids: Sequence[int], progress: Progress, poll_s: float = POLL_S) -> list[State]:
    """Until all of `ids` are over, telling `progress` how far they are together. Returns how each ended."""
    while True:
        states = queue.states(ids)
        progress.update(*_done(states), _words(queue, states))
        if all(s.is_over for s in states):
            return states
        time.sleep(poll_s)


def _done(states: Iterable[State]) -> tuple[int, int]:
    """Problems that are done, of all: of a job under way so many as its trials are of those that it may need."""
    done = total = 0.0
    for s in states:
        total += len(s.job.problems)
        part = s.num_done / s.num_total if s.num_total and s.status == "doing" else 0.0
        done += len(s.job.problems) if s.is_over else len(s.job.problems) * part
    return int(done), int(total)


def _words(queue: Queue, states: Iterable[State]) -> str:
    doing = [s for s in states if s.status == "doing"]
    if doing:
        named = ", ".join(f"{s.job.kernel} on {s.worker.partition(':')[0]}" for s in doing[:2])
        return f"{len(doing)} workers: {named}" + (", ..." if len(doing) > 2 else "")
    return why_idle(queue.workers(), {s.queue for s in states if s.status == "todo"})


def why_idle(workers: Sequence[Worker], queues: set[str]) -> str:
    """Why nothing is under way, in words for whoever waits."""
    if not workers:
        return "no worker: start one with kerngen worker --db ..."
    if not any(queues & set(w.queues) for w in workers):
        return f"{len(workers)} workers, none for {', '.join(sorted(queues))}"
    return f"{len(workers)} workers"


def collect(store: Store, plan: Plan, states: Sequence[State]) -> Report:
    """One report of all jobs, as one process would have made it."""
    how = Predicted(plan.target).how if plan.kind == "predicted" else Measured.how
    target = plan.target
    report = Report(target, plan.kind, f"{how}, by {_count(states)}", "")
    told: dict[tuple[str, str], dict[str, Any]] = {}
    for s in states:
        result = s.result or {}
        for row in result.get("results", ()):
            told[s.job.kernel, canonical(row["problem"])] = row
        report.num_trials += result.get("num_trials", 0)
        report.num_compiled += result.get("num_compiled", 0)
        report.num_from_database += result.get("num_from_database", 0)
        report.num_spaces += result.get("num_spaces", 0)
        report.num_refused += result.get("num_refused", 0)
        report.seconds += result.get("seconds", 0.0)
        report.failures += [(k, c, why) for k, c, why in result.get("failures", ())]
        if "error" in result:
            report.failures.append((s.job.kernel, f"{len(s.job.problems)} problems", result["error"]))
        report.interrupted |= s.status in ("cancelled", "aborted")
    winners = {
        w.problem.id: w for w in store.winners(arch=target.arch) if w.device.name == target.device.name
    }  # fmt: skip
    for item in plan.items:
        kernel = find_kernel(item.kernel)
        row = told.get((item.kernel, canonical(fields_of(item.problem))), {})
        default = fields_of(kernel.default_config(item.problem, target)) if row else {}
        names = ("default_us", "note", "explanation", "registers", "smem_bytes", "spill_bytes", "num_valid",
                 "num_refused", "num_tried", "num_failed")  # fmt: skip
        winner = winners.get(problem_key(kernel, item.problem).id)
        made = Result(item, winner, default, **{n: row[n] for n in names if n in row})
        if not row:
            made.note = kernel.why_unsupported(item.problem, target) or "its job did not end well"
        report.results.append(made)
    return report


def _count(states: Sequence[State]) -> str:
    names = {s.worker for s in states if s.worker}
    return f"{len(names)} worker{'s' * (len(names) != 1)}"


def chosen(states: Iterable[State], arch: str | None, model: str | None) -> list[State]:
    """Those of an arch, or a model."""
    return [s for s in states if arch in (None, s.job.arch) and model in (None, s.job.model)]


def status_lines(states: Sequence[State], workers: Sequence[Worker]) -> Iterable[str]:
    """The queue for people: a line a queue, what is under way, and who is there."""
    queues: dict[str, Counter[str]] = {}
    for s in states:
        queues.setdefault(s.queue, Counter())[s.status] += 1
    if not queues:
        yield "the queue is empty"
    for name, counts in sorted(queues.items()):
        yield f"{name:32} " + ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    for s in states:
        if s.status == "doing":
            yield f"  doing    job {s.id}: {s.what}, {s.num_done} of at most {s.num_total} trials, {s.worker}"
    for s in states:
        if s.status == "failed":
            yield f"  failed   job {s.id}: {s.job.kernel}, {(s.result or {}).get('error', 'it says no reason')}"
    for w in workers:
        yield f"worker {w.name} ({w.about}): {', '.join(w.queues)}"
    waiting = {s.queue for s in states if s.status == "todo"}
    if waiting and not any(s.status == "doing" for s in states):
        yield f"nothing is under way: {why_idle(workers, waiting)}"
