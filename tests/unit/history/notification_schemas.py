"""What the documentation of each receiver says that a message must be like."""

import re
from datetime import datetime
from typing import Any

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def check_pagerduty(event: dict[str, Any]) -> dict[str, Any]:
    """Events API v2: https://developer.pagerduty.com/docs/events-api-v2/trigger-events/."""
    assert event.keys() <= {
        *("routing_key", "event_action", "dedup_key", "payload", "client", "client_url"),
        *("links", "images"),
    }
    assert re.fullmatch(r"[A-Za-z0-9]{32}", event["routing_key"])
    assert event["event_action"] in {"trigger", "acknowledge", "resolve"}
    assert 0 < len(event["dedup_key"]) <= 255
    payload = event["payload"]
    assert payload.keys() <= {
        *("summary", "source", "severity", "timestamp", "component", "group", "class"),
        "custom_details",
    }
    assert 0 < len(payload["summary"]) <= 1024
    assert payload["source"]
    assert payload["severity"] in {"critical", "error", "warning", "info"}
    if "timestamp" in payload:
        assert datetime.fromisoformat(payload["timestamp"]).tzinfo is not None
    assert all(link["href"].startswith("http") for link in event.get("links", []))
    return event


def check_alerts(alerts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`postableAlerts` of Alertmanager's api/v2/openapi.yaml."""
    for alert in alerts:
        assert alert.keys() <= {"labels", "annotations", "startsAt", "endsAt", "generatorURL"}
        assert alert["labels"]["alertname"]
        for name, value in {**alert["labels"], **alert["annotations"]}.items():
            assert _LABEL.fullmatch(name)
            assert isinstance(value, str)
        starts_at, ends_at = (
            datetime.fromisoformat(alert[name]) for name in ("startsAt", "endsAt")
        )
        assert starts_at.tzinfo is not None
        assert starts_at <= ends_at, "start time must be before end time"
    return alerts


def check_slack(message: dict[str, Any]) -> dict[str, Any]:
    """https://api.slack.com/reference/messaging/attachments, as Mattermost knows it, too."""
    assert message["text"]
    assert len(message["text"]) <= 4000
    for one in message["attachments"]:
        assert re.fullmatch(r"#[0-9a-f]{6}", one["color"])
        assert all(entry.keys() == {"title", "value", "short"} for entry in one["fields"])
    return message
