"""Shipped results as a database: the first use makes a sealed file of the near board's results files, and keeps it.

Results files are text (prebuilt/README.md); a run reads a sealed file. Making it compiles nothing: each winner has its
configuration and its source's digest, and the first launch compiles it through the compile cache, as it does a default.

    <cache>/prebuilt/<BOARD>-<key>.kgdb     key: of the files, of all that renders their sources, and of the schema

Some twenty seconds of one core go into it, so it is made in shares by as many processes as there are cores.

It is trusted as the compile cache is: where another user may have written it, it is not read, and where it cannot be
kept, it is made in memory, which is said once.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerngen import __version__
from kerngen.arch import Target
from kerngen.compiler.source_digest import source_digest_of
from kerngen.errors import DatabaseError, UnknownName
from kerngen.system.cores import usable_cores
from kerngen.system.files import cache_dir, locked, make_folder
from kerngen.system.interrupts import result_of
from kerngen.system.owner import TRUST_HINT, why_distrusted
from kerngen.system.processes import ProcessDied, Processes
from kerngen.templates import find_kernel
from kerngen.tuning_db.read.boards import Board, nearest_board
from kerngen.tuning_db.read.canonical_fields import named_kernel
from kerngen.tuning_db.read.reader import Reader
from kerngen.tuning_db.read.sealed import SUFFIX, Sealed
from kerngen.tuning_db.read.source import Source

if TYPE_CHECKING:
    from kerngen.compiler.cache import CachedCompiler
    from kerngen.tuning_db.dist.keys import SecretKey
    from kerngen.tuning_db.dist.results_folder import Rebuilt
    from kerngen.tuning_db.read.ids import ProblemKey
    from kerngen.tuning_db.store.store import Store

log = logging.getLogger(__name__)

_DIGITS = 16  # of a key, in file names
SHARE_BYTES, MOST_SHARES = 32 << 10, 8  # of results files; each share takes 1.5 s beside its part
_MIGRATIONS = Path(__file__).with_name("migrations") / "versions"


class Shipped:
    """What kerngen is installed with, among the databases of a run (read/boards.py)."""

    def __init__(self) -> None:
        self._opened: dict[str, list[Source]] = {}
        self._lock = threading.Lock()

    def on(self, target: Target) -> Sequence[Source]:
        if (board := nearest_board(target.device)) is None:
            return ()
        with self._lock:
            if board.name not in self._opened:
                try:
                    self._opened[board.name] = [open_board(board)]
                except DatabaseError as e:
                    log.warning("%s; looking on without it", e.message)
                    self._opened[board.name] = []
            return self._opened[board.name]


def open_board(board: Board) -> Source:
    """The database of a board's results files, made if need be. Raises DatabaseError where they cannot be read."""
    name, key = name_of(board), key_of(board)
    path = path_of(board, key)
    try:
        if (found := _kept(path, key, name)) is not None:
            return found
        with _making(path):
            if (found := _kept(path, key, name)) is None:  # another process was faster
                _make(board, key, path)
                found = _kept(path, key, name)
        if found is not None:
            return found
        why = "cannot be read back"
    except OSError as e:
        why = f"cannot be kept: {e.strerror or e}"
    log.warning("%s %s; what is shipped for %s is made anew by each process (KERNGEN_CACHE_DIR names another place)",
                path, why, board.name)  # fmt: skip
    return in_memory(board)


def prepare(board: Board) -> None:
    """Make the file of `open_board` where it is not there yet. Why it cannot be made is said by whoever opens it."""
    with contextlib.suppress(OSError, DatabaseError):
        key = key_of(board)
        path = path_of(board, key)
        if not path.exists():
            with _making(path):
                if not path.exists():
                    _make(board, key, path)


def open_store(board: Board) -> Store:
    """As open_board, to look at all that it holds. Raises DatabaseError."""
    from kerngen.tuning_db.store.bundles import open_any
    from kerngen.tuning_db.store.store import Store

    found = open_board(board)
    if isinstance(found, Store):  # that could not be kept
        return found
    found.close()
    return open_any(found.where, name=found.name, allow_unsigned=True)


def name_of(board: Board) -> str:
    """What an answer calls it."""
    return f"prebuilt {board.name}"


def key_of(board: Board) -> str:
    """sha256 over the results files, and over what decides what is made of them."""
    hashed = hashlib.sha256(f"{__version__}\0{max(p.name for p in _MIGRATIONS.glob('*.py'))}\0".encode())
    for path in board.files():
        data = path.read_bytes()
        hashed.update(f"{path.name}\0{len(data)}\0".encode() + data)
        with contextlib.suppress(UnknownName):
            hashed.update(source_digest_of(find_kernel(named_kernel(path.name.split(".")[0]))).encode())
    return hashed.hexdigest()


def path_of(board: Board, key: str) -> Path:
    """Where it is kept."""
    return cache_dir() / "prebuilt" / f"{board.name}-{key[:_DIGITS]}{SUFFIX}"


