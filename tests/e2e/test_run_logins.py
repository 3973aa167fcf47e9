"""Training while logins to the bus expire; and what ranks find of logins: nothing."""

import time
from functools import partial
from pathlib import Path

import pytest
from psutil import NoSuchProcess as Gone

from everstep.bus.auth.accounts import Operator
from everstep.bus.auth.login import read_credentials, write_private
from everstep.bus.auth.roles import agents_name
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import PATIENT, Up, running_up
from tests.e2e.processes import below
from tests.integration.bus.aged_logins import aged_login
from tests.waiting import until

LEFT_S = 20
"""Of the agent's first login, which is due to be renewed as soon as the agent runs."""
VALID_S = 30
"""Some seconds pass until all services run, and more on a machine that stands for a while."""


@pytest.mark.variant
def test_training_goes_on_while_logins_end(tmp_path: Path, new_cluster: NewCluster) -> None:
    """A8: each login ends the connection that uses it, unless it was renewed before (A13.6)."""
    (tmp_path / "up").mkdir()
    with running_up(tmp_path / "up", **PATIENT, EVERSTEP_LOGINS__VALID_S=str(VALID_S)) as up:
        cluster = new_cluster(up, "renewed")
        up.login(cluster.job)  # its account is known from here on
        creds = cluster.folder / "agent.creds"
        operator = Operator.opened(up.state.path / "nats")
        write_private(creds, aged_login(operator, agents_name(cluster.job), LEFT_S).text())

        def end() -> int:
            claims = read_credentials(creds).claims
            assert claims is not None
            return claims.exp

        ends = [end()]

        def renewals() -> int:
            if (newest := end()) != ends[-1]:
                ends.append(newest)
            return len(ends) - 1

        agent = cluster.steady(EVERSTEP_BUS__CREDENTIALS_FILE=str(creds))
        cluster.until_stepping(1)
        until(renewals, "it was renewed twice", holds=lambda count: count >= 2)
        until(lambda: time.time() > ends[1], "two logins are over")
        cluster.finish()
        cluster.until_done()
        assert [one["cause"] for one in cluster.facts("round_ended")] == ["done"]
        assert not cluster.facts("node_lost")
        assert "bus_closed_by_server" not in agent.said


def hidden(pid: int) -> bool:
    """Whether no process below this one has the name of a login in its environment."""
    names = {name for process in below(pid) for name in process.environ()}
    return not any(word in name for name in names for word in ("BUS__", "TOKEN", "CREDENTIALS"))


def test_ranks_find_no_login_in_their_environment(
    tmp_path: Path, new_cluster: NewCluster, shared_up: Up
) -> None:
    """A8: nor do the processes that start them, whatever `eval "$(everstep env)"` has set."""
    given = {
        "EVERSTEP_CLIENT__TOKEN_FILE": str(shared_up.state.token_file),
        "EVERSTEP_API__FIRST_TOKEN_FILE": "/somewhere/token",
        "EVERSTEP_MY_TOKEN": "secret",
    }
    for options in (("--cold",), ()):
        cluster = new_cluster(shared_up, "cold" if options else "warm")
        script = cluster.folder / "waits.py"
        script.write_text(
            "import sys, time\nfrom pathlib import Path\n"
            "while not Path(sys.argv[1]).exists():\n    time.sleep(0.01)\n"
        )
        end = cluster.folder / "end"
        agent = cluster.run(*options, str(script), str(end), **given)
        until(partial(agent.children, "waits.py"), "it has a rank")
        # Between its fork and its exec a process is a copy of the agent, for an instant.
        until(partial(hidden, agent.pid), "no process below the agent has a login", despite=Gone)
        end.touch()
        assert agent.wait() == 0
