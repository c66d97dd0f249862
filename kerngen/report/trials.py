"""Figures of single trials: rooflines, how searches went, what the cost model says of them, which runs wrote them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import log2
from statistics import median

from kerngen.arch import Device
from kerngen.report.data import Facts, Search, Trial, pairs
from kerngen.report.figure import (
    MICROSECONDS,
    MOST_ROWS,
    Figure,
    Table,
    by_kernel_and_device,
    colour,
    device_name,
    digits,
    geometric_mean,
    microseconds,
    number,
    ratio,
    us,
    words,
)
from kerngen.report.svg import BOTTOM, NUM_COLOURS, RIGHT, TOP, WIDTH, Plot, Scale, spread
from kerngen.tuning_db.read.values import OUTCOMES

RUN_ROW = 24.0  # pixels
MOST_RUNS = 24  # of the plot of runs, the newest; the table has all
RUN_CHARS = 12  # of a run that there is room for beside its bar


def rooflines(facts: Facts) -> Iterator[Figure]:
    timed = [t for t in facts.trials if t.us is not None and t.place.cost is not None]
    for i, (kernel, device, trials) in enumerate(by_kernel_and_device(timed)):
        yield _roofline(f"roofline-{i}", kernel, device, trials)


def _roofline(id: str, kernel: str, device: Device, trials: list[Trial]) -> Figure:
    """FLOP/s over FLOPs a byte; of a kernel that has no FLOPs, bytes a second over bytes."""
    has_flops = all(t.place.cost is not None and t.place.cost.flops for t in trials)
    trials = sorted(trials, key=lambda t: (not t.is_chosen, t.place.where, t.us))  # whoever reads on finds the winners
    table = Table((
        words("problem"), words("configuration"), microseconds("time"), microseconds("floor"),
        number("FLOPs a byte"), number("reached", "TFLOP/s"), number("reached", "GB/s"), words("how"),
    ))  # fmt: skip
    points = []
    for t in trials:
        cost, time = t.place.cost, t.us
        if cost is None or time is None:
            raise TypeError("a trial without a time, or of a kernel that is not installed, has no place here")
        gbps, tflops = cost.bytes / time / 1e3, cost.flops / time / 1e6
        points.append((cost.flops / cost.bytes, tflops) if has_flops else (cost.bytes / 1e6, gbps))
        if len(table.rows) < MOST_ROWS:
            how = t.row.provenance + (", winner" if t.is_chosen else "")
            table.add(t.place.where, pairs(t.row.config), us(time), us(t.place.floor_us),
                      digits(cost.flops / cost.bytes, 4), digits(tflops, 4), digits(gbps, 4), how)  # fmt: skip
        else:
            table.num_left_out += 1
    title = f"{kernel} on {device_name(device)}"
    num_problems = len({t.place.id for t in trials})
    text = f"{len(trials)} timings of {num_problems} problems."
    rate = device.mem_gbps
    if has_flops:
        text += f" Memory {rate:.0f} GB/s, tensor cores {device.tensor_tflops:.0f} TFLOP/s."
        low, high = spread([x for x, _ in points], is_log=True)
        ridge = device.tensor_tflops * 1e3 / rate
        edges = [low, ridge, high] if low < ridge < high else [low, high]
        roof = [(x, min(x * rate / 1e3, device.tensor_tflops)) for x in edges]
        plot = Plot.of(title, text, ("FLOPs a byte", "FLOP/B", [x for x, _ in points]),
                       ("reached", "TFLOP/s", [y for _, y in (*points, *roof)]), log_x=True, log_y=True)  # fmt: skip
        plot.line(roof, "roof")
    else:
        text += f" Memory {rate:.0f} GB/s."
        plot = Plot.of(title, text, ("bytes that must move", "MB", [x for x, _ in points]),
                       ("reached", "GB/s", [*(y for _, y in points), rate]), log_x=True, log_y=True)  # fmt: skip
        plot.across("roof", y=rate)
    known = len(table.rows)
    plot.marks(points[known:], f"{colour(0)} faint")
    plot.marks(points[:known], f"{colour(0)} faint", first=0)
    plot.marks([p for p, t in zip(points, trials, strict=True) if t.is_chosen], colour(1))
    legend = (colour(0), "tried"), (colour(1), "winner")
    return Figure(id, title, text, plot.render(id), table, kernel, device_name(device), legend)


# ---- searches


def histories(facts: Facts) -> Iterator[Figure]:
    searches = [s for s in facts.searches if len(s.trials) > 1 and s.best_us is not None]
    for i, (kernel, device, members) in enumerate(by_kernel_and_device(searches)):
        yield _history(f"search-{i}", kernel, device, members)


def _history(id: str, kernel: str, device: Device, searches: list[Search]) -> Figure:
    table = Table((
        words("problem"), number("trials"), number("failed"), microseconds("first"), microseconds("best"),
        number("best found at trial"), words("how"),
    ))  # fmt: skip
    paths = [_progress(s) for s in searches]
    title = f"{kernel} on {device_name(device)}"
    text = (
        f"{len(searches)} searches, {sum(len(s.trials) for s in searches)} trials; half of the searches had their best "
        f"by trial {median(path[-1][0] for path in paths):.0f}."
    )
    longest = max(len(s.trials) for s in searches)
    over = [y for path in paths for _, y in path]
    plot = Plot.of(title, text, ("trial", "number", [1.0, float(longest)]),
                   ("best so far over best found", "times", over), log_y=True)  # fmt: skip
    is_few = len(searches) <= NUM_COLOURS
    for i, (s, path) in enumerate(zip(searches, paths, strict=True)):
        plot.line([*path, (float(len(s.trials)), 1.0)], f"{colour(i if is_few else 0)} faint", is_stepped=True)
    for i, (s, path) in enumerate(zip(searches, paths, strict=True)):
        failed = sum(t.us is None for t in s.trials)
        first = next(t.us for t in s.trials if t.us is not None)
        row = table.add(s.place.where, str(len(s.trials)), str(failed), us(first), us(s.best_us), f"{path[-1][0]:.0f}",
                        s.trials[0].row.provenance)  # fmt: skip
        plot.marks([path[-1]], colour(i if is_few else 0), first=row)
    return Figure(id, title, text, plot.render(id), table, kernel, device_name(device))


def _progress(s: Search) -> list[tuple[float, float]]:
    """(trial, best so far over the best), wherever it improved; the last is where the best was found."""
    found: list[tuple[float, float]] = []
    best = s.best_us
    if best is None:
        raise TypeError("a search in which all failed has no progress")
    for i, t in enumerate(s.trials):
        if t.us is not None and (not found or t.us / best < found[-1][1]):
            found.append((i + 1.0, t.us / best))
    return found


# ---- the cost model


def predictions(facts: Facts) -> Iterator[Figure]:
    both = [t for t in facts.trials if t.predicted_us is not None and t.us is not None]
    for i, (kernel, device, trials) in enumerate(by_kernel_and_device(both)):
        yield _prediction(f"prediction-{i}", kernel, device, trials)


def _prediction(id: str, kernel: str, device: Device, trials: list[Trial]) -> Figure:
    table = Table((
        words("problem"), words("configuration"), microseconds("measured"), microseconds("predicted"),
        number("predicted over measured"),
    ))  # fmt: skip
    pairs_us = [(t, t.us or 0.0, t.predicted_us or 0.0) for t in trials]
    pairs_us.sort(key=lambda p: -abs(log2(p[2] / p[1])))  # the worst first
    for t, measured, predicted in pairs_us[:MOST_ROWS]:
        table.add(t.place.where, pairs(t.row.config), us(measured), us(predicted), ratio(predicted / measured))
    table.num_left_out = len(pairs_us) - len(table.rows)
    ratios = [predicted / measured for _, measured, predicted in pairs_us]
    title = f"{kernel} on {device_name(device)}"
    within = sum(0.5 <= r <= 2 for r in ratios)
    text = (
        f"{len(ratios)} timings; predicted over measured is {geometric_mean(ratios):.2f} in the geometric mean, and "
        f"within a factor of two for {within}."
    )
    every = [v for _, measured, predicted in pairs_us for v in (measured, predicted)]
    plot = Plot.of(title, text, ("measured", MICROSECONDS, every), ("predicted", MICROSECONDS, every), log_x=True,
                   log_y=True)  # fmt: skip
    low, high = plot.x.low, plot.x.high
    plot.line([(low, low), (high, high)], "one")
    for times in (2, 0.5):  # of times all alike, both lie outside
        plot.line([(low, low * times), (high, high * times)], "bound")
    points = [(measured, predicted) for _, measured, predicted in pairs_us]
    plot.marks(points[len(table.rows) :], f"{colour(0)} faint")
    plot.marks(points[: len(table.rows)], f"{colour(0)} faint", first=0)
    return Figure(id, title, text, plot.render(id), table, kernel, device_name(device))


# ---- provenance


def runs(facts: Facts) -> Iterator[Figure]:
    """The newest first."""
    found: dict[tuple[str, Device, str], list[Trial]] = {}
    for t in facts.trials:
        found.setdefault((t.row.run, t.place.device, t.row.provenance), []).append(t)
    if not found:
        return
    table = Table((
        words("run"), words("device"), words("how"), words("from"), words("to"), number("rows"),
        *(number(o) for o in OUTCOMES), number("problems"), words("environment"),
    ))  # fmt: skip
    ordered = sorted(found.items(), key=lambda item: max(t.row.at for t in item[1]), reverse=True)
    title = "Runs, and what became of their trials"
    seen = {o for t in facts.trials for o in (t.row.outcome,)}
    text = (
        f"{len(facts.trials)} rows of {len(found)} runs, on {facts.num_builds} builds by NVRTC "
        f"{' and '.join(facts.nvrtc) or 'none'}; {len(facts.revoked)} revoked."
        + (f" The newest {MOST_RUNS} are drawn." if len(found) > MOST_RUNS else "")
    )
    drawn = ordered[:MOST_RUNS]
    height = TOP + len(drawn) * RUN_ROW + BOTTOM
    most = max(len(rows) for _, rows in drawn)
    plot = Plot(title, text, Scale("trials", "rows", 0.0, most * 1.02, 96.0, WIDTH - RIGHT),
                Scale("runs", "none", 0.0, float(len(drawn)), TOP, height - BOTTOM), height)  # fmt: skip
    for at, ((run, device, provenance), rows) in enumerate(ordered):
        counts = Counter(t.row.outcome for t in rows)
        times = sorted(t.row.at for t in rows)
        environments = {pairs(t.row.environment): None for t in rows if t.row.environment}
        models = {t.row.model: None for t in rows if t.row.model}
        how = f"{provenance} by {', '.join(models)}" if models else provenance
        row = table.add(run or "none", device_name(device), how, times[0][:19], times[-1][:19], str(len(rows)),
                        *(str(counts[o]) for o in OUTCOMES), str(len({t.place.id for t in rows})),
                        "; ".join(environments))  # fmt: skip
        if at >= len(drawn):
            continue
        top, start = TOP + at * RUN_ROW, 0
        for kind, outcome in enumerate(OUTCOMES):
            if counts[outcome]:
                plot.bar(start, start + counts[outcome], top + 4, RUN_ROW - 8, f"{colour(kind)}", "", row)
                start += counts[outcome]
        name = run if len(run) <= RUN_CHARS else f"{run[:5]}…{run[-6:]}"  # the table has it whole
        plot.words(90, top + RUN_ROW / 2 + 4, name or "no run", anchor="end")
    legend = tuple((colour(i), o) for i, o in enumerate(OUTCOMES) if o in seen)
    yield Figure("runs", title, text, plot.render("runs", has_y=False), table, legend=legend)
