"""A notice as each target wants it. Pure: the same notice makes the same body."""

from datetime import datetime, timedelta
from typing import Any

from everstep.ids import id_from
from everstep.messages.documents.notices import Notice
from everstep_services.history.notifications import texts
from everstep_services.history.notifications.notices import Delivery

_DEDUP_MOST = 255
_SUMMARY_MOST = 1024
_LASTS = timedelta(hours=1)
_COLORS = {"critical": "#a30200", "error": "#d72b0d", "warning": "#daa038", "info": "#2f6fde"}
_RESOLVED_COLOR = "#2eb886"
_BAD_OUTCOMES = frozenset({"repeated", "failed", "stopped"})
_ALERTS = {
    "incident": "EverstepIncident",
    "job_failed": "EverstepJobFailed",
    "job_stopped": "EverstepJobStopped",
    "slow_rank": "EverstepSlowRank",
    "node_drained": "EverstepNodeDrained",
    "node_excluded": "EverstepNodeExcluded",
    "breaker_open": "EverstepBreakerOpen",
    "test": "EverstepTest",
}


def webhook(delivery: Delivery, dashboard_url: str) -> dict[str, Any]:
    """Our own format: everything that is known."""
    notice = delivery.notice
    fields: dict[str, Any] = {
        "schema": "everstep.notice/1",
        "id": notice.id,
        "key": delivery.key,
        "state": notice.state,
        "step": delivery.step,
        "event": notice.event,
        "severity": texts.severity(notice),
        "title": texts.title(notice),
        "text": texts.text(notice),
        "job": notice.job,
        "subject": notice.subject,
        "link": texts.link(notice, dashboard_url),
        "began_at": _iso(notice.began_at),
        "ended_at": _iso(notice.ended_at),
        "cause": texts.clean(notice.cause, texts.FACT_MOST),
        "confidence": notice.confidence,
        "ranks": list(notice.ranks),
        "nodes": [texts.clean(node, texts.FACT_MOST) for node in notice.nodes],
        "affected_ranks": notice.affected,
        "outcome": texts.clean(notice.outcome, texts.FACT_MOST),
        "action": texts.clean(notice.action, texts.TEXT_MOST),
        "lost_s": notice.lost_s,
        "lost_steps": notice.lost_steps,
        "more": notice.more,
    }
    return fields


def health_events(delivery: Delivery, dashboard_url: str) -> dict[str, Any]:
    """An event for each node that caused it, in the field names that NVSentinel documents.

    `docs/reference/health-events.schema.json` is its schema. The events are for the record of the
    receiver (`STORE_ONLY`): Everstep has acted already.
    """
    notice = delivery.notice
    is_over = notice.state == "resolved"
    is_out = notice.event == "node_excluded"
    at = notice.ended_at if is_over and notice.ended_at else notice.began_at
    cause = texts.clean(notice.cause, texts.FACT_MOST)
    metadata = {
        "id": notice.id,
        "key": delivery.key,
        "job": notice.job,
        "cause": cause,
        "confidence": "" if notice.confidence is None else f"{notice.confidence:g}",
        "outcome": texts.clean(notice.outcome, texts.FACT_MOST),
        "link": texts.link(notice, dashboard_url),
    }
    event = {
        "version": 1,
        "agent": "everstep",
        "componentClass": _COMPONENTS.get(cause, "Job"),
        "checkName": f"everstep.{notice.event}",
        "isFatal": is_out and not is_over,
        "isHealthy": is_over,
        "message": texts.title(notice),
        "recommendedAction": "CONTACT_SUPPORT" if is_out and not is_over else "NONE",
        "errorCode": [cause] if cause else [],
        "entitiesImpacted": [
            {"entityType": "RANK", "entityValue": str(rank)} for rank in notice.ranks
        ],
        "metadata": {name: value for name, value in metadata.items() if value},
        "generatedTimestamp": _iso(at),
        "processingStrategy": "STORE_ONLY",
    }
    nodes = [texts.clean(node, texts.FACT_MOST) for node in notice.nodes] or [""]
    return {"version": 1, "events": [{**event, "nodeName": node} for node in nodes]}


