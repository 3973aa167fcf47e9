"""Notices of maintenance from outside: what is announced outlives a restart."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the table, and the index by which due notices are found."""
    op.create_table(
        "maintenance",
        sa.Column("sender", _TEXT, nullable=False),
        sa.Column("id", _TEXT, nullable=False),
        sa.Column("node", _TEXT, nullable=False),
        sa.Column("action", _TEXT, nullable=False),
        sa.Column("starts_us", _INT, nullable=False),
        sa.Column("ends_us", _INT),
        sa.Column("reason", _TEXT, nullable=False),
        sa.Column("state", _TEXT, nullable=False),
        sa.Column("outcome", _TEXT, nullable=False),
        sa.Column("sent_us", _INT, nullable=False),
        sa.Column("received_us", _INT, nullable=False),
        sa.Column("next_us", _INT, nullable=False),
        sa.Column("attempts", _INT, nullable=False),
        sa.PrimaryKeyConstraint("sender", "id", "node", name=op.f("pk_maintenance")),
    )
    op.create_index("ix_maintenance_state_next_us", "maintenance", ["state", "next_us"])
