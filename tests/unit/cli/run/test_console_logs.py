"""What the console of `everstep run` shows of the log: the console belongs to the ranks."""

import logging

import pytest

from everstep_services.cli.invocation import Invocation
from everstep_services.cli.run.launch import _configure_logs

_LATE = logging.getLogger("everstep.observe.metrics")


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize(("level", "is_shown"), [("", False), ("warning", True)])
def test_a_late_loop_is_shown_only_to_those_who_ask_for_the_log(
    capsys: pytest.CaptureFixture[str], level: str, is_shown: bool
) -> None:
    _configure_logs(Invocation(environ={"EVERSTEP_LOG__LEVEL": level} if level else {}))
    _LATE.warning("loop_blocked lag_s=%.2f limit_s=%.2f", 1.36, 1.0)
    logging.getLogger("everstep.bus").warning("bus_lost after_s=%.1f", 1.0)
    shown = capsys.readouterr().err
    assert ("loop_blocked" in shown) == is_shown
    assert "bus_lost" in shown