_COMPONENTS = {"gpu": "GPU", "network": "NIC", "host": "Host", "storage": "Storage"}


def slack(delivery: Delivery, dashboard_url: str) -> dict[str, Any]:
    """An incoming webhook's message, in fields that Mattermost and Rocket.Chat know, too."""
    notice = delivery.notice
    is_over = notice.state == "resolved"
    is_good = is_over and notice.outcome not in _BAD_OUTCOMES
    over = "Resolved" if is_good else "Over"
    word = "Changed" if delivery.step == "update" else over if is_over else "Firing"
    headline = f"[{word}] {slack_text(texts.title(notice))}"
    attachment: dict[str, Any] = {
        "color": _RESOLVED_COLOR if is_good else _COLORS[texts.severity(notice)],
        "fallback": headline,
        "text": slack_text(texts.text(notice)),
        "fields": [
            {"title": name, "value": slack_text(value), "short": len(value) < 40}
            for name, value in texts.facts(notice).items()
        ],
        "mrkdwn_in": [],
        "footer": "Everstep",
    }
    if url := texts.link(notice, dashboard_url):
        attachment |= {"title": "Open in the dashboard", "title_link": url}
    return {
        "text": headline,
        "mrkdwn": False,
        "unfurl_links": False,
        "unfurl_media": False,
        "attachments": [attachment],
    }


def slack_text(text: str) -> str:
    """Text that mentions nobody, links nothing and formats nothing."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("@", "\uff20").replace("](", "] (")


def pagerduty(delivery: Delivery, dashboard_url: str, routing_key: str) -> dict[str, Any]:
    """An event of PagerDuty's Events API, version 2."""
    notice = delivery.notice
    url = texts.link(notice, dashboard_url)
    began_at = {} if notice.began_at is None else {"timestamp": _iso(notice.began_at)}
    event: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": "resolve" if notice.state == "resolved" else "trigger",
        "dedup_key": dedup_key(notice),
        "client": "Everstep",
        "payload": {
            "summary": texts.title(notice)[:_SUMMARY_MOST] or "Everstep",
            "source": texts.clean(notice.nodes[0] if notice.nodes else notice.job, 200) or "-",
            "severity": texts.severity(notice),
            "component": texts.clean(notice.job, 200),
            "group": "everstep",
            "class": notice.event,
            "custom_details": {**texts.facts(notice), "text": texts.text(notice)},
            **began_at,
        },
    }
    if url:
        event |= {"client_url": url, "links": [{"href": url, "text": "Open in the dashboard"}]}
    return event


def dedup_key(notice: Notice) -> str:
    """The name of the alert, the same from the first message to the last."""
    key = f"everstep/{notice.id}"
    return key if len(key) <= _DEDUP_MOST else f"everstep/{id_from(notice.id)}"


def alertmanager(notice: Notice, dashboard_url: str, now: datetime) -> dict[str, Any]:
    """An alert of Alertmanager's API, version 2. Its labels never change: they are its name."""
    began_at = now if notice.began_at is None else min(notice.began_at, now)
    alert: dict[str, Any] = {
        "labels": {
            "alertname": _ALERTS.get(notice.event, "Everstep"),
            "service": "everstep",
            "job": notice.job,
            "subject": notice.subject or notice.event,
            "notice": notice.id,
            "severity": texts.severity(notice),
        },
        "annotations": {
            "summary": texts.title(notice),
            "description": texts.text(notice),
            **{name.replace(" ", "_"): value for name, value in texts.facts(notice).items()},
        },
        "startsAt": _iso(began_at),
        "endsAt": _iso(now if notice.state == "resolved" else now + _LASTS),
    }
    if url := texts.link(notice, dashboard_url):
        alert["generatorURL"] = url
    return alert


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()
