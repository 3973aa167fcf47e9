"""The reports of a rank, for agents and people; and the imports of a writer."""

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from trainer_sdk.bootstrap.agent_link import AgentLink, private_page
from trainer_sdk.checkpoint.events import FailedEvent, Reporter, SaveStartedEvent
from trainer_sdk.wire import Checkpointed, Datagram


class Wire:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, octets: bytes, /) -> int:
        self.sent.append(msgspec.json.decode(octets, type=Datagram))
        return len(octets)


def test_an_agent_decodes_the_events_of_a_reporter() -> None:
    link, wire = AgentLink({}), Wire()
    link.attach(private_page(), wire, 3, 1)
    Reporter(1, link).report(SaveStartedEvent(step=9, occasion="interval"))
    assert wire.sent == [
        Checkpointed(
            round=3,
            rank=1,
            event="save_started",
            body={"step": 9, "tier": "global", "occasion": "interval"},
        )
    ]


def test_a_field_that_is_unknown_is_left_out() -> None:
    link, wire = AgentLink({}), Wire()
    link.attach(private_page(), wire, 3, 1)
    failed = FailedEvent(step=9, tier="memory", stage="keep", reason="too large", error="quota")
    Reporter(1, link).report(failed)
    (line,) = wire.sent
    assert line.body == {
        "step": 9,
        "tier": "memory",
        "stage": "keep",
        "reason": "too large",
        "error": "quota",
    }


def test_without_an_agent_only_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(4, None)
    reporter.report(SaveStartedEvent(step=9, occasion="interval"))
    reporter.warn("step 9 was not saved")
    assert capsys.readouterr().err == "everstep: rank 4: step 9 was not saved\n"


def test_the_writer_imports_no_torch() -> None:
    """Without torch it starts in a tenth of the time, with a tenth of the memory."""
    code = (
        "import sys, trainer_sdk.checkpoint.writer.__main__; "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
