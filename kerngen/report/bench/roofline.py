"""A roofline of what ran: FLOP/s over FLOPs a byte, under the read and the matmul measured in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kerngen.report.bench.runs import Limits
from kerngen.report.figure import Figure, Table, colour, digits, microseconds, number, us, words
from kerngen.report.svg import NUM_COLOURS, Plot, spread


@dataclass(frozen=True, slots=True)
class Dot:
    """kind: what shares a colour. bytes: that must move; flops: useful ones."""

    kind: str
    name: str
    us: float
    bytes: float
    flops: float


def roofline(id: str, title: str, dots: Sequence[Dot], limits: Limits) -> Figure | None:
    """None where nothing has FLOPs, or a limit is not known. Kinds beyond the colours share the last one."""
    known = [d for d in dots if d.flops and d.bytes]
    if not known or limits.read_gbps is None or limits.matmul_tflops is None:
        return None
    left = len({d.name for d in dots}) - len({d.name for d in known})
    text = (f"FLOPs that are useful over bytes that must move. {limits.sentence()}"
            + (f" {left} more have no FLOPs to count." if left else ""))  # fmt: skip
    kinds = list(dict.fromkeys(d.kind for d in known))
    colours = {kind: colour(min(at, NUM_COLOURS - 1)) for at, kind in enumerate(kinds)}
    ridge = limits.matmul_tflops * 1e3 / limits.read_gbps
    points = {d: (d.flops / d.bytes, d.flops / d.us / 1e6) for d in known}
    low, high = spread([*(x for x, _ in points.values()), ridge], is_log=True)
    roof = [(x, min(x * limits.read_gbps / 1e3, limits.matmul_tflops)) for x in (low, ridge, high)]
    plot = Plot.of(title, text, ("FLOPs a byte", "FLOP/B", [low, high]),
                   ("reached", "TFLOP/s", [*(y for _, y in points.values()), *(y for _, y in roof)]),
                   log_x=True, log_y=True)  # fmt: skip
    plot.line(roof, "roof")
    table = Table((
        words("what"), microseconds("time"), number("FLOPs a byte"), number("reached", "TFLOP/s"),
        number("reached", "GB/s"), number("of the roof there", "%"),
    ))  # fmt: skip
    for kind in kinds:
        first = len(table.rows)
        here = [d for d in known if d.kind == kind]
        for d in here:
            x, y = points[d]
            top = min(x * limits.read_gbps / 1e3, limits.matmul_tflops)
            table.add(d.name, us(d.us), digits(x, 4), digits(y, 4), digits(d.bytes / d.us / 1e3, 4),
                      f"{100 * y / top:.1f}")  # fmt: skip
        plot.marks([points[d] for d in here], colours[kind], first=first)
    shown = [(colours[k], k) for k in kinds[: NUM_COLOURS - 1]]
    if len(kinds) >= NUM_COLOURS:
        shown.append((colour(NUM_COLOURS - 1), ", ".join(kinds[NUM_COLOURS - 1 :])))
    return Figure(id, title, text, plot.render(id), table, legend=tuple(shown))
