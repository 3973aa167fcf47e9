"""Codes for one login: any replica may take what another one has made."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "login_codes",
        sa.Column("code_sha256", _TEXT, nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("expires_us", _INT, nullable=False),
        sa.PrimaryKeyConstraint("code_sha256", name=op.f("pk_login_codes")),
    )
