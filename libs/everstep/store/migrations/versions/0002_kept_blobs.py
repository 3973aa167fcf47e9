"""Copies of small pieces of evidence, which outlive the stream that they came by."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "kept_blobs",
        sa.Column("id", _TEXT, nullable=False),
        sa.Column("job", _TEXT, nullable=False),
        sa.Column("kept_us", _INT, nullable=False),
        sa.Column("size", _INT, nullable=False),
        sa.Column("body", sa.LargeBinary),
        sa.Column("absent", _TEXT),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_kept_blobs")),
    )
    op.create_index("ix_kept_blobs_kept_us", "kept_blobs", ["kept_us"])
