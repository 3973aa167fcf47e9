"""A process is the rank of another round: its environment, its page and its counts."""

import os
import socket
from pathlib import Path

import msgspec
import pytest

from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.page import PageView, make_page
from trainer_sdk.rank_session import Session
from trainer_sdk.survive import next_round
from trainer_sdk.wire import Datagram, Stepped, Up


def opened(folder: Path, number: int, rank: int) -> tuple[PageView, dict[str, str]]:
    page = folder / f"page-{number}"
    return make_page(str(page)), {
        layout.PAGE_VARIABLE: str(page),
        layout.SOCKET_VARIABLE: str(folder / "agent.sock"),
        layout.FOLDER_VARIABLE: str(folder),
        layout.ROUND_VARIABLE: str(number),
        "RANK": str(rank),
    }


def received(agent: socket.socket) -> list[Datagram]:
    """All datagrams that have come."""
    lines: list[Datagram] = []
    while True:
        try:
            lines.append(msgspec.json.decode(agent.recv(4096), type=Datagram))
        except BlockingIOError:
            return lines


def test_a_second_link_of_a_rank_leaves_its_page_as_it_is(tmp_path: Path) -> None:
    """A rank whose page has lost its deferred signals does not end by SIGTERM."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as agent:
        agent.bind(str(tmp_path / "agent.sock"))
        _, environ = opened(tmp_path, 1, 3)
        links = [AgentLink(environ)]
        links[0].words[layout.DEFERRED] = 1 << 15
        links.append(AgentLink(environ))
        assert [link.words[layout.DEFERRED] for link in links] == [1 << 15] * 2
        for link in links:
            link._socket.close()  # type: ignore[union-attr]


def test_a_session_goes_on_in_the_next_round(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as agent:
        agent.bind(str(tmp_path / "agent.sock"))
        first, environ = opened(tmp_path, 1, 3)
        run = Session(AgentLink(environ))
        forward, save = run.section("forward"), run.section("save")
        run.start_at(4, total=90)
        for _ in range(3):
            with forward, run.section("inner"):
                run.report("loss", 1.5)
            run.step()
        run.begin("inner")
        second, environ = opened(tmp_path, 2, 5)
        before = first.read()
        run._begin_round(environ)
        assert received(agent)[-1] == Up(round=2, rank=5, pid=os.getpid())
        run.start_at(7)
        with forward:
            run.report("loss", 2.5)
        with save:
            assert run.step() == 8
        assert received(agent) == [Stepped(round=2, rank=5, step=8)]
        run._link._socket.close()  # type: ignore[union-attr]
    assert first.read() == before
    reading = second.read()
    assert reading is not None
    assert (reading.round, reading.rank, reading.pid) == (2, 5, os.getpid())
    assert (reading.step, reading.steps, reading.total_steps) == (8, 1, 90)
    assert reading.is_numbered
    assert second.values() == {"loss": 2.5}
    assert [(each.name, each.kind.name, each.count) for each in second.sections()[1:]] == [
        ("forward", "PLAIN", 1),
        ("save", "CHECKPOINT", 1),
        ("inner", "PLAIN", 0),
    ]
    assert [lane.frames for lane in second.lanes()] == [()]


def test_the_environment_is_that_of_the_entry_and_what_the_script_has_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {"EVERSTEP_CPUS": "1", "RANK": "1", "OF_SCRIPT": "yes"}
    environ["TORCH_FR_DUMP_TEMP_FILE"] = "/run/r1/1/flight_"
    monkeypatch.setattr(next_round, "environ", environ)
    next_round.change_environment({"RANK": "2", "EVERSTEP_ROUND": "2"}, "/run/r1/1")
    assert environ == {"RANK": "2", "EVERSTEP_ROUND": "2", "OF_SCRIPT": "yes"}
