"""File problems and configurations without the fields that have their default, and note finished searches apart.

Every id of schema 1 covered every field, so that a kernel that gained one lost all that was tuned. Here each row whose
digest is right is written anew under the id of schema 2, and `former` keeps what builds and measurements were called: a
revocation in another database may still call them so. A row that does not match its digest keeps its id, and so is
refused as before; a winner that cannot be read is left out, since winners are derived. Predictions that differ in who
asked, or why, become one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

log = logging.getLogger("kerngen.tuning_db")

# What the kernels of schema 1 had for defaults: (problem, config). Of any other kernel all fields are kept.
_DEFAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "add_norm": (
        {"hidden": 5376, "dtype": "bf16", "residual_dtype": "bf16", "has_post": True, "has_scalar": False,
         "has_next": True, "num_tokens": 1},
        {"vecs_per_thread": 1, "rows_per_block": 1},
    ),
    "attn_decode": (
        {"head_dim": 128, "num_q_heads": 32, "num_kv_heads": 8, "q_len": 1, "page_size": 64, "window": 0,
         "dtype": "bf16", "logit_cap": False, "batch": 1, "kv_len": 8192},
        {"block_m": 8, "block_n": 16, "split_d": 1, "num_warps": 4, "num_stages": 2, "num_splits": 1},
    ),
    "attn_prefill": (
        {"head_dim": 256, "num_q_heads": 32, "num_kv_heads": 16, "page_size": 0, "window": 0, "causal": True,
         "dtype": "bf16", "logit_cap": False, "batch": 1, "num_tokens": 8192, "kv_len": 8192},
        {"block_m": 128, "block_n": 64, "num_warps": 8, "warps_d": 1, "num_stages": 1, "q_in_regs": False},
    ),
    "embed": (
        {"hidden": 5376, "vocab_size": 262144, "dtype": "bf16", "residual_dtype": "bf16", "num_tokens": 1},
        {"threads": 128, "vecs_per_thread": 1},
    ),
    "gelu_gate": (
        {"width": 21504, "dtype": "bf16", "packed": True, "num_tokens": 1},
        {"threads": 128, "vecs_per_thread": 1},
    ),
    "moe_route": (
        {"num_experts": 128, "top_k": 8, "dtype": "bf16", "logits_dtype": "bf16", "num_tokens": 1},
        {"num_warps": 1},
    ),
    "qkv_norm_rope": (
        {"num_q_heads": 32, "num_kv_heads": 16, "head_dim": 256, "num_rotated_pairs": 128, "page_size": 64,
         "dtype": "bf16", "k_eq_v": False, "q_only": False, "num_tokens": 1},
        {"num_warps": 4, "heads_per_group": 1},
    ),
    "rmsnorm": (
        {"hidden": 5376, "dtype": "bf16", "residual_dtype": "bf16", "has_weight": True, "num_tokens": 1},
        {"vecs_per_thread": 1, "rows_per_block": 1},
    ),
    "softcap_argmax": (
        {"vocab_size": 262144, "dtype": "bf16", "logits_dtype": "bf16", "has_cap": True, "round_steps": True,
         "write_capped": False, "num_tokens": 1},
        {"threads": 256, "vecs_per_thread": 1},
    ),
    "w4a16_gemm": (
        {"group_size": 32, "dtype": "bf16", "num_tokens": 1},
        {"block_m": 8, "block_n": 128, "block_k": 128, "warp_n": 32, "warps_m": 1, "warps_k": 1, "num_stages": 4,
         "blocks_per_sm": 1, "wgmma": False},
    ),
}  # fmt: skip
_TABLES = {
    name: sa.table(name, *(sa.column(c) for c in columns.split()))
    for name, columns in {
        "build": "id kernel arch target nvrtc options config static_key static source_sha status cache_key image_sha "
        "entries registers spill_bytes static_smem_bytes log seal",
        "problem": "id kernel static_key static cell runtime dynamic",
        "device": "id props",
        "environment": "id props",
        "measurement": "id build_id problem_id device_id environment_id arch config fields outcome reason provenance "
        "stage model p50_us p10_us p90_us min_us samples error_abs error_rel run at tags",
        "revocation": "id subject_id reason at",
        "winner": "id kernel static_key cell problem_id arch device_id build_id measurement_id provenance latency_us "
        "margin reason why",
        "search": "id search problem_id summary",
        "former": "was id",
    }.items()
}
_CHUNK = 1000

_Row = dict[str, Any]


def upgrade() -> None:
    op.create_table(
        "search",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("search", sa.Text, nullable=False),
        sa.Column("problem_id", sa.Text, sa.ForeignKey("problem.id"), nullable=False),
        sa.Column("summary", sa.Text, nullable=False),
    )
    op.create_index("search_by_search", "search", ["search"])
    op.create_table("former", sa.Column("was", sa.Text, primary_key=True), sa.Column("id", sa.Text, nullable=False))
    _Rewriting(op.get_bind()).run()


def downgrade() -> None:
    raise NotImplementedError("kerngen's migrations only go forward; restore a copy instead")


class _Ids(NamedTuple):
    """Of a problem, by one version of the recipe."""

    static_key: str
    cell: str
    problem: str


class _Rewriting:
    """New rows come first, then the old ones go: at no time does a row refer to one that is not there.

    The maps go from ids of schema 1 and hold sound rows only.
    """

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection
        self.there: dict[str, set[str]] = {name: set() for name in _TABLES}  # the first column of what was inserted
        self.problems: dict[str, _Ids] = {}
        self.kernels: dict[str, str] = {}  # of the problems
        self.builds: dict[str, str] = {}
        self.known_builds: set[str] = set()  # the damaged ones too
        self.measurements: dict[str, str] = {}
        self.revocations: dict[str, str] = {}
        self.searches: list[_Row] = []
        self.props: dict[str, Any] = {}  # of devices and environments

    def run(self) -> None:
        winners = self.rows("winner")
        self.connection.execute(_TABLES["winner"].delete())
        self.read_props()

        self.rewrite("problem", self.rows("problem"), self.problem)
        # Of two builds that were told apart by a field that one of them lacked, the one that succeeded stays.
        builds = sorted(self.rows("build"), key=lambda r: (r.status != "ok", str(r.id)))
        self.known_builds = {row.id for row in builds}
        self.rewrite("build", builds, self.build)
        num_kept = self.rewrite_measurements()
        self.insert("search", self.searches)
        self.rewrite("winner", sorted(winners, key=lambda r: (str(r.provenance), str(r.id))), self.winner)
        self.rewrite("revocation", self.rows("revocation"), self.revocation)
        self.insert("former", [{"was": was, "id": id} for was, id in (self.builds | self.measurements).items()])

        self.delete("revocation", self.revocations)
        self.delete("measurement", self.measurements)
        if num_kept:
            self.repoint("problem_id", {was: ids.problem for was, ids in self.problems.items()})
            self.repoint("build_id", self.builds)
        self.delete("problem", self.problems)
        self.delete("build", self.builds)

    def read_props(self) -> None:
        for row in self.rows("device") + self.rows("environment"):
            with contextlib.suppress(ValueError):  # what refers to it is then damaged too
                self.props[row.id] = json.loads(row.props)

    def rewrite_measurements(self) -> int:
        """In parts, since there may be many. The oldest comes first: of predictions that are now one, it stays."""
        m = _TABLES["measurement"]
        there = self.connection.execute(sa.select(m.c.id).order_by(m.c.at, m.c.id)).scalars().all()
        ids = [id for id in there if isinstance(id, str) and id.isascii()]  # what else a damaged file may hold
        num_kept = len(there) - len(ids)
        for start in range(0, len(ids), _CHUNK):
            part = sa.select(m).where(m.c.id.in_(ids[start : start + _CHUNK])).order_by(m.c.at, m.c.id)
            num_kept += self.rewrite("measurement", self.connection.execute(part).all(), self.measurement)
        return num_kept

    # ---- one row of each kind: what takes its place

    def problem(self, row: sa.Row[Any]) -> _Row:
        static, runtime = json.loads(row.static), json.loads(row.runtime)
        _require(_problem_ids(1, row.kernel, static, runtime, row.dynamic) == (row.static_key, row.cell, row.id))
        static, runtime = _file(row.kernel, static), _file(row.kernel, runtime)
        ids = self.problems[row.id] = _problem_ids(2, row.kernel, static, runtime, row.dynamic)
        self.kernels[row.id] = row.kernel
        return {"id": ids.problem, "static_key": ids.static_key, "cell": ids.cell, "static": _json(static),
                "runtime": _json(runtime)}  # fmt: skip

    def build(self, row: sa.Row[Any]) -> _Row:
        stated = {"kernel": row.kernel, "target": row.target, "nvrtc": [int(n) for n in row.nvrtc.split(".")],
                  "options": json.loads(row.options), "source": row.source_sha}  # fmt: skip
        sealed = {"arch": row.arch, "status": row.status, "key": row.cache_key, "image": row.image_sha,
                  "entries": json.loads(row.entries)}  # fmt: skip
        static, config = json.loads(row.static), json.loads(row.config)
        _require(_digest(stated | {"v": 1, "config": config, "static": static}) == row.id)
        _require(_digest(sealed | {"id": row.id}) == row.seal)
        static, config = _file(row.kernel, static), _file(row.kernel, config, of=1)
        id = self.builds[row.id] = _digest(stated | {"v": 2, "config": config, "static": static})
        return {"id": id, "static_key": _static_key(2, row.kernel, static), "static": _json(static),
                "config": _json(config), "seal": _digest(sealed | {"id": id})}  # fmt: skip

    def measurement(self, row: sa.Row[Any]) -> _Row:
        fields, config, tags = json.loads(row.fields), json.loads(row.config), json.loads(row.tags)
        stated = {
            "arch": row.arch, "device": self.props[row.device_id], "outcome": row.outcome,
            "provenance": row.provenance, "stage": row.stage, "model": row.model, "p50": row.p50_us,
            "p10": row.p10_us, "p90": row.p90_us, "min": row.min_us, "samples": row.samples,
            "error_abs": row.error_abs, "error_rel": row.error_rel,
        }  # fmt: skip
        words = {"reason": row.reason, "tags": tags}
        when = {"environment": self.props[row.environment_id], "run": row.run, "at": row.at}
        measured = row.provenance == "measured"
        before = {"v": 1, "problem": row.problem_id, "fields": fields, "config": config, "build": row.build_id}
        _require(_digest(stated | before | words | (when if measured else {})) == row.id)

        problem, kernel = self.problems[row.problem_id], self.kernels[row.problem_id]
        fields, config = _file(kernel, fields), _file(kernel, config, of=1)
        _require(row.build_id is None or row.build_id in self.known_builds)
        build = None if row.build_id is None else self.builds.get(row.build_id, row.build_id)
        now = {"v": 2, "problem": problem.problem, "fields": fields, "config": config, "build": build}
        id = self.measurements[row.id] = _digest(stated | now | (words | when if measured else {}))
        if "search" in tags and "closed" in tags:
            name = _digest({"v": 2, "search": tags["search"], "problem": problem.problem})
            self.searches.append({"id": name, "search": tags["search"], "problem_id": problem.problem,
                                  "summary": _json(tags["closed"])})  # fmt: skip
        return {"id": id, "problem_id": problem.problem, "build_id": build, "fields": _json(fields),
                "config": _json(config)}  # fmt: skip

    def winner(self, row: sa.Row[Any]) -> _Row:
        ids, why = self.problems[row.problem_id], json.loads(row.why)
        for brief in (why.get("fastest"), why.get("next")):
            if brief:
                was = brief.pop("build_id", None)
                if was in self.builds:  # of a build that is not here, its new name is not known
                    brief["build_id"] = self.builds[was]
        _require(row.latency_us > 0 and row.provenance in ("measured", "predicted"))
        device = self.props[row.device_id]
        id = _digest({"v": 2, "problem": ids.problem, "arch": row.arch, "device": device["name"],
                      "num_sms": device["num_sms"]})  # fmt: skip
        return {"id": id, "problem_id": ids.problem, "static_key": ids.static_key, "cell": ids.cell,
                "build_id": self.builds[row.build_id], "measurement_id": self.measurements[row.measurement_id],
                "why": _json(why)}  # fmt: skip

    def revocation(self, row: sa.Row[Any]) -> _Row:
        subject = self.builds.get(row.subject_id) or self.measurements.get(row.subject_id)
        subject = subject or row.subject_id  # a row of another database: `former` there says what it is called now
        id = self.revocations[row.id] = _digest({"v": 2, "subject": subject, "reason": row.reason})
        return {"id": id, "subject_id": subject}

    # ---- statements

    def rows(self, table: str) -> list[sa.Row[Any]]:
        return list(self.connection.execute(sa.select(_TABLES[table])))

    def rewrite(self, table: str, rows: Iterable[sa.Row[Any]], change: Callable[[sa.Row[Any]], _Row]) -> int:
        """Insert what takes the place of `rows`; returns how many are damaged, so that nothing does."""
        made, num_damaged = [], 0
        for row in rows:
            try:
                for value in row:
                    if isinstance(value, str):
                        value.encode()  # SQLite may hold bytes that are no text
                made.append({**row._mapping, **change(row)})
            except Exception as e:  # there is no telling what parsing bytes that nobody wrote does
                why = "it refers to a damaged row" if isinstance(e, KeyError) else e
                log.warning("%s %s is damaged (%s) and not migrated", table, ascii(row.id), why)
                num_damaged += 1
        self.insert(table, made)
        return num_damaged

    def insert(self, table: str, rows: list[_Row]) -> None:
        """The first of each name: two rows that have one by now are one."""
        by_name: dict[str, _Row] = {row["was" if table == "former" else "id"]: row for row in reversed(rows)}
        new = {name: row for name, row in by_name.items() if name not in self.there[table]}
        self.there[table].update(new)
        if new:
            self.connection.execute(_TABLES[table].insert(), list(new.values()))

    def delete(self, table: str, ids: Iterable[str]) -> None:
        column = _TABLES[table].c.id
        if names := [{"was": was} for was in ids]:
            self.connection.execute(_TABLES[table].delete().where(column == sa.bindparam("was")), names)

    def repoint(self, column: str, names: dict[str, str]) -> None:
        """Of measurements that are damaged and stay: what they refer to has another name."""
        m = _TABLES["measurement"]
        if moved := [{"was": was, "now": now} for was, now in names.items()]:
            where = m.c[column] == sa.bindparam("was")
            self.connection.execute(m.update().where(where).values({column: sa.bindparam("now")}), moved)


# ---- the recipe, as it was and as it is from here on


def _problem_ids(version: int, kernel: str, static: _Row, runtime: _Row, dynamic: int | None) -> _Ids:
    cell = _digest({"v": version, "kernel": kernel, "static": static, "runtime": runtime})
    return _Ids(_static_key(version, kernel, static), cell, _digest({"v": version, "cell": cell, "dynamic": dynamic}))


def _static_key(version: int, kernel: str, static: _Row) -> str:
    return _digest({"v": version, "kernel": kernel, "static": static})


def _file(kernel: str, fields: _Row, *, of: int = 0) -> _Row:
    """`fields` without those that have their default. of: 0 for a problem's, 1 for a configuration's."""
    defaults = _DEFAULTS.get(kernel, ({}, {}))[of]
    return {
        k: v for k, v in fields.items() if not (k in defaults and type(v) is type(defaults[k]) and v == defaults[k])
    }


def _digest(value: Any) -> str:
    text = json.dumps(_exact(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _exact(value: Any) -> Any:
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {str(k): _exact(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(v) for v in value]
    return value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _require(sound: bool) -> None:
    if not sound:
        raise ValueError("it does not match its own digest")
