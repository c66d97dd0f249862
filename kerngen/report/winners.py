"""Figures of the winners: a step's kernels, time along tuned points, what tuning gained, how near the floor it came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from kerngen.report.data import Facts, Point, in_order, pairs
from kerngen.report.figure import (
    MICROSECONDS,
    Figure,
    Table,
    by_kernel_and_device,
    colour,
    device_name,
    duration,
    geometric_mean,
    microseconds,
    number,
    percent,
    ratio,
    unit_of,
    us,
    words,
)
from kerngen.report.steps import Shown
from kerngen.report.svg import BOTTOM, NUM_COLOURS, RIGHT, TOP, WIDTH, Plot, Scale, spread

ROW = 22.0  # pixels, of a plot that has a row a kernel
NAMES = 112.0  # pixels, for what its rows are called


# ---- the step


def steps(shown: Sequence[Shown]) -> Iterator[Figure]:
    """Kernels have the same colour in all of them: those that take most one of their own, the others the last."""
    total = Counter[str]()
    for s in shown:
        for part in s.parts:
            total[part.kernel] += round(1e6 * part.us / s.us)
    colours = {name: colour(min(at, NUM_COLOURS - 1)) for at, (name, _) in enumerate(total.most_common())}
    for i, s in enumerate(shown):
        yield _step(i, s, colours)


def _step(i: int, s: Shown, colours: dict[str, str]) -> Figure:
    table = Table((
        words("kernel"), number("launches"), microseconds("time"), microseconds("floor"),
        number("of the step", "%"), number("of its time, the floor", "%"), words("how"),
    ))  # fmt: skip
    whole, floor = s.us, s.floor_us
    unit, per = unit_of(whole)
    title = f"{s.model}, {s.step}"
    of = s.num_known + sum(s.unknown.values())
    text = (
        f"{device_name(s.device)}: {duration(whole)} for {s.num_known} of {of} launches, whose floor is "
        f"{duration(floor)}."
    )
    if s.unknown:
        text += f" Without a winner here: {', '.join(f'{k} ({n})' for k, n in sorted(s.unknown.items()))}."
    height = TOP + 3 * ROW + 34 + BOTTOM
    plot = Plot(title, text, Scale("time of the step's kernels", unit, 0.0, whole / per * 1.02, 44.0, WIDTH - RIGHT),
                Scale("bars", "none", 0.0, 1.0, height - BOTTOM, TOP), height)  # fmt: skip
    at_time = at_floor = 0.0
    for part in s.parts:
        row = table.add(part.kernel, str(part.launches), us(part.us), us(part.floor_us), percent(part.us / whole),
                        percent(part.floor_us / part.us), part.provenance)  # fmt: skip
        kind = colours[part.kernel]
        plot.bar(at_time, at_time + part.us / per, TOP + 8, ROW + 8, kind, part.kernel, row)
        plot.bar(at_floor, at_floor + part.floor_us / per, TOP + ROW + 26, ROW + 8, f"{kind} floor", "", row)
        at_time += part.us / per
        at_floor += part.floor_us / per
    plot.words(38, TOP + 8 + ROW / 2 + 8, "time", anchor="end")
    plot.words(38, TOP + ROW + 26 + ROW / 2 + 8, "floor", anchor="end")
    legend = tuple((colours[p.kernel], p.kernel) for p in s.parts)
    id = f"step-{i}"
    return Figure(id, title, text, plot.render(id, has_y=False), table, device=device_name(s.device), legend=legend)


# ---- along tuned points


def lines(facts: Facts) -> Iterator[Figure]:
    count = 0
    for kernel, device, points in by_kernel_and_device(facts.points):
        grouped: dict[str, list[Point]] = {}
        for p in points:
            if p.place.key.dynamic is not None:
                grouped.setdefault(p.place.static_key, []).append(p)
        filed = {key: rows[0].place.key.filed().static for key, rows in grouped.items()}
        for key, rows in grouped.items():
            yield _line(f"tokens-{count}", kernel, device_name(device), pairs(filed[key]), rows)
            count += 1


def _line(id: str, kernel: str, device: str, static: str, points: list[Point]) -> Figure:
    along = points[0].place.key.dynamic_name
    unit = {"num_tokens": "tokens", "kv_len": "keys"}.get(along, "elements")
    table = Table((
        words("other fields"), number(along, unit), microseconds("winner"), microseconds("default"),
        microseconds("floor"), words("how"), words("configuration"),
    ))  # fmt: skip
    by_runtime: dict[str, list[Point]] = {}  # the legend's order
    for p in sorted(points, key=lambda p: (in_order(pairs(p.place.key.runtime)), p.place.key.dynamic or 0)):
        by_runtime.setdefault(pairs(p.place.key.runtime), []).append(p)
    shown = [v for p in points for v in (p.us, p.default_us, p.place.floor_us) if v is not None]
    title = f"{kernel}: {static}"
    best, worst = min(p.us for p in points), max(p.us for p in points)
    text = f"{device}: {len(points)} tuned points, from {duration(best)} to {duration(worst)}."
    along_all = [float(p.place.key.dynamic or 0) for p in points]
    plot = Plot.of(title, text, (along, unit, along_all), ("time", MICROSECONDS, shown), log_x=min(along_all) > 0,
                   log_y=True, binary_x=True)  # fmt: skip
    for i, (runtime, rows) in enumerate(by_runtime.items()):
        at = [float(p.place.key.dynamic or 0) for p in rows]
        plot.line([(x, p.place.floor_us) for x, p in zip(at, rows, strict=True) if p.place.floor_us],
                  f"{colour(i)} floor")  # fmt: skip
        plot.line([(x, p.default_us) for x, p in zip(at, rows, strict=True) if p.default_us], f"{colour(i)} default")
        plot.line([(x, p.us) for x, p in zip(at, rows, strict=True)], colour(i))
        first = len(table.rows)
        for p in rows:
            how = p.provenance + (", stale" if p.stale else "")
            table.add(runtime, str(p.place.key.dynamic), us(p.us), us(p.default_us), us(p.place.floor_us), how,
                      pairs(p.config))  # fmt: skip
        plot.marks([(x, p.us) for x, p in zip(at, rows, strict=True)], colour(i), first=first)
    legend = tuple((colour(i), runtime) for i, runtime in enumerate(by_runtime) if runtime)
    return Figure(id, title, text, plot.render(id), table, kernel, device, legend)


# ---- what tuning gained, and how near the floor it came: a row a kernel


def gains(facts: Facts) -> Iterator[Figure]:
    for i, device in enumerate(facts.devices):
        points = [p for p in facts.points if p.place.device == device and p.default_us]
        if not points:
            continue
        rows = _by_kernel(points)
        table = Table((
            words("kernel"), words("problem"), microseconds("default"), microseconds("winner"), number("gain"),
            words("differs from the default"),
        ))  # fmt: skip
        values = {k: [(p.default_us or p.us) / p.us for p in ps] for k, ps in rows.items()}
        changed = sum(not p.is_default for p in points)
        every = [v for vs in values.values() for v in vs]
        title = f"Gain over the default configuration on {device_name(device)}"
        text = (f"{changed} of {len(points)} winners are not the default; all together they are "
                f"{geometric_mean(every):.3f} times as fast.")  # fmt: skip
        plot = _row_plot(
            title, text, "default's time over the winner's", "times", [*every, 1.0], len(rows), ROW, is_log=True
        )
        plot.across("one", x=1.0)
        for at, (kernel, ps) in enumerate(rows.items()):
            first = len(table.rows)
            for p, gain in zip(ps, values[kernel], strict=True):
                table.add(kernel, p.place.where, us(p.default_us), us(p.us), ratio(gain),
                          "no" if p.is_default else "yes")  # fmt: skip
            plot.marks([(v, at + 0.5) for v in values[kernel]], f"{colour(0)} faint", first=first)
            plot.marks([(geometric_mean(values[kernel]), at + 0.5)], "middle")
            _named(plot, at, kernel, ROW)
        id = f"gain-{i}"
        yield Figure(id, title, text, plot.render(id, has_y=False), table, device=device_name(device))


def shares(facts: Facts) -> Iterator[Figure]:
    """All devices in one plot: a colour each, and a row within each kernel's."""
    points = [p for p in facts.points if p.share is not None]
    if not points:
        return
    devices = [d for d in facts.devices if any(p.place.device == d for p in points)]
    table = Table((
        words("kernel"), words("device"), number("winners"), number("measured"), number("configurations"),
        words("the commonest of them"), number("it wins"), number("floor, of the median's time", "%"),
        number("of the best's", "%"),
    ))  # fmt: skip
    rows = _by_kernel(points)
    measured = sum(p.provenance == "measured" for p in points)
    title = "Winners by architecture"
    text = (
        f"{len(points)} winners of {len(rows)} kernels on {len(devices)} devices, {measured} measured and "
        f"{len(points) - measured} predicted."
    )
    height = ROW if len(devices) == 1 else 8 + 11.0 * len(devices)
    every = [100 * (p.share or 0.0) for p in points]
    plot = _row_plot(title, text, "floor, as a part of the winner's time", "%", [*every, 0.0, 100.0], len(rows), height)
    for at, (kernel, members) in enumerate(rows.items()):
        for i, device in enumerate(devices):
            here = [p for p in members if p.place.device == device]
            if not here:
                continue
            values = [100 * (p.share or 0.0) for p in here]
            configs = Counter(pairs(p.config) for p in here)
            commonest, count = configs.most_common(1)[0]
            row = table.add(kernel, device_name(device), str(len(here)),
                            str(sum(p.provenance == "measured" for p in here)), str(len(configs)), commonest,
                            str(count), f"{median(values):.1f}", f"{max(values):.1f}")  # fmt: skip
            y = at + (i + 0.5) / len(devices) if len(devices) == 1 else at + (9.5 + 11.0 * i) / height
            plot.marks([(v, y) for v in values], f"{colour(i)} faint")
            plot.marks([(median(values), y)], f"middle {colour(i)}", first=row)
        _named(plot, at, kernel, height)
    legend = tuple((colour(i), device_name(d)) for i, d in enumerate(devices))
    yield Figure("arch", title, text, plot.render("arch", has_y=False), table, legend=legend)


def _by_kernel(points: Sequence[Point]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for p in points:
        found.setdefault(p.place.kernel, []).append(p)
    return found


def _row_plot(
    title: str,
    text: str,
    name: str,
    unit: str,
    values: list[float],
    rows: int,
    row_height: float,
    *,
    is_log: bool = False,
) -> Plot:
    height = TOP + rows * row_height + BOTTOM
    low, high = spread(values, is_log=is_log)
    return Plot(title, text, Scale(name, unit, low, high, NAMES, WIDTH - RIGHT, is_log),
                Scale("kernels", "none", 0.0, float(rows), TOP, height - BOTTOM), height)  # fmt: skip


def _named(plot: Plot, at: int, name: str, row_height: float) -> None:
    plot.words(NAMES - 6, TOP + (at + 0.5) * row_height + 4, name, anchor="end")
