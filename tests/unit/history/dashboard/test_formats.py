"""How pages write numbers and causes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_services.history.dashboard.formats import clip, duration, gist, judged, percent, size


@given(st.floats(1e-12, 1e15))
def test_no_number_has_an_exponent(value: float) -> None:
    for text in (size(value), percent(value)):
        assert "e" not in text.lower(), text
    if value > 1e-9:
        assert "e+" not in duration(value)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (size(1023 * 1024), "1023 KiB"),
        (size(1024 * 1024), "1 MiB"),
        (duration(0.9996), "1 s"),
        (duration(0.99949), "999 ms"),
        (percent(12.5), "1250\u202f%"),
    ],
)
def test_three_digits_or_all_before_the_point(text: str, written: str) -> None:
    assert text == written


def test_nobody_is_sure_of_a_cause_that_is_not_known() -> None:
    assert judged("unknown", 0.79) == "not known"
    assert judged("user_code", 0.79) == "user code <small>79\u202f%</small>"
    assert judged("<b>", None) == "&lt;b&gt;"


def test_the_end_of_a_rank_says_which_rank_and_how() -> None:
    for end, text in (({"exit_code": 0}, "exit code 0"), ({"signal": "SIGKILL"}, "SIGKILL")):
        fact = {"kind": "rank_exited", "body": {"rank": 3, **end}}
        assert gist(fact) == f"rank 3 ended: {text}"


def test_a_fact_without_a_reason_says_what_it_is_about() -> None:
    assert gist({"kind": "rank_started", "body": {"rank": 0, "round": 2}}) == "rank 0, round 2"
    windows = {"windows": [[1, 64], [65, 128]], "round": 1}
    assert gist({"kind": "heat_map_drawn", "body": windows}).endswith("the last 2 windows")
    assert gist({"kind": "bus_set_up", "body": {}}) == ""
    check = {"kind": "node_check_finished", "body": {"occasion": "join", "is_healthy": False}}
    assert gist(check) == "join: unhealthy"


def test_a_long_sentence_keeps_its_end_and_a_long_name_its_beginning() -> None:
    why = f"rank 1 exited with 1: {'RuntimeError ' * 20}; restart 1 of 4"
    assert "RuntimeErro…" not in clip(why, 160)
    assert 140 < len(clip(why, 160)) <= 160
    assert clip(why, 160).startswith("rank 1 exited with 1: RuntimeError")
    assert clip(why, 160).endswith("; restart 1 of 4")
    victim = (
        f"n2 left: SIGTERM announced that it ends; rank 0 failed only {'so ' * 9}because of that"
    )
    assert clip(f"{victim}; first reported: {'text ' * 30}", 80) == f"{victim[:39]}; …"
    assert clip(f"{victim}; {'text ' * 30}; restart 1", 80) == f"{victim[:39]}; … restart 1"
    assert clip("n" * 50, 40) == "n" * 39 + "…"
    assert (clip(None), clip("short", 160)) == ("—", "short")


def test_an_act_tells_who_did_what_to_what() -> None:
    body = {"by": "ann", "action": "drain_node", "target": "c-n2", "outcome": "accepted"}
    fact = {"kind": "operator_acted", "body": body | {"reason": "the fan is loud"}}
    assert gist(fact) == "ann: drain node c-n2: the fan is loud"
    refused = body | {"outcome": "refused", "reason": "the fan; it takes no part"}
    text = "ann: drain node c-n2, refused: the fan; it takes no part"
    assert gist({"kind": "operator_acted", "body": refused}) == text
    included = {"kind": "node_included", "body": {"by": "ann", "reason": "repaired"}}
    assert gist(included) == "ann: repaired"
