"""One unit of work: the problems of a workload that share a kernel and its compiled-in fields, on one device.

They are searched together because they learn from each other (a winner is tried at its neighbours) and from nobody
else: the winners of a job are those that one process would have found for the same problems.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kerngen import __version__
from kerngen.arch import Device, Target
from kerngen.cost.predict import MODEL
from kerngen.errors import ConfigRefused
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import fields_of
from kerngen.tuning.plan import lower_bound_us, urgency
from kerngen.tuning.space import candidates
from kerngen.tuning_db.read.ids import digest, problem_key
from kerngen.workload.workload import Item

KINDS = ("measured", "predicted", "compile")
QUEUE_OF = {"measured": "measure", "predicted": "predict", "compile": "compile"}  # how the queues of a kind begin
CODE_CHARS = 8


@dataclass(frozen=True, slots=True)
class Job:
    """kind: "measured" or "predicted", as the objective; "compile", what may be measured first, compiled ahead.

    problems: their fields, in the workload's order. device: the board that is meant, by its figures; those that measure
    use their own. code: see `code_digest`. model: whose problems they are, for those who look at the queue.
    """

    kind: str
    kernel: str
    problems: tuple[dict[str, Any], ...]
    arch: str
    device: dict[str, Any]
    trials: int
    seed: int
    code: str
    model: str = ""

    @property
    def queue(self) -> str:
        """One a GPU model for measuring; one an arch for what needs no GPU."""
        where = self.device["name"] if self.kind == "measured" else self.arch
        return queue_name(self.kind, where, self.code)

    @property
    def id(self) -> str:
        """The same work has the same id, whoever asks for it."""
        return digest({k: v for k, v in asdict(self).items() if k != "model"})

    @property
    def lock(self) -> str:
        """Two jobs with the same one are not done at the same time."""
        static_key = problem_key(find_kernel(self.kernel), self.items()[0].problem).static_key
        return digest(["compile" if self.kind == "compile" else "tune", static_key, self.device, self.kind])

    def items(self) -> list[Item]:
        problem_type = find_kernel(self.kernel).problem_type
        return [Item(self.kernel, problem_type(**fields)) for fields in self.problems]

    def target(self) -> Target:
        return Target.of(Device(**self.device))

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"problems": list(self.problems)}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Job:
        return cls(**{**values, "problems": tuple(values["problems"])})


def queue_name(kind: str, where: str, code: str) -> str:
    return f"{QUEUE_OF[kind]}-{where}-{code}"


def code_digest() -> str:
    """Of all that decides what a job's answer is: kernels, cost model, version. Only workers with the same take it."""
    kernels = {name: find_kernel(name).folder_digest for name in kernel_names()}
    return digest([__version__, MODEL, kernels])[:CODE_CHARS]


def jobs_for(
    items: Iterable[Item], target: Target, kind: str, *, trials: int, seed: int, model: str
) -> list[tuple[Job, list[Item]]]:
    """The jobs of a workload, the most urgent first, each with its items. What no configuration serves is left out."""
    groups: dict[tuple[str, str], list[Item]] = {}
    first: dict[tuple[str, str], tuple[int, int, float]] = {}
    for item in items:
        kernel = find_kernel(item.kernel)
        try:
            default = candidates(kernel, item.problem, target).default
        except ConfigRefused:
            continue
        key = item.kernel, problem_key(kernel, item.problem).static_key
        groups.setdefault(key, []).append(item)
        urgent = urgency(item, lower_bound_us(kernel, item.problem, default, target))
        first[key] = min(first.get(key, urgent), urgent)
    made, code = [], code_digest()
    for key in sorted(groups, key=lambda k: first[k]):
        problems = tuple(fields_of(i.problem) for i in groups[key])
        job = Job(kind, key[0], problems, target.arch.name, fields_of(target.device), trials, seed, code, model)
        made.append((job, groups[key]))
    return made
