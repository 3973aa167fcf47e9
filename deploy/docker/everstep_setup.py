#!/usr/bin/env python3
"""Makes what the containers of compose.yaml share: passwords, and the NATS server's configuration.

Makes what is missing, keeps what is there. Each container sees the folder with its own secret only.
"""

import argparse
import sys
from pathlib import Path

from everstep.bus.login import read_secret
from everstep.bus.roles import ADMIN, SERVICE, new_password, user_for
from everstep.bus.serverconfig import (
    ServerPlan,
    ensure_users,
    password_file,
    write_config,
    write_private,
)
from everstep.errors import EverstepError

SECRETS = Path("/run/everstep")
KEYS = SECRETS / "keys"
TOY = user_for("agent", "toy").name  # the agents of compose.yaml itself
PLAN = ServerPlan(
    store=Path("/var/lib/everstep-nats"),
    host="0.0.0.0",  # noqa: S104  in the container; the host publishes it on loopback
    sync="always",  # what was acknowledged survives a power cut
    monitor="127.0.0.1:8222",  # for the container's own health check
)


def main() -> int:
    """Exit code 1 and one line when a folder cannot be written."""
    parser = argparse.ArgumentParser(prog="everstep-setup", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    agent = commands.add_parser("agent", help="let the agents of a job in; print their password")
    agent.add_argument("job")
    asked = parser.parse_args()
    try:
        if asked.command == "agent":
            admit_agents(asked.job)
        else:
            make_what_is_missing()
    except (EverstepError, ValueError) as error:
        sys.stderr.write(f"everstep-setup: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(
            f"everstep-setup: {error.filename}: {error.strerror}; its volume was made by somebody "
            f"else: remove the cluster with its data (docker compose down -v) and start again\n"
        )
        return 1
    return 0


def make_what_is_missing() -> None:
    """Passwords once; what is derived from them each time."""
    users = {ADMIN: "admin", SERVICE: "service", TOY: "agent"}
    ensure_users(KEYS, users)
    for name, folder in users.items():
        write_private(SECRETS / folder / "password", secret(password_file(KEYS, name)))
    database = KEYS / "database"  # not *.password: those are users of the bus
    if not database.exists():
        write_private(database, new_password() + "\n")
    shared = SECRETS / "database" / "password"
    write_private(shared, secret(database))
    shared.chmod(0o444)  # PostgreSQL reads it as its own user, whose number depends on the image
    write_config(SECRETS / "nats" / "nats.json", PLAN, KEYS)


def admit_agents(job: str) -> None:
    """A login for the agents of one job, known to the server when it reads its file again."""
    name = user_for("agent", job).name
    ensure_users(KEYS, [name])
    write_config(SECRETS / "nats" / "nats.json", PLAN, KEYS)
    sys.stdout.write(secret(password_file(KEYS, name)))
    sys.stderr.write(f"user {name}; let it in with: docker compose kill -s HUP nats\n")


def secret(path: Path) -> str:
    """As a file's content."""
    return read_secret(path, "password_file") + "\n"


if __name__ == "__main__":
    sys.exit(main())
