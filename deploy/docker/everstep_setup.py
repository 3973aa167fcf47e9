#!/usr/bin/env python3
"""Makes what the containers of compose.yaml share: keys, logins, the NATS server's configuration.

Makes what is missing, keeps what is there. Each container sees the folder with its own secret only;
the operator's key is seen by this one alone.
"""

import argparse
import asyncio
import secrets
import sys
from pathlib import Path

from everstep.bus import BusSettings
from everstep.bus.auth.accounts import VALID_S, Operator
from everstep.bus.auth.job_access import admit, cut_off, login_file
from everstep.bus.auth.login import read_secret, write_private
from everstep.bus.auth.roles import ADMIN, SERVICE, agents_name
from everstep.bus.server.config import (
    ServerPlan,
    keep_account,
    move_streams,
    renew_accounts,
    write_config,
)
from everstep.errors import EverstepError

SECRETS = Path("/run/everstep")
KEYS = SECRETS / "keys"
TOY = "toy"  # the job of compose.yaml's own agents
NATS = "nats"
PLAN = ServerPlan(
    store=Path("/var/lib/everstep-nats"),
    host="0.0.0.0",  # noqa: S104  in the container; the host publishes it on loopback
    sync="always",  # what was acknowledged survives a power cut
    monitor="127.0.0.1:8222",  # for the container's own health check
)
BUS = BusSettings(url=f"nats://{NATS}:{PLAN.port}")


def main() -> int:
    """Exit code 1 and one line when a folder cannot be written, or the server is not there."""
    parser = argparse.ArgumentParser(prog="everstep-setup", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    agent = commands.add_parser("agent", help="let the agents of a job in; print their login")
    agent.add_argument("job")
    revoke = commands.add_parser("revoke", help="cut the agents of a job off")
    revoke.add_argument("job")
    asked = parser.parse_args()
    try:
        if asked.command == "agent":
            admit_agents(asked.job)
        elif asked.command == "revoke":
            asyncio.run(cut_off(Operator.opened(KEYS), BUS, asked.job))
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
    """Keys once, logins before they end; what is derived from them each time."""
    operator = Operator.made(KEYS)
    if move_streams(PLAN, operator, NATS):
        for path in KEYS.glob("*.password"):  # of the time before accounts
            path.unlink()
    renew_accounts(PLAN.accounts, operator)
    keep_account(PLAN.accounts, operator, TOY)
    for name, folder in ((ADMIN, "admin"), (SERVICE, "service"), (agents_name(TOY), "agent")):
        login = login_file(KEYS, operator, name, valid_s=VALID_S)
        write_private(SECRETS / folder / "bus.creds", login.read_text())
    operator.write_signers(SECRETS / "logins")
    database = KEYS / "database"
    if not database.exists():
        write_private(database, secrets.token_urlsafe(32) + "\n")
    shared = SECRETS / "database" / "password"
    write_private(shared, read_secret(database, "the database's password") + "\n")
    shared.chmod(0o444)  # PostgreSQL reads it as its own user, whose number depends on the image
    write_config(SECRETS / "nats" / "nats.json", PLAN, operator)


def admit_agents(job: str) -> None:
    """A login for the agents of one job; the server lets them in at once."""
    operator = Operator.opened(KEYS)
    asyncio.run(admit(operator, BUS, job, again=True))
    sys.stdout.write(operator.login(agents_name(job)).text())


if __name__ == "__main__":
    sys.exit(main())
