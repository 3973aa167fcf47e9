"""Jobs that retention removes: a removal that was begun is finished, whatever happens between."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the table, and the index by which a job's copies of evidence are found."""
    op.create_table(
        "removals",
        sa.Column("job", _TEXT, nullable=False),
        sa.Column("begun_us", _INT, nullable=False),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_removals")),
    )
    op.create_index("ix_kept_blobs_job", "kept_blobs", ["job"])
