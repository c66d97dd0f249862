"""All figures of a page, in the order of reading."""

from __future__ import annotations

from collections.abc import Sequence

from kerngen.report import step_trials, trials, winners
from kerngen.report.data import Facts
from kerngen.report.figure import Section
from kerngen.report.steps import Shown


def sections(facts: Facts, steps: Sequence[Shown]) -> list[Section]:
    return [
        Section(
            "steps", "The step against its floor",
            "What the kernels of one step take, each as it was timed alone, and the floor of the same launches: each "
            "one's bytes at the rate of the device's memory, or its FLOPs at that of its tensor cores, whichever takes "
            "longer.",
            tuple(winners.steps(steps)), "No step of a model has a kernel with a winner here.",
        ),
        Section(
            "judged", "Judged by the step",
            "Where the steps of a model chose: what each finalist takes alone, over what was chosen, and by how much "
            "the whole step is slower with it. Marks left of one line are faster alone, marks above the other lose.",
            tuple(step_trials.judged(facts)), "Nothing here was judged by a step of a model.",
        ),
        Section(
            "tokens", "Time against tokens",
            "The winners along each line of tuned points. Dashed: their floor. Dotted: the default configuration, "
            "where it was tried.",
            tuple(winners.lines(facts)), "There are no winners here.",
        ),
        Section(
            "gain", "Default against tuned",
            "How many times as long the default configuration takes as the winner, at each tuned point where both have "
            "a time. The large dot is the geometric mean.",
            tuple(winners.gains(facts)), "No winner here has the default configuration's time beside it.",
        ),
        Section(
            "arches", "Winners by architecture",
            "How near the winners come to their floor, on each device: a dot for every tuned point, a large one for "
            "their median.",
            tuple(winners.shares(facts)), "There are no winners of installed kernels here.",
        ),
        Section(
            "roofline", "Roofline",
            "Every configuration that has a time, at its problem's FLOPs a byte, under what the device's memory and "
            "tensor cores allow; a kernel without FLOPs by its bytes.",
            tuple(trials.rooflines(facts)), "No configuration of an installed kernel has a time here.",
        ),
        Section(
            "searches", "History of each search",
            "The best time that a search had after so many trials, over the best that it found.",
            tuple(trials.histories(facts)),
            "No search with more than one trial is kept here: a database that was exported has its winners alone.",
        ),
        Section(
            "prediction", "Predicted against measured",
            "What today's cost model predicts for each build that was measured. On the line both agree; at the dashed "
            "ones they differ by a factor of two.",
            tuple(trials.predictions(facts)), "Nothing here was measured.",
        ),
        Section(
            "provenance", "Where the numbers come from",
            "The runs that wrote the rows, and what became of their trials.",
            tuple(trials.runs(facts)), "There are no rows.",
        ),
    ]  # fmt: skip
