"""Figures of the steps that configurations were exchanged in: each one's time alone beside the whole step's with it."""

from __future__ import annotations

from collections.abc import Iterator

from kerngen.arch import Device
from kerngen.report.data import Facts, Trial, pairs
from kerngen.report.figure import (
    MOST_ROWS,
    Figure,
    Table,
    colour,
    device_name,
    digits,
    microseconds,
    number,
    us,
    words,
)
from kerngen.report.svg import Plot
from kerngen.tuning_db.read.values import StepKey


def judged(facts: Facts) -> Iterator[Figure]:
    """One for each step and device, the step that weighs most first."""
    found: dict[tuple[str, Device], list[Trial]] = {}
    for t in _newest([t for t in facts.trials if t.row.stage == "step" and t.us and t.row.step_id in facts.steps]):
        found.setdefault((str(t.row.step_id), t.place.device), []).append(t)
    ordered = sorted(found.items(), key=lambda kv: (-facts.steps[kv[0][0]].weight, facts.steps[kv[0][0]].name))
    for i, ((step_id, device), trials) in enumerate(ordered):
        yield _judged(f"judged-{i}", facts.steps[step_id], device, trials)


def _newest(trials: list[Trial]) -> list[Trial]:
    """Rows of one base compare, so of each problem in a step those of the newest count, as for its winner."""
    last: dict[tuple[str, Device, str | None], tuple[str, str]] = {}
    for t in trials:
        key = t.place.id, t.place.device, t.row.step_id
        last[key] = max(last.get(key, ("", "")), (t.row.at, t.row.base_id or ""))
    return [t for t in trials if last[t.place.id, t.place.device, t.row.step_id][1] == (t.row.base_id or "")]


def _judged(id: str, step: StepKey, device: Device, trials: list[Trial]) -> Figure:
    """A mark is a configuration: its own time over that of what was chosen, and what the step takes with it."""
    table = Table((
        words("kernel"), words("problem"), words("configuration"), microseconds("alone"), number("alone over chosen"),
        microseconds("step with it"), microseconds("step without"), number("the step changes by", "%"), words("what"),
    ))  # fmt: skip
    alone: dict[str, float] = {}  # by problem: of what the step was run with
    for t in trials:
        if t.row.step_us == t.row.base_step_us:
            alone[t.place.id] = t.us or 0.0
    trials = [t for t in trials if t.place.id in alone]
    trials.sort(key=lambda t: (t.place.kernel, t.place.where, _change(t)))
    points = []
    for t in trials:
        slower, change = (t.us or 0.0) / alone[t.place.id], _change(t)
        points.append((slower, change))
        if len(table.rows) < MOST_ROWS:
            what = "winner" if t.is_chosen else "chosen in the step" if not change else "rival"
            table.add(t.place.kernel, t.place.where, pairs(t.row.config), us(t.us), digits(slower, 4),
                      us(t.row.step_us), us(t.row.base_step_us), f"{change:.3f}", what)  # fmt: skip
        else:
            table.num_left_out += 1
    layers = step.props.get("of_layers", step.layers)
    how = "" if step.layers == layers else f", estimated from {step.layers} of its {layers} layers"
    title = step.name
    faster = sum(x < 0.99 and y > 0 for x, y in points)
    text = (
        f"{device_name(device)}: {len(trials)} configurations of {len(alone)} problems, each exchanged by itself in "
        f"what was chosen{how}. {faster} are faster alone by 1 % or more, and slow the step down."
    )
    plot = Plot.of(title, text, ("alone, over what was chosen", "times", [1.0, *(x for x, _ in points)]),
                   ("the step changes by", "%", [0.0, *(y for _, y in points)]), log_x=True)  # fmt: skip
    plot.across("bound", x=1.0)
    plot.across("bound", y=0.0)
    known = len(table.rows)
    plot.marks(points[known:], f"{colour(0)} faint")
    plot.marks(points[:known], f"{colour(0)} faint", first=0)
    plot.marks([p for p, t in zip(points, trials, strict=True) if t.is_chosen], colour(1))
    legend = (colour(0), "rival"), (colour(1), "winner")
    return Figure(id, title, text, plot.render(id), table, device=device_name(device), legend=legend)


def _change(t: Trial) -> float:
    """Of the step, in percent."""
    return 100 * ((t.row.step_us or 0.0) / (t.row.base_step_us or 1.0) - 1)
