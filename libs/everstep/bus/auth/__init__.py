"""Accounts on the bus and the logins in them: made, checked, renewed, revoked."""
