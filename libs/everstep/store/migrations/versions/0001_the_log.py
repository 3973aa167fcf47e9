"""The log of facts, positions in the stream, and tokens.

Tables that are projected from the log have no steps: see `everstep.store.schema`.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the tables of the first release."""
    _make_facts()
    op.create_table(
        "positions",
        sa.Column("stream", _TEXT, nullable=False),
        sa.Column("sequence", _INT, nullable=False),
        sa.Column("updated_us", _INT, nullable=False),
        sa.PrimaryKeyConstraint("stream", name=op.f("pk_positions")),
    )
    op.create_table(
        "meta",
        sa.Column("one", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", _TEXT, nullable=False),
        sa.Column("secret", _TEXT, nullable=False),
        sa.Column("last_n", _INT, nullable=False),
        sa.Column("projected_n", _INT, nullable=False),
        sa.Column("projection", _INT, nullable=False),
        sa.CheckConstraint("one = 1", name=op.f("ck_meta_one_row")),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_meta")),
    )
    op.create_table(
        "tokens",
        sa.Column("id", _TEXT, nullable=False),
        sa.Column("name", _TEXT, nullable=False),
        sa.Column("scope", _TEXT, nullable=False),
        sa.Column("secret_sha256", _TEXT, nullable=False),
        sa.Column("created_us", _INT, nullable=False),
        sa.Column("expires_us", _INT),
        sa.Column("last_used_us", _INT),
        sa.Column("revoked_us", _INT),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
    )


def _make_facts() -> None:
    op.create_table(
        "facts",
        sa.Column("n", _INT, autoincrement=False, nullable=False),
        sa.Column("id", _TEXT, nullable=False),
        sa.Column("stream", _TEXT, nullable=False),
        sa.Column("sequence", _INT, nullable=False),
        sa.Column("job", _TEXT, nullable=False),
        sa.Column("kind", _TEXT, nullable=False),
        sa.Column("round", _INT),
        sa.Column("node", _TEXT),
        sa.Column("at_us", _INT, nullable=False),
        sa.Column("source", _TEXT, nullable=False),
        sa.Column("received_us", _INT, nullable=False),
        sa.Column("size", _INT, nullable=False),
        sa.Column("body", _TEXT, nullable=False),
        sa.PrimaryKeyConstraint("n", name=op.f("pk_facts")),
        sa.UniqueConstraint("id", name=op.f("uq_facts_id")),
    )
    op.create_index("ix_facts_job_n", "facts", ["job", "n"])
    op.create_index("ix_facts_kind_n", "facts", ["kind", "n"])
    op.create_index("ix_facts_at_us_n", "facts", ["at_us", "n"])
    has_node = sa.text("node IS NOT NULL")
    op.create_index(
        "ix_facts_node_n", "facts", ["node", "n"], sqlite_where=has_node, postgresql_where=has_node
    )
