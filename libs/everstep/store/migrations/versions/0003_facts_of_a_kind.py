"""An index for the facts of one kind of one job: pages and goodput read these."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the index."""
    op.create_index("ix_facts_job_kind_n", "facts", ["job", "kind", "n"])
