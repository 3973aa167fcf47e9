"""Streams and buckets: creates those that must exist, and verifies them by reading them back.

The same code serves the dev server and production (`everstep bus init`); it may run again.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any

from everstep import subjects
from everstep.bus.diagnosis import has_batches
from everstep.bus.errors import BusError, BusRefusedError, NoStreamError, TopologyError
from everstep.bus.jetstream import JetStream
from everstep.bus.settings import BusSettings

log = logging.getLogger(__name__)

FACTS_STREAM = "FACTS"
EVIDENCE_STREAM = "EVIDENCE"
LOGS_STREAM, LOG_INDEX_STREAM = "LOGS", "LOG_INDEX"
ROUNDS, LIMITS, CONTROL, NODES = "ROUNDS", "LIMITS", "CONTROL", "NODES"
STRAGGLERS = "STRAGGLERS"
CHECKPOINTS, CASES, NOTICES = "CHECKPOINTS", "CASES", "NOTICES"
LEASES, PROBE = "LEASES", "PROBE"

_VERIFY_EVERY_S = 60.0
_BATCHES = "allow_atomic"
_SECOND = 1_000_000_000
_DAY = 24 * 3600 * _SECOND
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """A stream as we want it; the server adds its own defaults for the rest."""

    name: str
    config: dict[str, Any] = field(hash=False)


def plans(replicas: int, retention: BusSettings) -> list[StreamPlan]:
    """Every stream that Everstep uses."""
    common = {
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "num_replicas": replicas,
        "allow_direct": True,
    }
    facts = {
        "subjects": [subjects.FACTS],
        "max_age": retention.facts_days * _DAY,
        "max_bytes": retention.facts_bytes,
        "max_msg_size": _MIB,
        "duplicate_window": 120 * _SECOND,
        "max_consumers": 256,
        "deny_delete": True,
        _BATCHES: True,
    }
    evidence = {
        "subjects": [subjects.BLOBS],
        "max_age": retention.evidence_days * _DAY,
        "max_bytes": retention.evidence_bytes,
        "max_msgs_per_subject": 1,
        "discard": "new",
        "discard_new_per_subject": True,
        "deny_delete": True,
    }
    logs = {
        "subjects": [subjects.LOGS],
        "max_age": retention.logs_days * _DAY,
        "max_bytes": retention.logs_bytes,
        "max_msg_size": _MIB,
        "duplicate_window": 120 * _SECOND,
        "deny_delete": True,
    }
    log_index = {
        "subjects": [subjects.LOG_INDEXES],
        "max_age": retention.logs_days * _DAY,
        "max_bytes": 64 * _MIB,
        "max_msgs_per_subject": 1,
        "deny_delete": True,
    }
    return [
        StreamPlan(FACTS_STREAM, common | facts),
        StreamPlan(EVIDENCE_STREAM, common | evidence),
        StreamPlan(LOGS_STREAM, common | logs),
        StreamPlan(LOG_INDEX_STREAM, common | log_index),
        *(
            _bucket(name, common, announced=True)
            for name in (ROUNDS, LIMITS, STRAGGLERS, CONTROL, NODES)
        ),
        _bucket(CHECKPOINTS, common),
        _bucket(CASES, common),
        _bucket(NOTICES, common),
        _bucket(LEASES, common),
        _bucket(PROBE, common | {"max_age": 3600 * _SECOND}),
    ]


def _bucket(name: str, common: dict[str, Any], *, announced: bool = False) -> StreamPlan:
    config: dict[str, Any] = common | {
        "subjects": [f"$KV.{name}.>"],
        "max_msgs_per_subject": 1,
        "max_msg_size": _MIB,
        "max_bytes": 256 * _MIB,
        "discard": "new",
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": 30 * _SECOND,
    }
    if announced:
        news = subjects.document_news(name)
        config["republish"] = {"src": f"$KV.{name}.>", "dest": news}
    return StreamPlan(f"KV_{name}", config)


async def init(
    jetstream: JetStream,
    *,
    replicas: int = 1,
    retention: BusSettings | None = None,
    correct: bool = True,
) -> list[str]:
    """Create what is missing, correct what differs, and return one line for each change.

    `TopologyError` when the server stores a stream's configuration differently.
    """
    done: list[str] = []
    for plan in plans(replicas, retention or BusSettings()):
        if not has_batches(jetstream.connection.client):
            plan.config.pop(_BATCHES, None)
        word = await _ensure(jetstream, plan, correct=correct)
        if word != "kept":
            log.info("stream_%s name=%s", word, plan.name)
        done.append(f"{plan.name} {word}")
    return done


async def keep_for_ever(
    jetstream: JetStream, *, replicas: int = 1, retention: BusSettings | None = None
) -> None:
    """Create the streams again whenever they are missing: within a minute of a wipe.

    Any number of services of the control plane run this in the background. It never changes a
    stream that exists: an operator or a newer release may have configured it.
    """
    look = asyncio.Event()
    with jetstream.connection.noticing(up=look.set):
        while True:
            await jetstream.connection.wait_connected()
            look.clear()
            try:
                await init(jetstream, replicas=replicas, retention=retention, correct=False)
            except BusError as error:
                log.warning("streams_not_verified error=%s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_VERIFY_EVERY_S):
                    await look.wait()


async def _ensure(jetstream: JetStream, plan: StreamPlan, *, correct: bool) -> str:
    wanted = {"name": plan.name, **plan.config}
    try:
        current = await _config(jetstream, plan.name)
    except NoStreamError:
        word = "made"
        await _call(jetstream, f"STREAM.CREATE.{plan.name}", wanted)
    else:
        if not correct or not _differences(plan, current):
            return "kept"
        word = "corrected"
        await _call(jetstream, f"STREAM.UPDATE.{plan.name}", {**current, **wanted})
    differences = _differences(plan, await _config(jetstream, plan.name))
    if differences:
        raise TopologyError(
            f"the server changed the configuration of {plan.name}: {'; '.join(differences)}"
        )
    return word


async def _call(jetstream: JetStream, verb: str, body: dict[str, Any]) -> None:
    try:
        await jetstream.api(verb, body)
    except BusRefusedError as error:
        if error.code == 10047:  # insufficient storage
            raise TopologyError(
                f"the server has too little JetStream storage for {verb.split('.')[-1]}: raise "
                f"max_file_store, or lower the retention"
            ) from error
        raise TopologyError(f"the stream cannot be set up: {error}") from error


async def _config(jetstream: JetStream, name: str) -> dict[str, Any]:
    config: dict[str, Any] = (await jetstream.api(f"STREAM.INFO.{name}"))["config"]
    return config


def _differences(plan: StreamPlan, current: dict[str, Any]) -> list[str]:
    return [
        f"{key} is {current.get(key)!r}, not {value!r}"
        for key, value in plan.config.items()
        if current.get(key) != value
    ]
