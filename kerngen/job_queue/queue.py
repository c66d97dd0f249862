"""The jobs in PostgreSQL, in a schema beside the tuning database's: Procrastinate's tables, and two of our own.

    procrastinate_jobs, _workers, _events    what is to be done, by whom it is done, what became of it
    kerngen_worker                           who the workers are, and which queues they take jobs from
    kerngen_progress                         how far a job is, and what came of it

The schema is called like the database's own with `_queue` behind (`kerngen_queue` where that is `public`), so several
tuning databases may share a server. Nothing here is worth keeping: what was learned is in the tuning database.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kerngen.errors import DatabaseError, UsageError
from kerngen.job_queue.job import Job
from kerngen.system.urls import hide_password, without_password
from kerngen.tuning_db.read.places import NO_ANSWER

if TYPE_CHECKING:
    import procrastinate
    import psycopg

log = logging.getLogger(__name__)

TUNE, COMPILE = "kerngen.tune", "kerngen.compile"  # Procrastinate's names of the two tasks
HEARTBEAT_S = 10.0  # how often a worker says that it lives
SILENT = 6  # heartbeats after which one that says nothing is dead, and its job another's
KEPT_HOURS = 7 * 24  # of what is over, in the queue; whoever waits for others of its submit still sees how it ended
_LOCK = 0x6B675175657565  # "kgQueue": whoever makes the schema, or takes over jobs, does so alone
_NEEDS = "pip install 'kerngen[pg]'"
_TABLES = """
CREATE TABLE IF NOT EXISTS kerngen_worker (
    name text PRIMARY KEY, queues text[] NOT NULL, about text NOT NULL, at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE IF NOT EXISTS kerngen_progress (
    job_id bigint PRIMARY KEY, worker text NOT NULL, num_done integer NOT NULL, num_total integer NOT NULL,
    what text NOT NULL, result jsonb, at timestamptz NOT NULL DEFAULT now()
);
"""
_STATES = """
SELECT j.id, j.queue_name, j.status::text AS status, j.attempts, j.args, p.worker, p.num_done, p.num_total, p.what,
       p.result
FROM procrastinate_jobs j LEFT JOIN kerngen_progress p ON p.job_id = j.id
WHERE j.task_name = ANY(%(tasks)s) AND (%(ids)s::bigint[] IS NULL OR j.id = ANY(%(ids)s)) ORDER BY j.id
"""


@dataclass(frozen=True, slots=True)
class State:
    """One job, and where it stands. status: todo, doing, succeeded, failed, cancelled or aborted.

    num_done of num_total: its trials, as far as its worker has told. result: what the worker said at its end.
    """

    id: int
    job: Job
    queue: str
    status: str
    attempts: int
    worker: str
    num_done: int
    num_total: int
    what: str
    result: dict[str, Any] | None

    @property
    def is_over(self) -> bool:
        return self.status not in ("todo", "doing")


@dataclass(frozen=True, slots=True)
class Worker:
    """One that said within SILENT heartbeats that it lives."""

    name: str
    queues: tuple[str, ...]
    about: str


class Queue:
    """The queue of one tuning database. Threads do not share one."""

    def __init__(self, conninfo: str, connection: psycopg.Connection[dict[str, Any]]) -> None:
        import procrastinate

        self.conninfo, self._connection = conninfo, connection
        self._app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(
            conninfo=conninfo, min_size=1, max_size=1))  # fmt: skip
        self._app.open()

    @classmethod
    def open(cls, url: str) -> Queue:
        """The queue beside the tuning database that `url` names, made if it is not there yet.

        Raises UsageError for what is no PostgreSQL URL, DatabaseError where it cannot be had.
        """
        psycopg, _ = _require()
        with _clear(url, hint=NO_ANSWER):
            conninfo = _conninfo(url)
            with psycopg.connect(conninfo, autocommit=True) as first:
                schema = _schema_name(first)
                _make(first, schema)
            conninfo = _conninfo(url, schema)
            return cls(conninfo, psycopg.connect(conninfo, autocommit=True, row_factory=psycopg.rows.dict_row))

    def close(self) -> None:
        self._app.close()
        self._connection.close()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- for those who ask for work

    def submit(self, jobs: Sequence[Job]) -> list[int]:
        """Put `jobs` into the queue, the first to be taken first; returns their ids.

        One that is in it already, waiting or being done, is not put there again: its id is that one's. What has been
        over for long is cleared away.
        """
        from procrastinate.exceptions import AlreadyEnqueued

        self.clear()
        with _clear("the queue"):
            found = {s.job.id: s.id for s in self.states() if not s.is_over}
            for at, job in enumerate(jobs):
                if job.id in found:
                    continue
                task = self._app.configure_task(
                    TUNE if job.kind != "compile" else COMPILE, queue=job.queue, lock=job.lock, queueing_lock=job.id,
                    priority=len(jobs) - at,
                )  # fmt: skip
                try:
                    found[job.id] = task.defer(job=job.as_json())
                except AlreadyEnqueued:  # by another who submits the same at this moment
                    found |= {s.job.id: s.id for s in self.states() if not s.is_over}
        return [found[job.id] for job in jobs]

    def states(self, ids: Iterable[int] | None = None) -> list[State]:
        """Where these jobs stand, or all that the queue knows, the oldest first.

        Jobs in the words of another version of kerngen are left out: its workers do them.
        """
        with _clear("the queue"):
            asked = {"tasks": [TUNE, COMPILE], "ids": None if ids is None else list(ids)}
            rows = self._connection.execute(_STATES, asked).fetchall()
        found = []
        for r in rows:
            try:
                job = Job.of_json(r["args"]["job"])
            except (TypeError, KeyError) as e:
                log.info("job %s is another version's: %s", r["id"], e)
                continue
            found.append(State(r["id"], job, r["queue_name"], r["status"], r["attempts"], r["worker"] or "",
                               r["num_done"] or 0, r["num_total"] or 0, r["what"] or "", r["result"]))  # fmt: skip
        return found

    def clear(self, hours: int = KEPT_HOURS) -> None:
        """Forget the jobs that have been over for so long, and workers that have been silent as long. Another host that
        does so at this moment does it for both.
        """
        from procrastinate.sql import queries

        over = ["succeeded", "failed", "cancelled", "aborted"]
        with self.alone() as got:
            if not got:
                return
            with _clear("the queue"):
                # Of Procrastinate's own, whose method for it is for coroutines alone.
                self._app.connector.execute_query(queries["delete_old_jobs"], nb_hours=hours, queue=None, statuses=over)
                self._connection.execute(
                    "DELETE FROM kerngen_progress WHERE job_id NOT IN (SELECT id FROM procrastinate_jobs)"
                )
                self._connection.execute(
                    "DELETE FROM kerngen_worker WHERE at < now() - make_interval(hours => %s)", [hours]
                )

    def cancel(self, ids: Iterable[int]) -> int:
        """Take these out of the queue, and tell those who are at one to stop. Returns how many that concerned."""
        with _clear("the queue"):
            return sum(self._app.job_manager.cancel_job_by_id(id, abort=True) for id in ids)

    def workers(self, heartbeat_s: float = HEARTBEAT_S) -> list[Worker]:
        """Those that live."""
        with _clear("the queue"):
            rows = self._connection.execute(
                "SELECT * FROM kerngen_worker WHERE at > now() - make_interval(secs => %s) ORDER BY name",
                [SILENT * heartbeat_s],
            ).fetchall()
        return [Worker(r["name"], tuple(r["queues"]), r["about"]) for r in rows]

    # ---- for workers

    def greet(self, worker: Worker) -> None:
        """It lives."""
        with _clear("the queue"):
            self._connection.execute(
                "INSERT INTO kerngen_worker (name, queues, about) VALUES (%s, %s, %s) "
                "ON CONFLICT (name) DO UPDATE SET at = now(), queues = excluded.queues",
                [worker.name, list(worker.queues), worker.about],
            )

    def part(self, worker: Worker) -> None:
        """It is gone."""
        with _clear("the queue"):
            self._connection.execute("DELETE FROM kerngen_worker WHERE name = %s", [worker.name])

    def tell(self, job_id: int, worker: str, done: int, total: int, what: str, result: Any = None) -> None:
        """How far a job is; with a result, what came of it."""
        with _clear("the queue"):
            self._connection.execute(
                "INSERT INTO kerngen_progress (job_id, worker, num_done, num_total, what, result) "
                "VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (job_id) DO UPDATE SET worker = excluded.worker, "
                "num_done = excluded.num_done, num_total = excluded.num_total, what = excluded.what, "
                "result = excluded.result, at = now()",
                [job_id, worker, done, total, what, None if result is None else json.dumps(result)],
            )

    def holder(self, job_id: int) -> tuple[str, int, int | None] | None:
        """Who has a job, as something to compare: status, attempts, Procrastinate's number of the worker."""
        with _clear("the queue"):
            row = self._connection.execute(
                "SELECT status::text, attempts, worker_id FROM procrastinate_jobs WHERE id = %s", [job_id]
            ).fetchone()
        return None if row is None else (row["status"], row["attempts"], row["worker_id"])

    def is_wanted(self, lock: str) -> bool:
        """Whether a job with this lock waits or is being done."""
        with _clear("the queue"):
            wanted = "SELECT 1 FROM procrastinate_jobs WHERE lock = %s AND status IN ('todo', 'doing') LIMIT 1"
            return self._connection.execute(wanted, [lock]).fetchone() is not None

    def num_open(self, queues: Sequence[str]) -> int:
        """How many jobs of these queues wait or are being done."""
        with _clear("the queue"):
            row = self._connection.execute(
                "SELECT count(*) AS n FROM procrastinate_jobs "
                "WHERE queue_name = ANY(%s) AND status IN ('todo', 'doing')",
                [list(queues)],
            ).fetchone()
        return 0 if row is None else int(row["n"])

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Within it, nobody else is: True; False where somebody is, and one had better go on."""
        with _clear("the queue"):
            row = self._connection.execute("SELECT pg_try_advisory_lock(%s) AS got", [_LOCK]).fetchone()
            got = bool(row and row["got"])
        try:
            yield got
        finally:
            if got:
                with _clear("the queue"):
                    self._connection.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])


def app_for_worker(conninfo: str) -> procrastinate.App:
    """Procrastinate's side of a worker, which its caller opens."""
    import procrastinate

    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=conninfo, min_size=1, max_size=4))


