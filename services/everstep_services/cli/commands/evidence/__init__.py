"""Commands that answer what happened, and why."""
