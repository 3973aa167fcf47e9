"""The record in SQL: tables, migrations, idempotent writes, reads."""