def _require() -> tuple[Any, Any]:
    try:
        import procrastinate
        import psycopg
        import psycopg.rows
    except ModuleNotFoundError as e:
        raise DatabaseError(f"{e.name} is not installed", hint=_NEEDS) from e
    return psycopg, procrastinate


def _conninfo(url: str, schema: str | None = None) -> str:
    """A SQLAlchemy URL as libpq has it; with a schema, that one alone is looked in."""
    from psycopg.conninfo import make_conninfo
    from sqlalchemy import exc, make_url

    from kerngen.tuning_db.store.engine import CONNECT_S

    try:
        url.encode()  # as open_server
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError):
        parsed = None
    if parsed is None or parsed.get_backend_name() != "postgresql" or "@" in (parsed.host or ""):
        raise UsageError("a cluster fills a tuning database on PostgreSQL",
                         hint="--db postgresql+psycopg://USER@HOST/NAME")  # fmt: skip
    told: dict[str, Any] = {k: v if isinstance(v, str) else ",".join(v) for k, v in parsed.query.items()}
    if schema is not None:
        told["options"] = f"{told.get('options', '')} -csearch_path={schema}".strip()
    named = {"user": parsed.username, "password": parsed.password, "host": parsed.host, "port": parsed.port,
             "dbname": parsed.database}  # fmt: skip
    told = {"connect_timeout": CONNECT_S, **told, **{k: v for k, v in named.items() if v is not None}}
    return make_conninfo(**told)


