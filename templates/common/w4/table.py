"""Tables whose rows are read one by one: of floats, or packed as w4a16_gemm multiplies them (pack.py), so that one copy
serves a model's embedding and its output head. Problems say which in two fields: `table`, and `group_size`.
"""

from __future__ import annotations

from kerngen.templates.common.rows.spec import ELEMENT_BYTES, require
from kerngen.templates.common.w4.tiling import GROUP_SIZES, STRIP, WEIGHTS

DENSE = "dense"
TABLES = (DENSE, *WEIGHTS)
TABLE_GROUPS = (16, *GROUP_SIZES)


class OfTable:
    """A problem with such a table."""

    __slots__ = ()
    table: str
    group_size: int

    @property
    def is_packed(self) -> bool:
        return self.table != DENSE


def require_table(table: str, group_size: int, rows: int, columns: int) -> None:
    """Raises ProblemError unless a table of rows x columns may be stored so. group_size: 0 of a dense one."""
    require(table in TABLES, f"table={table} is not one of {', '.join(TABLES)}")
    if table == DENSE:
        require(group_size == 0, f"group_size={group_size}: a dense table has no groups")
        return
    sizes = TABLE_GROUPS if WEIGHTS[table].bits == 8 else GROUP_SIZES
    require(group_size in sizes, f"group_size={group_size} is not one of {sizes}")
    require(rows % STRIP == 0, f"a packed table has {rows} rows, not a multiple of {STRIP}")
    unit = max(STRIP, group_size)
    require(columns % unit == 0, f"a packed table has {columns} columns, not a multiple of {unit}")


def row_bytes(table: str, group_size: int, columns: int, dtype: str) -> int:
    """That a row read alone takes. Of a packed one, half as many sectors are read as it has bytes beside it, or a
    quarter: as much as the row has in 16 bits; and a sector of 32 bytes for each group's scale.
    """
    if table == DENSE:
        return columns * ELEMENT_BYTES[dtype]
    return 2 * columns + 32 * (columns // group_size)
