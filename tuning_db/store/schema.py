"""The tables, as SQLAlchemy Core describes them: the same for SQLite and PostgreSQL.

    build <------- measurement -------> problem, device, environment, step    facts and observations: only ever added to
      | image_sha       |                        ^
    artifact            +---- winner             +--- search (a search of this problem that was finished)
                              (derived: deleted and computed anew)
    revocation: what must not count any more     former: what builds and measurements were called in older schemas
    rendered: which kernel code has the very source of a build; of an older kerngen's, what its source is filed by today
    line: what a run reads of one kernel and its compiled-in fields on one arch (derived, as the winners are)

Ids are sha256 of canonical JSON (canonical.digest) of what a row states, so a union of two databases is a merge.
`build.seal` is the digest of the facts that its id does not cover. Other seals are digests of the whole row
(canonical.seal_of); a winner's covers the problem as it was asked for, too, which its measurement has.
JSON columns hold canonical text; those of problems and configurations leave out the fields that have their default
(canonical_fields.py).
Changing a table means a new file in migrations/versions; a test compares the two.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)

from kerngen.tuning_db.read.values import BUILD_STATUSES, OUTCOMES, PROVENANCES, STAGES

SCHEMA = "0008"  # the newest revision in migrations/versions
VERSION_TABLE = "kerngen_alembic"  # Optuna owns alembic_version where both share one database

metadata = MetaData()


def _id() -> Column[str]:
    return Column("id", Text, primary_key=True)


def _text(name: str) -> Column[str]:
    return Column(name, Text, nullable=False)


def _seal() -> Column[str]:
    return Column("seal", Text, nullable=False, server_default="")  # a row that nobody sealed matches nothing


def _one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(v) for v in values)})", name=f"{column}_known")


artifact = Table(
    "artifact",
    metadata,
    Column("sha", Text, primary_key=True),  # of the raw bytes
    _text("kind"),
    _text("codec"),
    Column("raw_bytes", BigInteger, nullable=False),
    Column("blob", LargeBinary, nullable=False),
    _one_of("kind", ("cubin", "ptx")),
)

build = Table(
    "build",
    metadata,
    _id(),
    _text("kernel"),
    _text("arch"),
    _text("target"),
    _text("nvrtc"),
    _text("options"),
    _text("config"),
    _text("static_key"),
    _text("static"),
    _text("source_sha"),
    _text("status"),
    _text("cache_key"),
    Column("image_sha", Text),  # no foreign key: only winners keep their image
    _text("entries"),
    Column("registers", Integer, nullable=False),
    Column("spill_bytes", Integer, nullable=False),
    Column("static_smem_bytes", Integer, nullable=False),
    _text("log"),
    _text("seal"),
    _one_of("status", BUILD_STATUSES),
    CheckConstraint("(status = 'ok') = (image_sha IS NOT NULL)", name="image_if_ok"),
    Index("build_by_static", "static_key", "arch"),
    Index("build_by_image", "image_sha"),
)

rendered = Table(
    "rendered",
    metadata,
    Column("build_id", Text, ForeignKey("build.id"), primary_key=True),  # its source is what is rendered by
    Column(
        "closure", Text, primary_key=True
    ),  # kernel code with this digest (kerngen/compiler/source_digest.py), or the source itself
    _seal(),
)

problem = Table(
    "problem",
    metadata,
    _id(),
    _text("kernel"),
    _text("static_key"),
    _text("static"),
    _text("cell"),
    _text("runtime"),
    Column("dynamic", BigInteger),
    Index("problem_by_static", "static_key"),
)

device = Table(
    "device",
    metadata,
    _id(),
    _text("arch"),
    _text("name"),
    Column("num_sms", Integer, nullable=False),
    _text("props"),
    Index("device_by_name", "name"),
)

environment = Table("environment", metadata, _id(), _text("props"))

step = Table(
    "step",
    metadata,
    _id(),
    _text("model"),
    _text("arch"),
    _text("phase"),
    Column("batch", Integer, nullable=False),
    Column("q_len", Integer, nullable=False),
    Column("context", Integer, nullable=False),
    Column("chunk", Integer, nullable=False),
    Column("layers", Integer, nullable=False),  # that were run, which may stand for more
    _text("sequence"),  # digest of its launches in order
    _text("props"),
    _seal(),
)

measurement = Table(
    "measurement",
    metadata,
    _id(),
    Column("build_id", Text, ForeignKey("build.id")),  # null where nothing was compiled
    Column("problem_id", Text, ForeignKey("problem.id"), nullable=False),
    Column("device_id", Text, ForeignKey("device.id"), nullable=False),
    Column("environment_id", Text, ForeignKey("environment.id"), nullable=False),
    _text("arch"),
    _text("config"),
    _text("fields"),
    _text("outcome"),
    _text("reason"),
    _text("provenance"),
    _text("stage"),
    _text("model"),
    Column("p50_us", Double),
    Column("p10_us", Double),
    Column("p90_us", Double),
    Column("min_us", Double),
    Column("samples", Integer, nullable=False),
    Column("error_abs", Double),
    Column("error_rel", Double),
    _text("run"),
    _text("at"),
    _text("tags"),
    Column("step_id", Text, ForeignKey("step.id")),  # of stage "step"; its seal covers these four where they are there
    Column("step_us", Double),
    Column("base_step_us", Double),  # with the configurations that `base_id` is the digest of
    Column("base_id", Text),
    _seal(),
    _one_of("outcome", OUTCOMES),
    _one_of("provenance", PROVENANCES),
    _one_of("stage", STAGES),
    CheckConstraint(
        "outcome <> 'ok' OR (build_id IS NOT NULL AND (provenance = 'carried' OR p50_us > 0))", name="ok_has_time"
    ),
    CheckConstraint(
        "outcome <> 'ok' OR provenance <> 'measured' OR error_abs IS NOT NULL", name="measured_ok_was_checked"
    ),
    CheckConstraint("outcome <> 'ok' OR provenance <> 'predicted' OR model <> ''", name="predicted_names_its_model"),
    CheckConstraint("provenance <> 'carried' OR (p50_us IS NULL AND reason <> '')", name="carried_names_its_source"),
    CheckConstraint(
        "outcome <> 'ok' OR stage <> 'step' OR "
        "(step_id IS NOT NULL AND step_us > 0 AND base_step_us > 0 AND base_id IS NOT NULL)",
        name="step_is_whole",
    ),
    Index("measurement_by_problem", "problem_id", "arch", "device_id"),
    Index("measurement_by_build", "build_id"),
    Index("measurement_by_step", "step_id"),
)

search = Table(
    "search",
    metadata,
    _id(),
    _text("search"),  # digest of everything that decides how it goes
    Column("problem_id", Text, ForeignKey("problem.id"), nullable=False),
    _text("summary"),
    _seal(),
    Index("search_by_search", "search"),
)

former = Table(
    "former",
    metadata,
    Column("was", Text, primary_key=True),  # a revocation in another database may still call it so
    _text("id"),
    _seal(),
)

revocation = Table(
    "revocation",
    metadata,
    _id(),
    _text("subject_id"),  # of a build or of a measurement; it may live in another database
    _text("reason"),
    _text("at"),
    _seal(),
    Index("revocation_by_subject", "subject_id"),
)

winner = Table(
    "winner",
    metadata,
    _id(),  # of (problem, arch, device name, SM count, closure)
    _text("kernel"),
    _text("static_key"),
    _text("cell"),
    Column("problem_id", Text, ForeignKey("problem.id"), nullable=False),
    _text("arch"),
    Column("device_id", Text, ForeignKey("device.id"), nullable=False),
    Column("build_id", Text, ForeignKey("build.id"), nullable=False),
    Column("measurement_id", Text, ForeignKey("measurement.id"), nullable=False),
    _text("provenance"),
    Column("latency_us", Double),  # none of what is carried
    Column("margin", Double),
    _text("reason"),
    _text("why"),
    _seal(),
    Column("closure", Text, nullable=False, server_default=""),  # of the kernel code that it was chosen for
    _one_of("provenance", PROVENANCES),
    CheckConstraint("(latency_us IS NULL) = (provenance = 'carried')", name="carried_has_no_time"),
    Index("winner_by_cell", "cell", "arch"),
    Index("winner_by_static", "static_key", "arch"),
)

line = Table(
    "line",
    metadata,
    _id(),  # of (static key, arch)
    _text("kernel"),
    _text("static_key"),
    _text("arch"),
    _text("body"),  # read/kernel_index.py
    _seal(),
    Index("line_by_kernel", "kernel", "arch"),
)
