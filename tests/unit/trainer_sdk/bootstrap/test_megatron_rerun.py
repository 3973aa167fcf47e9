"""What Megatron's re-run machine logs becomes events; a fake machine in its shape logs it."""

import json
import os
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trainer_sdk.bootstrap import megatron_rerun
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.bootstrap.torch_hooks import RERUN_MACHINE

Status = Enum("Status", {"FIRST": "initial_run", "OTHER": "an event of a newer release"})


class Sent(AgentLink):
    def __init__(self) -> None:
        super().__init__({})
        self.events: list[dict[str, Any]] = []

    def send(self, kind: str, fields: str) -> None:
        self.events.append({"type": kind, **json.loads(f"{{{fields}}}")})


class Machine:
    """The parts that are read."""

    current_iteration = 5
    initial_result: Any = 333.0
    suspicious_node: str | None = None
    suspicious_device: int | None = None
    checkpoint_requested = True
    error_injector = SimpleNamespace(should_inject_errors=False)

    def __init__(self) -> None:
        self.logged: list[Any] = []

    def _log_validation_error_to_file(self, status: Any, result: Any, message: str) -> None:
        self.logged.append(status)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    module, link = ModuleType(RERUN_MACHINE), Sent()
    module.RerunStateMachine = type("Copy", (Machine,), dict(vars(Machine)))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, RERUN_MACHINE, module)
    cuda = SimpleNamespace(cuda=SimpleNamespace(current_device=lambda: 2))
    monkeypatch.setitem(sys.modules, "torch", cuda)
    megatron_rerun.watch(link, {"RANK": "3", "EVERSTEP_NODE": "n1"})
    return link


def logged(status: Any, result: Any = 333.0, **values: Any) -> list[Any]:
    machine = sys.modules[RERUN_MACHINE].RerunStateMachine()
    vars(machine).update(values)
    machine._log_validation_error_to_file(status=status, result=result, message="Spiky loss")
    return list(machine.logged)


def test_a_result_is_suspected_with_the_step_that_it_belongs_to(sent: Sent) -> None:
    assert logged(Status["FIRST"]) == [Status["FIRST"]], "Megatron itself logs it, too"
    (event,) = sent.events
    assert (event["type"], event["event"]) == ("numerics", "suspected")
    body = event["body"]
    assert (body["step"], body["rank"], body["value"], body["signal"]) == (
        6,
        3,
        333.0,
        "loss_spike",
    )
    logged("initial_run", float("nan"))
    assert [sent.events[1]["body"][name] for name in ("value", "signal")] == [None, "nan"]


@pytest.mark.parametrize(
    ("status", "host", "kind", "node", "device"),
    [
        ("first_rerun_not_reproducible", None, "transient", "n1", "cuda:2"),
        ("second_rerun_not_reproducible", "gpu-7.cluster", "persistent", "gpu-7-cluster", "cuda:0"),
        ("second_rerun_not_reproducible", os.uname()[1], "persistent", "n1", "cuda:0"),
        ("second_rerun_reproducible", "gpu-7", "correct_but_unexpected", "n1", "cuda:2"),
    ],
)
def test_a_re_run_judges_it_and_names_where_it_was_wrong(
    sent: Sent, status: str, host: str | None, kind: str, node: str, device: str
) -> None:
    logged("initial_run")
    logged(status, 0.5, suspicious_node=host, suspicious_device=0)
    first, last = (event["body"] for event in sent.events)
    assert first["case"] == last["case"], "also after the ranks have moved"
    assert (last["kind"], last["ranks"], last["node"], last["device"]) == (kind, [3], node, device)
    assert last["first"] == 333.0
    assert "333" in last["reason"]


def test_a_result_that_came_again_moves_the_job_only_if_it_is_fatal(sent: Sent) -> None:
    logged("first_rerun_reproducible", checkpoint_requested=False)
    assert sent.events == []
    logged("first_rerun_reproducible")
    assert (sent.events[0]["body"]["action"], sent.events[0]["body"]["outcome"]) == ("move", "done")


def test_errors_that_megatron_injects_are_called_so(sent: Sent) -> None:
    logged("initial_run", error_injector=SimpleNamespace(should_inject_errors=True))
    assert [event["type"] for event in sent.events] == ["injected", "numerics"]


def test_another_release_ends_no_training(sent: Sent, capsys: pytest.CaptureFixture[str]) -> None:
    logged(Status["OTHER"])
    logged("initial_run", current_iteration=None)
    assert sent.events == []
    assert "could not be reported: TypeError" in capsys.readouterr().err
    sys.modules[RERUN_MACHINE].RerunStateMachine = object  # type: ignore[attr-defined]
    megatron_rerun.watch(sent, {})
    assert "another re-run state machine" in capsys.readouterr().err
