"""check_pages: the first page index, slot or length of a forward that is out of bounds, before anything uses it.

Three launches: mark_writers notes which sequence writes each page, check_pages looks at all tables, lengths and slots
and leaves the first violation as a key, name_violation makes a record of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kerngen.arch import Arch, Target
from kerngen.templates.common.rows.spec import INT32_MAX, require
from kerngen.templates.kernel import Arg, Body, Cost, Launch, args

# Kinds of violation, in the order of their precedence; 0 is none.
LENGTH, PAGE, NULL_PAGE, SHARED, SLOT = range(1, 6)
# What a record holds, int64 each.
FIELDS = ("violation", "row", "pool", "entry", "value", "bound")
NOBODY = INT32_MAX  # in `writers`
ROW_BITS, ENTRY_BITS = 20, 31  # of a key: kind, row, pool, entry from its highest bits on
MAX_ROWS = 1 << ROW_BITS


@dataclass(frozen=True, slots=True)
class Problem:
    """tables [2, batch, max_pages] int32, kv_lens [batch] int64, cu_seqlens [batch + 1] int32, slots [2, num_tokens]
    int64 of two pools of pages -> record [6] int64 (FIELDS), and in place writers [2, pages] int32.

    Sequence b has tokens cu_seqlens[b] to cu_seqlens[b + 1], the last ones of kv_lens[b] positions. Position p lies in
    row p % page_size of page table[p / page_size]. Looked for, in this order of precedence, and of one kind by row,
    pool and entry:

    LENGTH: a length below the number of new tokens, or above max_kv_len; nothing else is looked at in that sequence.
    PAGE: an entry up to the length that is not in 0..num_pages - 1 of its pool. NULL_PAGE: page 0, which nobody owns,
    where earlier tokens are read: all of them, or in pool 1 the last `lookback` before the new ones. SHARED: a page
    other than 0 that is read or written, and that another sequence writes. SLOT: a token's slot is not the one that the
    table has for its position. Entries beyond the length are not read.

    A record that holds a violation stays as it is. Rows count from first_row. writers: the least row that writes each
    page, NOBODY for none, to which this call's rows are added.
    """

    RUNTIME: ClassVar[tuple[str, ...]] = ("batch",)
    DYNAMIC: ClassVar[str] = "batch"

    batch: int = 1

    def __post_init__(self) -> None:
        require(0 < self.batch < MAX_ROWS, f"batch={self.batch} is not in 1..{MAX_ROWS - 1}")


@dataclass(frozen=True, slots=True)
class Config:
    threads: int = 256  # of a block, which takes one sequence


SPACE = {"threads": (128, 256)}
_TABLES = (
    Arg("tables", "ptr", align=4, contiguous=False),
    Arg("kv_lens", "ptr", align=8),
    Arg("cu_seqlens", "ptr", align=4),
    *args("i64", "table_stride", "row_stride"),
    *args("i32", "max_kv_len", "num_full_pages", "num_sliding_pages", "page_size", "first_row"),
)
ARGS = {
    "mark_writers": (Arg("writers", "ptr", align=4), *_TABLES, Arg("max_num_pages", "i32")),
    "check_pages": (
        Arg("writers", "ptr", align=4),
        *_TABLES,
        *args("i32", "max_num_pages", "lookback", "num_tokens"),
        Arg("slots", "ptr", align=8),
        Arg("workspace", "ptr"),
    ),
    "name_violation": (
        Arg("record", "ptr", align=8),
        Arg("writers", "ptr", align=4),
        *_TABLES,
        *args("i32", "max_num_pages", "num_tokens"),
        Arg("slots", "ptr", align=8),
        Arg("workspace", "ptr"),
    ),
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("record", "writers")


def constants(problem: Any, config: Config, arch: Arch) -> dict[str, int]:
    return {
        "LENGTH": LENGTH, "PAGE": PAGE, "NULL_PAGE": NULL_PAGE, "SHARED": SHARED, "SLOT": SLOT, "NOBODY": NOBODY,
        "NUM_FIELDS": len(FIELDS), "ROW_BITS": ROW_BITS, "ENTRY_BITS": ENTRY_BITS,
    }  # fmt: skip


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    return None  # every point of SPACE fits every arch: a few registers a thread


def default_config(problem: Problem, target: Target) -> Config:
    return Config()


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    rows, pdl = (problem.batch, 1, 1), target.arch.has_pdl
    return (
        Launch("mark_writers", rows, (config.threads, 1, 1), 0, pdl=pdl),
        Launch("check_pages", rows, (config.threads, 1, 1), 0, pdl=pdl),
        Launch("name_violation", (1, 1, 1), (32, 1, 1), 0, pdl=pdl),
    )


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """The complement of the least key; zero before and after every call."""
    return 8


def cost(problem: Problem) -> Cost:
    """Of sequences that have one token each and one entry: tables and slots, a length, and who writes."""
    return Cost(problem.batch * (2 * 4 + 2 * 8 + 8 + 4 + 2 * 4), 0)
