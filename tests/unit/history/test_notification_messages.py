"""What messages say, how they are signed, and which settings are refused."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.messages.documents.notices import Notice
from everstep.settings import SettingsError
from everstep_services.history.dashboard.pages import PAGES
from everstep_services.history.notifications import payloads, texts
from everstep_services.history.notifications.http_client import HttpAnswer
from everstep_services.history.notifications.notices import EVENTS, Delivery, Step
from everstep_services.history.notifications.settings import (
    NotifySettings,
    PagerDutySettings,
    SlackSettings,
    WebhookSettings,
)
from everstep_services.history.notifications.targets import secret_url, signed_headers
from tests.unit.history.notification_schemas import check_alerts, check_pagerduty, check_slack

GUIDE = Path(__file__).parents[3] / "docs/guides/notifications.md"
REFERENCE = Path(__file__).parents[3] / "docs/reference"
HEALTH_EVENTS, NOTICE = (
    jsonschema_rs.validator_for(msgspec.json.decode((REFERENCE / name).read_bytes()))
    for name in ("health-events.schema.json", "notice.schema.json")
)
NOW = datetime(2026, 11, 21, 8, 40, tzinfo=UTC)
KEY = "R" * 32
URL = "https://everstep.example/"

TEXTS = st.text(max_size=1500)
NOTICES = st.builds(
    Notice,
    id=st.text(max_size=600),
    event=st.sampled_from([*EVENTS, "test"]),
    state=st.sampled_from(["firing", "resolved"]),
    heard_s=st.floats(0, 2e9),
    job=st.text(min_size=1, max_size=200),
    subject=st.text(max_size=200),
    began_at=st.sampled_from([None, NOW - timedelta(days=1), NOW + timedelta(days=1)]),
    ended_at=st.sampled_from([None, NOW - timedelta(days=2), NOW + timedelta(days=2)]),
    reason=TEXTS,
    ending=TEXTS,
    outcome=st.text(max_size=500),
    cause=st.text(max_size=500),
    verdict=TEXTS,
    confidence=st.one_of(st.none(), st.floats(0, 1)),
    ranks=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=16).map(tuple),
    nodes=st.lists(st.text(max_size=500), max_size=16).map(tuple),
    affected=st.integers(0, 2**53 - 1),
    action=TEXTS,
    lost_s=st.one_of(st.none(), st.floats(0, 1e9)),
    cost_ratio=st.one_of(st.none(), st.floats(0, 10)),
    more=st.integers(0, 1000),
    more_since_s=st.one_of(st.none(), st.floats(0, 2e9)),
)


@given(NOTICES, st.sampled_from(["", URL]))
def test_whatever_is_told_every_receiver_takes_it(notice: Notice, url: str) -> None:
    step: Step = "resolved" if notice.state == "resolved" else "firing"
    delivery = Delivery("x", step, notice)
    check_pagerduty(payloads.pagerduty(delivery, url, KEY))
    check_alerts([payloads.alertmanager(notice, url, NOW)])
    HEALTH_EVENTS.validate(payloads.health_events(delivery, url))
    NOTICE.validate(msgspec.to_builtins(payloads.webhook(delivery, url)))
    message = check_slack(payloads.slack(delivery, url))
    shown = [message["text"], message["attachments"][0]["text"]]
    shown += [one["value"] for one in message["attachments"][0]["fields"]]
    assert not any(re.search(r"[<>@]|&(?!amp;|lt;|gt;)", text) for text in shown)
    for body in (message, payloads.webhook(delivery, url), payloads.pagerduty(delivery, url, KEY)):
        assert len(msgspec.json.encode(body)) < 60_000


def test_the_schema_has_the_fields_of_a_notice_and_the_guide_shows_one() -> None:
    schema = msgspec.json.decode((REFERENCE / "notice.schema.json").read_bytes())
    fields = payloads.webhook(Delivery("webhook", "firing", a_notice()), URL)
    assert schema["properties"].keys() == fields.keys() == set(schema["required"])
    (example,) = re.findall(
        r"```json\n(\{\"schema\": \"everstep.*?)\n```", GUIDE.read_text(), re.DOTALL
    )
    NOTICE.validate(msgspec.json.decode(example))
    with pytest.raises(jsonschema_rs.ValidationError, match="state"):
        NOTICE.validate({**fields, "state": "open"})


def test_health_events_are_one_for_each_node_and_healthy_when_it_is_over() -> None:
    notice = a_notice(event="node_excluded", nodes=("node-3", "node-4"), cause="gpu")
    events = payloads.health_events(Delivery("webhook", "firing", notice), URL)["events"]
    assert [event["nodeName"] for event in events] == ["node-3", "node-4"]
    assert (events[0]["isFatal"], events[0]["recommendedAction"]) == (True, "CONTACT_SUPPORT")
    over = msgspec.structs.replace(notice, state="resolved", outcome="included", ended_at=NOW)
    event = payloads.health_events(Delivery("webhook", "resolved", over), URL)["events"][0]
    assert (event["isHealthy"], event["isFatal"], event["recommendedAction"]) == (
        True,
        False,
        "NONE",
    )


def a_notice(**more: Any) -> Notice:
    known: dict[str, Any] = {
        "id": "vit/i1", "event": "incident", "state": "firing", "heard_s": 1000.0, "job": "vit",
        "subject": "i1", "began_at": NOW, "reason": "rank 3 exited with 1",
    }  # fmt: skip
    return Notice(**{**known, **more})


def test_a_message_reads_well() -> None:
    notice = a_notice(
        cause="gpu", confidence=0.92, verdict="its memory is bad", ranks=(3,), nodes=("n1",),
        action="restart: 2 are left", more=7, more_since_s=700.0,
    )  # fmt: skip
    assert texts.title(notice) == "vit: incident (gpu) rank 3 on n1: its memory is bad"
    assert texts.text(notice) == (
        "Verdict: gpu (92%). its memory is bad\nFirst reported: rank 3 exited with 1\n"
        "Done: restart: 2 are left\nand 7 more in 5 minutes"
    )
    assert texts.link(notice, URL) == "https://everstep.example/incidents/i1"
    over = a_notice(outcome="recovered", ending="round 2 trains", lost_s=7.5, lost_steps=3)
    assert texts.title(over) == "vit: incident recovered"
    assert "Cost: 7.5 s, 3 steps made again" in texts.text(over)
    odd = a_notice(event="slow_rank", job="a/../b?c")
    assert texts.link(odd, URL) == "https://everstep.example/jobs/a%2F..%2Fb%3Fc/stragglers"


def test_a_verdict_without_a_culprit_leaves_the_first_report_first() -> None:
    """A11.1: an inconclusive verdict names nobody, and hides nothing."""
    verdict = "there is too little evidence"
    notice = a_notice(cause="unknown", confidence=0.0, verdict=verdict, is_inconclusive=True)
    assert texts.title(notice) == "vit: incident: rank 3 exited with 1"
    assert texts.text(notice) == "rank 3 exited with 1\nVerdict: there is too little evidence"


def test_the_end_does_not_repeat_what_was_reported() -> None:
    ending = "rank 3 exited with 1; rank 3 moves again"
    over = a_notice(state="resolved", outcome="recovered", ending=ending)
    assert texts.text(over) == "rank 3 exited with 1\nEnd: rank 3 moves again"
    over = msgspec.structs.replace(
        over, cause="gpu", verdict="step 7: NaN; 1 again", reason="a NaN"
    )
    over = msgspec.structs.replace(over, ending="NaN; 1 again; the step was made again")
    assert texts.text(over).endswith("First reported: a NaN\nEnd: the step was made again")


def test_every_link_is_a_page_of_the_dashboard() -> None:
    pages = [re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in PAGES]
    for event in EVENTS:
        path = texts.link(a_notice(event=event), "https://e")[len("https://e") :]
        assert any(page.fullmatch(path) for page in pages), path


def is_genuine() -> Callable[..., bool]:
    """The function that the guide shows."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    found: Callable[..., bool] = names["is_genuine"]
    return found


