"""The options of faults, and the refusals of invalid ones."""

import pytest

import trainer_sdk.inject as injecting
from trainer_sdk.inject.catalog import FAULTS, BadFaultError, fault_named, fault_request, planned

NVRX = {
    "GPU_ERROR": "gpu_error",
    "GPU_SLEEP": "gpu_sleep",
    "WORKLOAD_EXC": "exception",
    "ASYNC_EXC": "async_exception",
    "SIGNAL_EXC": "signal_exception",
    "OS_ABORT": "abort",
    "LOCK_GIL": "hold_gil",
    "SEGFAULT": "segfault",
    "SIGINT": "interrupt",
    "SIGKILL": "kill",
    "SIGTERM": "terminate",
    "SIGSTOP": "stop",
}


@pytest.mark.parametrize(("theirs", "ours"), NVRX.items())
def test_the_names_of_nvrx_are_known(theirs: str, ours: str) -> None:
    assert fault_named(theirs) is FAULTS[ours]


def test_names_may_be_written_with_hyphens() -> None:
    assert fault_named("hold-gil") is FAULTS["hold_gil"]


def test_options_that_are_not_given_have_defaults() -> None:
    slow = fault_request("slow")
    assert (slow.for_s, slow.amount) == (10, 100)
    assert fault_request("hang").for_s is None
    assert fault_request("clock_skew", amount=-60, for_s=2).amount == -60


def test_a_numeric_fault_is_made_once_or_each_time_of_a_duration() -> None:
    once = fault_request("flip-gradient")
    assert (once.for_s, once.amount, once.target) == (None, 8, "")
    stuck = fault_request("flip_parameter", for_s=60, amount=1, target="layers.0.weight:17")
    assert (stuck.for_s, stuck.amount, stuck.target) == (60, 1, "layers.0.weight:17")


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"text": "slwo"}, "there is no fault 'slwo'; did you mean slow?"),
        ({"text": "kill", "for_s": 3}, "kill happens once: it cannot last for 3 s"),
        ({"text": "hang", "for_s": 0}, "hang cannot last for 0 s: above 0, up to a day"),
        (
            {"text": "exit", "amount": 256},
            "exit cannot have an amount of 256: it is exit code",
        ),
        ({"text": "slow", "amount": 0}, "slow cannot have an amount of 0: it is ms a step, from"),
        ({"text": "hang", "amount": 1}, "hang has no amount, but 1 is given"),
        ({"text": "flip_gradient", "amount": 64}, "flip_gradient cannot have an amount of 64"),
        (
            {"text": "flip_gradient", "target": "a:b"},
            "flip_gradient has no target 'a:b': it is the",
        ),
        ({"text": "poison_batch", "for_s": 3}, "poison_batch happens once: it cannot last for"),
        ({"text": "stall"}, "stall needs a target: the section"),
        ({"text": "kill", "target": "x"}, "kill has no target, but 'x' is given"),
    ],
)
def test_an_invalid_fault_is_refused_in_one_line(asked: dict[str, float], text: str) -> None:
    with pytest.raises(BadFaultError) as error:
        fault_request(**asked)  # type: ignore[arg-type]
    assert str(error.value).startswith(text)
    assert "\n" not in str(error.value)


def test_a_script_cannot_inject_faults_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERSTEP_INJECTION", raising=False)
    with pytest.raises(injecting.NotAllowedError, match="not started with --allow-injection"):
        injecting.now("exit")


def test_a_plan_is_for_one_rank_and_one_round() -> None:
    text = "exit@30:rank=1,amount=3; stall@5:target=forward,for=2; kill@1:round=2"
    here = {"EVERSTEP_INJECT": text, "RANK": "1", "EVERSTEP_ROUND": "1"}
    assert [(step, one.fault.name) for step, one in planned(here)] == [(30, "exit"), (5, "stall")]
    there = {**here, "RANK": "0", "EVERSTEP_ROUND": "2"}
    assert [(step, one.fault.name) for step, one in planned(there)] == [(1, "kill")]
    assert list(planned({})) == []


@pytest.mark.parametrize("text", ["exit", "exit@x", "exit@3:when=2", "exit@3:amount=", "no@3"])
def test_an_unreadable_fault_plan_is_named_in_the_error(text: str) -> None:
    with pytest.raises(BadFaultError, match="EVERSTEP_INJECT: "):
        list(planned({"EVERSTEP_INJECT": text}))
