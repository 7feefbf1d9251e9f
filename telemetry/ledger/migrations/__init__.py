"""Alembic environment and the ledger's migrations."""