def test_the_guide_s_check_knows_what_we_sign_and_nothing_else() -> None:
    body, check = b'{"a": 1}', is_genuine()
    headers = {name.lower(): value for name, value in signed_headers("s", body, 1000).items()}
    assert check("s", headers, body, now=1010)
    assert not check("t", headers, body, now=1010)
    assert not check("s", headers, body + b" ", now=1010)
    assert not check("s", headers, body, now=2000)
    assert not check("s", {**headers, "everstep-timestamp": "1001"}, body, now=1010)
    assert not check("s", {}, body, now=1010)


@pytest.mark.parametrize(
    ("value", "wait_s"),
    [
        ("7", 7.0), ("", None), ("soon", None), ("-1", None), ("²", None),
        ("Sat, 21 Nov 2026 08:40:30 GMT", 30.0), ("Sat, 21 Nov 2026 08:00:00 GMT", 0.0),
    ],
)  # fmt: skip
def test_a_target_says_how_long_to_wait(value: str, wait_s: float | None) -> None:
    assert HttpAnswer(429, "", value).wait_s(NOW) == wait_s


@pytest.mark.parametrize(
    ("status", "is_taken", "is_final"),
    [
        (200, True, False), (202, True, False), (301, False, True), (400, False, True),
        (408, False, False), (410, False, True), (429, False, False), (500, False, False),
    ],
)  # fmt: skip
def test_what_a_status_means(status: int, *, is_taken: bool, is_final: bool) -> None:
    answer = HttpAnswer(status, "")
    assert (answer.is_taken, answer.is_final) == (is_taken, is_final)


def test_nothing_is_sent_unless_it_is_set(tmp_path: Path) -> None:
    assert not NotifySettings().is_on
    some = NotifySettings(
        slack=SlackSettings(url_file=tmp_path / "slack"),
        pagerduty=PagerDutySettings(routing_key_file=tmp_path / "key"),
    )
    assert some.targets == ("slack", "pagerduty")


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "ftp://a"}, {"url": "https://u:p@a"}, {"url": "https://"},
        {"url": "https://a", "url_file": Path("x")}, {"secret_file": Path("x")},
    ],
)  # fmt: skip
def test_a_wrong_address_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="url"):
        WebhookSettings(**wrong)


@pytest.mark.parametrize("text", ["hello", "ftp://a/b", "https://u:pass@a/b", "https://a/b c"])
def test_a_file_with_a_wrong_address_is_named_and_not_shown(text: str, tmp_path: Path) -> None:
    path = tmp_path / "slack.url"
    path.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(str(path))) as raised:
        secret_url(path)
    assert text not in str(raised.value)