def _kept(path: Path, key: str, name: str) -> Source | None:
    """The file, if it is there, as it was made, and nobody else's."""
    if not path.is_file():
        return None
    if (why := why_distrusted(path)) is not None:
        raise OSError(0, f"it {why} ({TRUST_HINT})")
    try:
        if Sealed.open(path).header.get("prebuilt") != key:
            raise DatabaseError(f"{path} is of other results files")
        return Reader.open(path, name=name, allow_unsigned=True)  # of this user's, as the compile cache
    except DatabaseError as e:
        log.warning("%s; it is made anew", e.message)
        return None


@contextlib.contextmanager
def _making(path: Path) -> Iterator[None]:
    """One process at a time makes it; the others wait. Raises OSError where that folder cannot be written to."""
    make_folder(path.parent)
    with locked(path.parent / ".lock"):
        yield


def _make(board: Board, key: str, path: Path) -> None:
    """Write it, whole or not at all, and remove what was made of older results files. Raises OSError, DatabaseError."""
    from kerngen.tuning_db.dist.export import shipment  # SQLAlchemy is for those who need it

    log.info("preparing what is shipped for %s, once for this version: some ten seconds (%s)", board.name, path)
    with shipment() as made:
        _fill(board, made.store)
        made.seal(path, {"prebuilt": key}, (), has_lines=True)
    for old in path.parent.glob(f"{board.name}-*{SUFFIX}"):
        if old != path:
            with contextlib.suppress(OSError):  # another kerngen's, perhaps of another user
                old.unlink()


def compile_board(
    board: Board,
    out: Path,
    compiler: CachedCompiler,
    keys: Iterable[SecretKey],
    *,
    cells: Collection[str] | None = None,
    say: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Rebuilt:
    """Seal in `out` what the results files say, with the machine code of each winner. cells, say: as
    results_folder.build.

    Raises DatabaseError where there is nothing of that, CompileError, OSError.
    """
    from kerngen.tuning_db.dist.export import shipment
    from kerngen.tuning_db.dist.results_folder import build, read

    with shipment() as made:
        wanted = (lambda key: True) if cells is None else (lambda key: key.cell in cells)
        done = build(read([board.folder]), made.store, compiler, say, wanted)
        if not done.winners:
            raise DatabaseError(f"{board.folder} has no winners for that")
        made.seal(out, {"name": f"prebuilt-{board.name}", "contents": made.contents() | {"models": []}}, keys)
    return done


def in_memory(board: Board) -> Store:
    """The same as a Store of this process alone. Raises DatabaseError."""
    store = _store_in_memory(str(board.folder), name_of(board))
    _fill(board, store)
    return store


def _store_in_memory(where: str, name: str = "") -> Store:
    from kerngen.tuning_db.store import engine, migrate
    from kerngen.tuning_db.store.store import Store

    with engine.clear_errors(where):
        made = migrate.settle(engine.in_memory(), where, read_only=False)
        return Store(made, where, name=name, read_only=False, override=False)


def _share(board: Board, index: int, of: int) -> tuple[Rebuilt, dict[str, list[dict[str, Any]]]]:
    """Of a board's static problems those whose keys are `index` modulo `of`: what became of them, and the rows that
    they give, by table.
    """
    from kerngen.tuning_db.dist.results_folder import build, read
    from kerngen.tuning_db.store import schema

    def is_mine(key: ProblemKey) -> bool:
        return int(hashlib.sha256(key.static_key.encode()).hexdigest()[:8], 16) % of == index

    with _store_in_memory(os.fspath(board.folder)) as store:
        done = build(read([board.folder]), store, None, wanted=is_mine)
        with store.reading() as connection:
            rows = {
                table.name: [dict(row._mapping) for row in connection.execute(table.select())]
                for table in schema.metadata.sorted_tables
            }
    return done, rows


def _fill(board: Board, store: Store) -> Rebuilt:
    from kerngen.tuning_db.dist.results_folder import Rebuilt, build, read
    from kerngen.tuning_db.store import schema

    size = sum(path.stat().st_size for path in board.files())
    shares = min(usable_cores(), MOST_SHARES, size // SHARE_BYTES + 1)
    if shares == 1:
        done = build(read([board.folder]), store, None)
    else:
        done = Rebuilt()
        with Processes(shares) as processes, store.writing() as connection:
            asked = [processes.submit(_share, board, index, shares) for index in range(shares)]
            for index, future in enumerate(asked):
                try:
                    made, rows = result_of(future)
                except ProcessDied:  # killed, or none can be started here
                    made, rows = _share(board, index, shares)
                done.add(made)
                for table in schema.metadata.sorted_tables:
                    if rows[table.name]:  # what several shares rest on has one name in all
                        connection.execute(table.insert().prefix_with("OR IGNORE"), rows[table.name])
    if done.faults:
        log.warning("%s: %d statements of its files do not hold, and are left out: %s", board.folder, len(done.faults),
                    done.faults[0])  # fmt: skip
    if done.stale:
        log.debug("%s: %d winners are of bodies that have another revision today", board.folder, len(done.stale))
    return done
