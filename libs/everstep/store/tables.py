"""The tables: the log of facts, the tables projected from it, and those of the service itself."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)
from sqlalchemy.types import TypeEngine

from everstep.store.projected.changes import ProjectedTable, Type
from everstep.store.projected.registry import PROJECTED

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# Names and ids compare by their bytes everywhere: a database's language must not change what
# "greater" means, nor how a page continues.
_TEXT = Text().with_variant(Text(collation="C"), "postgresql")
_INT = BigInteger().with_variant(Integer(), "sqlite")  # SQLite's INTEGER has 64 bits

_TYPES: Mapping[Type, TypeEngine[Any]] = {
    "text": _TEXT,
    "json": _TEXT,
    "int": _INT,
    "float": Float(53),
    "bool": Boolean(),
}

facts = Table(
    "facts",
    metadata,
    Column("n", _INT, primary_key=True, autoincrement=False),
    Column("id", _TEXT, nullable=False, unique=True),
    Column("stream", _TEXT, nullable=False),
    Column("sequence", _INT, nullable=False),
    Column("job", _TEXT, nullable=False),
    Column("kind", _TEXT, nullable=False),
    Column("round", _INT),
    Column("node", _TEXT),
    Column("at_us", _INT, nullable=False),
    Column("source", _TEXT, nullable=False),
    Column("received_us", _INT, nullable=False),
    Column("size", _INT, nullable=False),
    Column("body", _TEXT, nullable=False),
    Index("ix_facts_job_n", "job", "n"),
    Index("ix_facts_job_kind_n", "job", "kind", "n"),
    Index("ix_facts_kind_n", "kind", "n"),
    Index("ix_facts_at_us_n", "at_us", "n"),
    Index(
        "ix_facts_node_n",
        "node",
        "n",
        sqlite_where=text("node IS NOT NULL"),
        postgresql_where=text("node IS NOT NULL"),
    ),
)
"""The log. `n` is given by the one writer, without gaps, in stream order."""

positions = Table(
    "positions",
    metadata,
    Column("stream", _TEXT, primary_key=True),
    Column("sequence", _INT, nullable=False),
    Column("updated_us", _INT, nullable=False),
)
"""How far each incarnation of the stream has been read; written with what was read."""

meta = Table(
    "meta",
    metadata,
    Column("one", Integer, primary_key=True, autoincrement=False),
    Column("epoch", _TEXT, nullable=False),
    Column("secret", _TEXT, nullable=False),
    Column("last_n", _INT, nullable=False),
    Column("projected_n", _INT, nullable=False),
    Column("projection", _INT, nullable=False),
    CheckConstraint("one = 1", name="one_row"),
)
"""One row. `epoch` names this database: another one numbers its facts differently."""

tokens = Table(
    "tokens",
    metadata,
    Column("id", _TEXT, primary_key=True),
    Column("name", _TEXT, nullable=False),
    Column("scope", _TEXT, nullable=False),
    Column("secret_sha256", _TEXT, nullable=False),
    Column("created_us", _INT, nullable=False),
    Column("expires_us", _INT),
    Column("last_used_us", _INT),
    Column("revoked_us", _INT),
)

login_codes = Table(
    "login_codes",
    metadata,
    Column("code_sha256", _TEXT, primary_key=True),
    Column("sealed", LargeBinary, nullable=False),
    Column("expires_us", _INT, nullable=False),
)
"""Codes for one login each; `sealed` is a token that only the code itself can open."""

kept_blobs = Table(
    "kept_blobs",
    metadata,
    Column("id", _TEXT, primary_key=True),
    Column("job", _TEXT, nullable=False),
    Column("kept_us", _INT, nullable=False),
    Column("size", _INT, nullable=False),
    Column("body", LargeBinary),
    Column("absent", _TEXT),
    Index("ix_kept_blobs_kept_us", "kept_us"),
    Index("ix_kept_blobs_job", "job"),
)
"""Copies of small pieces of evidence, by the blob's id: the stream forgets them after a while.
`body` is compressed by zlib, and null where `absent` says why there is no copy."""


removals = Table(
    "removals",
    metadata,
    Column("job", _TEXT, primary_key=True),
    Column("begun_us", _INT, nullable=False),
)
"""Jobs that retention is removing; a row is deleted when nothing of its job is left."""

maintenance = Table(
    "maintenance",
    metadata,
    Column("sender", _TEXT, primary_key=True),
    Column("id", _TEXT, primary_key=True),
    Column("node", _TEXT, primary_key=True),
    Column("action", _TEXT, nullable=False),
    Column("starts_us", _INT, nullable=False),
    Column("ends_us", _INT),
    Column("reason", _TEXT, nullable=False),
    Column("state", _TEXT, nullable=False),
    Column("outcome", _TEXT, nullable=False),
    Column("sent_us", _INT, nullable=False),
    Column("received_us", _INT, nullable=False),
    Column("next_us", _INT, nullable=False),
    Column("attempts", _INT, nullable=False),
    Index("ix_maintenance_state_next_us", "state", "next_us"),
)
"""Notices of maintenance from outside, one row for each node; `next_us` is when to act."""


def _projected(shape: ProjectedTable) -> Table:
    keys = [
        Column(name, _TYPES[type_], primary_key=True, autoincrement=False)
        for name, type_ in shape.key.items()
    ]
    columns = [Column(name, _TYPES[column.type]) for name, column in shape.columns.items()]
    return Table(shape.name, metadata, *keys, *columns)


projected: Mapping[ProjectedTable, Table] = {shape: _projected(shape) for shape in PROJECTED}
(
    jobs,
    allocations,
    rounds,
    round_members,
    rank_exits,
    rank_stalls,
    nodes,
    incidents,
    actions,
    evidence,
    node_checks,
    node_watches,
    job_limits,
    stalls_located,
    job_saves,
    save_delays,
    job_restores,
    stragglers,
    step_shifts,
    verdicts,
    verdict_corrections,
    numerics_cases,
    numerics_acts,
    compared_results,
) = projected.values()

Index("ix_jobs_first_n", jobs.c.first_n)
Index("ix_jobs_last_n", jobs.c.last_n)
Index("ix_allocations_ended_us", allocations.c.ended_us)
Index("ix_rank_exits_job_round_n", rank_exits.c.job, rank_exits.c.round, rank_exits.c.n)
Index("ix_rank_stalls_job_round_n", rank_stalls.c.job, rank_stalls.c.round, rank_stalls.c.n)
Index("ix_nodes_job", nodes.c.job)
Index("ix_incidents_first_n", incidents.c.first_n)
Index("ix_incidents_job_first_n", incidents.c.job, incidents.c.first_n)
Index("ix_actions_job_n", actions.c.job, actions.c.n)
Index("ix_evidence_job_incident", evidence.c.job, evidence.c.incident)
Index("ix_evidence_job_round_rank", evidence.c.job, evidence.c.round, evidence.c.rank)
Index("ix_evidence_n", evidence.c.n)
Index("ix_node_checks_node_n", node_checks.c.node, node_checks.c.n)
Index("ix_stalls_located_job_round", stalls_located.c.job, stalls_located.c.round)
Index("ix_stragglers_job_n", stragglers.c.job, stragglers.c.n)
Index("ix_numerics_cases_job_first_n", numerics_cases.c.job, numerics_cases.c.first_n)
Index("ix_numerics_acts_job_case_n", numerics_acts.c.job, numerics_acts.c.case, numerics_acts.c.n)
Index("ix_step_shifts_job_n", step_shifts.c.job, step_shifts.c.n)
Index("ix_incidents_fingerprint", incidents.c.fingerprint)
Index("ix_incidents_node", incidents.c.node)
Index("ix_incidents_incident", incidents.c.incident)
Index("ix_verdicts_job_incident", verdicts.c.job, verdicts.c.incident)
Index(
    "ix_verdict_corrections_job_incident", verdict_corrections.c.job, verdict_corrections.c.incident
)