def _schema_name(connection: psycopg.Connection[Any]) -> str:
    row = connection.execute("SELECT current_schema()").fetchone()
    own = row[0] if row else None
    if own is None or not re.fullmatch(r"[a-z_][a-z0-9_]*", own):
        raise DatabaseError(f"the database's schema is {own!r}, beside which a queue cannot be named")
    return "kerngen_queue" if own == "public" else f"{own}_queue"


def _make(connection: psycopg.Connection[Any], schema: str) -> None:
    """The tables, if they are not there; refused where another version of Procrastinate made them."""
    _, procrastinate = _require()
    from procrastinate.schema import SchemaManager

    version = ".".join(procrastinate.__version__.split(".")[:2])
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        row = connection.execute(
            "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = %s", [schema]
        ).fetchone()
        if row is None:
            connection.execute(f"CREATE SCHEMA {schema}")
            connection.execute(f"SET LOCAL search_path = {schema}")
            connection.execute(SchemaManager.get_schema())
            connection.execute(_TABLES)
            connection.execute(f"COMMENT ON SCHEMA {schema} IS 'procrastinate {version}'")
        elif row[0] != f"procrastinate {version}":
            raise DatabaseError(
                f"the queue was made by {row[0]}, and procrastinate {version} is installed here",
                hint=f"install that one, or, with no work under way, drop the queue: DROP SCHEMA {schema} CASCADE",
            )


@contextlib.contextmanager
def _clear(where: str, hint: str | None = None) -> Iterator[None]:
    """Whatever the driver or Procrastinate raises, as a DatabaseError of one line."""
    psycopg, procrastinate = _require()
    try:
        yield
    except procrastinate.exceptions.ConnectorException as e:
        raise DatabaseError(f"{without_password(where)}: {_line(e.__cause__ or e, where)}", hint=hint) from e
    except psycopg.Error as e:
        raise DatabaseError(f"{without_password(where)}: {_line(e, where)}", hint=hint) from e


def _line(e: BaseException, url: str) -> str:
    text = hide_password(str(e).strip(), url)
    return text.splitlines()[0] if text else type(e).__name__
