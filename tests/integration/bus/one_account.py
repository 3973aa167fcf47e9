"""The server's configuration of the time before accounts, as that release wrote it."""

import secrets
from pathlib import Path
from typing import Any


def one_account(folder: Path, job: str) -> tuple[dict[str, Any], dict[str, str]]:
    """All users in one account, and how the agents of the job log in."""
    get = "$JS.API.DIRECT.GET"
    agents = f"agent-{job}"
    rights = {
        "admin": ([">"], [">"]),
        "service": (
            ["es.>", "$KV.>", "$JS.API.>", "$JS.ACK.>", "$SRV.>", "_INBOX.>", "_R_.>"],
            ["es.>", "$SRV.>", "_INBOX.service.>"],
        ),
        agents: (
            [
                *(f"es.beat.{job}.*", f"es.timing.{job}.*", f"es.fact.{job}.*"),
                *(f"es.blob.{job}.>", f"es.ask.*.*.{job}", "$JS.API.INFO"),
                *(f"{get}.KV_{bucket}.$KV.{bucket}.{job}" for bucket in ("ROUNDS", "LIMITS")),
                f"{get}.EVIDENCE.es.blob.{job}.>",
            ],
            [f"es.order.{job}", f"es.order.{job}.>", f"es.doc.*.{job}", f"_INBOX.{agents}.>"],
        ),
    }
    passwords = {name: secrets.token_urlsafe(32) for name in rights}
    for name, password in passwords.items():
        path = folder / f"{name}.password"
        path.write_text(password + "\n")
        path.chmod(0o600)
    users = [
        {
            "user": name,
            "password": passwords[name],
            "permissions": {
                "publish": {"allow": publish},
                "subscribe": {"allow": subscribe},
                "allow_responses": {"max": 1, "ttl": "1m"},
            },
        }
        for name, (publish, subscribe) in rights.items()
    ]
    login = {"user": agents, "password": passwords[agents]}
    return {"authorization": {"timeout": 10, "users": users}}, login
