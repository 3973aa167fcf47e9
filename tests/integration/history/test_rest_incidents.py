"""REST answers: one question tells why it happened, and what was done; logs outlive their node."""

import random
from datetime import timedelta
from typing import Any

import httpx2
import msgspec
import pytest

from everstep.bus.errors import BusUnreachableError
from everstep.messages import (
    BlobRef,
    EvidenceCollected,
    Fact,
    IncidentClosed,
    RankExited,
    TierRead,
    VerdictReached,
)
from everstep.store.evidence_copies import LARGEST, EvidenceCopies
from everstep_services.history.log_copy import LogCopier
from tests.fakes.bus import MemoryBlobs
from tests.integration.conftest import Api
from tests.unit.history.facts import BEGAN, fact_id, make
from tests.unit.history.story import BLOB, INCIDENT, JOB, TRACEBACK, begun, killed, stalled, whole

TAIL = "step 1010\nCUDA out of memory — „naïve“\n"


async def get(client: httpx2.AsyncClient, path: str, **query: Any) -> Any:
    answer = await client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def problem(client: httpx2.AsyncClient, path: str, **query: Any) -> tuple[int, str, str]:
    answer = await client.get(path, params=query)
    said = answer.json()
    return answer.status_code, said["code"], said["detail"]


async def stored(api: Api, text: str = TAIL) -> BlobRef:
    return await api.bus.blobs.put(JOB, text.encode())


def copier(api: Api, most_bytes: int = 1 << 20) -> LogCopier:
    return LogCopier(
        EvidenceCopies(api.database),
        api.bus.blobs,
        api.notifier,
        clock=api.clock,
        most_bytes=most_bytes,
    )


@pytest.mark.parametrize("seed", [None, 1, 2])
async def test_one_question_answers_why_it_happened(
    api: Api, reader: httpx2.AsyncClient, seed: int | None
) -> None:
    """One GET has rank, cause, evidence, decision, budgets and nodes (A4.6, A11.1)."""
    facts = list(whole())
    if seed is not None:
        random.Random(seed).shuffle(facts)
    await api.add(*facts)
    found = await get(reader, f"jobs/{JOB}/incidents/{INCIDENT}")

    assert (found["outcome"], found["node"], found["rank"]) == ("recovered", "node-2", 2)
    assert "exit code 1" in found["reason"]
    assert found["primary"]["error_place"] == "train.py:88 in step"
    assert found["primary"]["error_chain"] == ["RuntimeError"]
    assert found["primary"]["traceback"] == TRACEBACK
    assert {exit_["rank"] for exit_ in found["exits"]} == {0, 2}
    assert {one["kind"]: one["missing_reason"] for one in found["evidence"]} == {
        "stderr": None,
        "flight_recorder": "the rank had exited",
    }
    (action,) = found["actions"]
    assert (action["rule"], action["outcome"]) == ("restart.budget_left", "done")
    assert [one["action"] for one in action["considered"]] == ["stop", "wait"]
    assert [(one["name"], one["left"]) for one in action["budgets"]] == [
        ("restarts", 9),
        ("restarts_per_hour", 3),
    ]
    assert [one["round"] for one in found["rounds"]] == [1, 2]
    assert (found["nodes_out"], found["nodes_in"]) == (["node-2"], ["node-3"])
    assert found["verdict"] is None


async def test_ranks_that_were_slow_before_it_belong_to_the_story(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """Its own rank comes first, and what was over long before is left out (A6.1)."""

    def slow(rank: int, found_s: float, until_s: float | None, number: int = 2) -> list[Fact]:
        about: dict[str, Any] = {"job": "j", "round": number, "rank": rank}
        at = BEGAN + timedelta(seconds=found_s)
        found = make("straggler_found", at=at, **about)
        if until_s is None:
            return [found]
        at = BEGAN + timedelta(seconds=until_s)
        return [found, make("straggler_cleared", at=at, finding=found.id, **about)]

    began_s = 3600.0
    opened = make("incident_opened", job="j", incident="i", round=2, rank=5,
                  at=BEGAN + timedelta(seconds=began_s))  # fmt: skip
    await api.add(
        opened,
        *slow(5, 600, None),
        *slow(1, 0, began_s - 599),
        *slow(2, 0, began_s - 601),
        *slow(3, began_s + 1, None),
        *slow(4, 0, None, number=1),
        *slow(6, 0, began_s + 60),
        make("round_ended", job="j", round=2, at=BEGAN + timedelta(seconds=began_s + 5)),
    )
    found = await get(reader, "jobs/j/incidents/i")
    assert [one["rank"] for one in found["slow_ranks"]] == [5, 6, 1]


async def test_a_stall_is_told_with_its_limit_and_with_who_stopped_first(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """The GET of a stall has the section, the limit and its source (A11.1)."""
    await api.add(*stalled("j"))
    found = await get(reader, "jobs/j/incidents/stalled")
    stall = found["stall"]
    assert (stall["rank"], stall["section"], stall["waited_s"]) == (2, "data", 31.2)
    assert (stall["limit_s"], stall["limit_source"]) == (30, "learned")
    assert stall["blocked_in"] == "it waits for a pipe (pipe_read)"
    assert [one["rank"] for one in found["stalls"]] == [2, 0]
    located = found["located"]
    assert (located["first_ranks"], located["first_nodes"]) == ([2], ["node-2"])
    assert (located["waiting_ranks"], located["lead_s"], located["is_certain"]) == (3, 4.2, True)


async def test_a_stall_that_was_over_is_no_part_of_a_later_crash(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    over = make("rank_stalled", job=JOB, round=1, rank=2)
    await api.add(
        *begun(),
        over,
        make("stall_located", job=JOB, round=1),
        make("rank_recovered", job=JOB, round=1, rank=2, stall=over.id),
        *killed(),
    )
    found = await get(reader, f"jobs/{JOB}/incidents/{INCIDENT}")
    assert (found["stall"], found["stalls"], found["located"]) == (None, [], None)


async def test_a_ledger_sums_to_its_wall_time(api: Api, reader: httpx2.AsyncClient) -> None:
    """The phases add up, and lost steps are counted (A11.1)."""
    await api.add(*whole())
    (incident,) = (await get(reader, "incidents"))["items"]
    ledger = incident["ledger"]
    wall_s = ledger.pop("wall_s")
    assert sum(ledger.values()) == pytest.approx(wall_s)
    assert (incident["lost_steps"], incident["restored_step"]) == (10, 1000)


async def test_an_incident_names_the_state_that_the_next_round_has_loaded(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """The restore of the next round tells the step and the farthest tier (A11.1)."""
    *before, closed = whole()
    assert isinstance(closed, IncidentClosed)
    tiers = [TierRead(tier=tier, ranks=2, size_bytes=1, read_s=0.1) for tier in ("peer", "global")]
    await api.add(
        *before,
        make("checkpoint_restored", job=JOB, round=1, step=500),
        make("checkpoint_restored", job=JOB, round=2, step=1000, tiers=tuple(tiers)),
        msgspec.structs.replace(closed, restored_step=None, restored_tier=""),
    )
    found = await get(reader, f"jobs/{JOB}/incidents/{INCIDENT}")
    assert (found["restored_step"], found["restored_tier"]) == (1000, "global")


async def test_an_open_incident_is_told_as_far_as_it_is_known(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(*begun(), *killed())
    found = await get(reader, f"jobs/{JOB}/incidents/{INCIDENT}")
    assert (found["outcome"], found["ledger"], found["actions"]) == (None, None, [])
    assert [one["round"] for one in found["rounds"]] == [1]
    assert (found["nodes_out"], found["nodes_in"]) == ([], [])


async def test_a_long_traceback_is_whole_in_the_story_and_its_end_in_lists(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    (first, *rest) = killed()
    assert isinstance(first, RankExited)
    assert first.error is not None
    long = "".join(f"  line {n}\n" for n in range(4000))
    error = msgspec.structs.replace(first.error, traceback=long)
    await api.add(msgspec.structs.replace(first, error=error), *rest)
    found = await get(reader, f"jobs/{JOB}/incidents/{INCIDENT}")
    assert found["primary"]["traceback"] == long
    (exit_, _) = (await get(reader, f"jobs/{JOB}/rounds/1"))["exits"]
    assert exit_["traceback"].startswith("…\n  line ")
    assert exit_["traceback"].endswith("  line 3999\n")
    assert len(exit_["traceback"]) < 8010


async def test_the_exit_that_the_decision_rests_on_is_the_one_that_is_shown(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    cause, other, opened, *rest = killed()
    early = msgspec.structs.replace(opened, rank=0, node="node-1", trigger_fact=other.id)
    await api.add(cause, other, early, *rest)
    path = f"jobs/{JOB}/incidents/{INCIDENT}"
    assert (await get(reader, path))["primary"]["rank"] == 0
    said = make("action_decided", job=JOB, incident=INCIDENT, evidence=("unknown", cause.id))
    await api.add(said)
    found = await get(reader, path)
    assert (found["rank"], found["primary"]["rank"]) == (0, 2)


async def test_the_verdict_with_the_highest_revision_holds(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    def verdict(revision: int, cause: str) -> Fact:
        return VerdictReached(
            id=fact_id(),
            job=JOB,
            at=BEGAN,
            source="attribution",
            incident=INCIDENT,
            cause=cause,
            confidence=0.5,
            reason="because",
            culprit_ranks=(2,),
            revision=revision,
        )

    await api.add(*killed(), verdict(2, "user_code"), verdict(1, "unknown"))
    found = await get(reader, f"jobs/{JOB}/incidents/{INCIDENT}")
    assert (found["verdict"]["cause"], found["verdict"]["culprit_ranks"]) == ("user_code", [2])
    assert [one["cause"] for one in found["revisions"]] == ["unknown"]


INCIDENT_FILTERS: list[tuple[dict[str, Any], str]] = [
    ({}, "dcba"),
    ({"order": "asc"}, "abcd"),
    ({"open": True}, "ca"),
    ({"open": False}, "db"),
    ({"outcome": ["failed", "stopped"]}, "b"),
    ({"trigger": "node_lost"}, "ba"),
    ({"node": "n1"}, "a"),
    ({"node": "n2"}, "b"),
    ({"round": 3}, "c"),
    ({"job": "j2"}, "dc"),
    ({"since": "2026-11-21T08:00:00Z"}, "c"),
    ({"until": "2026-11-21T08:00:00Z"}, "dba"),
]


async def test_incidents_can_be_filtered(api: Api, reader: httpx2.AsyncClient) -> None:
    def opened(name: str, job: str, **values: Any) -> Fact:
        given = {"trigger": "rank_exited", "node": "n9", "round": 1, **values}
        return make("incident_opened", incident=name, job=job, **given)

    await api.add(
        opened("a", "j1", trigger="node_lost", node="n1"),
        opened("b", "j1", trigger="node_lost"),
        make("incident_closed", incident="b", job="j1", outcome="failed", trigger=""),
        make("verdict_reached", incident="b", job="j1", culprit_nodes=["n2"]),
        opened("c", "j2", round=3, at=BEGAN.replace(hour=9)),
        opened("d", "j2"),
        make("incident_closed", incident="d", job="j2", outcome="recovered", trigger=""),
    )
    for query, expected in INCIDENT_FILTERS:
        shown, asked = "", {"limit": 1, **query}
        while asked.get("cursor", "first"):
            page = await get(reader, "incidents", **asked)
            shown += "".join(one["incident"] for one in page["items"])
            asked["cursor"] = page["next"]
        assert shown == expected, query
    mine = await get(reader, "jobs/j1/incidents")
    assert [one["incident"] for one in mine["items"]] == ["b", "a"]


async def test_a_recovery_that_the_same_failure_ended_is_none(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """The job made the first step of three rounds, and each time failed as before."""
    for round_, is_transient in ((1, None), (2, False), (3, None)):
        name = f"i{round_}"
        await api.add(
            make("incident_opened", incident=name, job="j", round=round_, reason="it broke"),
            make("incident_closed", incident=name, job="j", outcome="recovered", trigger="",
                 reason="it broke; it stepped", next_round=round_ + 1),
            make("verdict_reached", incident=name, job="j", fingerprint="same",
                 is_transient=is_transient),
        )  # fmt: skip
    outcomes = {"i3": "recovered", "i2": "recovered", "i1": "repeated"}
    shown = await get(reader, "jobs/j/incidents")
    assert {one["incident"]: one["outcome"] for one in shown["items"]} == outcomes
    for name, outcome in outcomes.items():
        assert (await get(reader, f"jobs/j/incidents/{name}"))["outcome"] == outcome
    repeated = await get(reader, "incidents", outcome=["repeated"])
    assert [one["headline"] for one in repeated["items"]] == [
        "it broke; then round 2 ended in the same way"
    ]


async def test_what_a_round_went_on_after_repeats_no_incident_and_restores_nothing(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """Twice data broke the training in a round that had begun with a restore."""
    await api.add(make("round_formed", job="j", round=2),
                  make("checkpoint_restored", job="j", round=2, step=40))  # fmt: skip
    for name in ("i1", "i2"):
        await api.add(
            make("incident_opened", incident=name, job="j", round=2, trigger="numerics"),
            make("incident_closed", incident=name, job="j", round=2, outcome="recovered",
                 trigger="", restored_step=None, next_round=2),
            make("verdict_reached", incident=name, job="j", fingerprint="same", round=2,
                 is_transient=False),
        )  # fmt: skip
        shown = await get(reader, f"jobs/j/incidents/{name}")
        assert (shown["outcome"], shown["restored_step"]) == ("recovered", None)
    shown = await get(reader, "jobs/j/incidents/i1")
    assert shown["outcome"] == "recovered"


async def test_a_job_says_what_is_left_of_its_budgets(api: Api, reader: httpx2.AsyncClient) -> None:
    """REST has what is left of each budget (A4.6)."""
    await api.add(*whole())
    found = await get(reader, f"jobs/{JOB}")
    assert (found["incidents"], found["restarts"], found["max_restarts_per_hour"]) == (1, 1, 4)
    assert [(one["name"], one["left"]) for one in found["budgets"]] == [
        ("restarts", 9),
        ("restarts_per_hour", 3),
    ]


async def test_decisions_are_listed_with_what_came_of_them(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """Each decision has its mode and its outcome (A4.6)."""
    said = make("action_decided", job="j", action="exclude", mode="observe")
    done = make("action_decided", job="j", action="restart", mode="enforce")
    taken = make("action_taken", job="j", action="restart", decision=done.id, outcome="done")
    await api.add(said, taken, done)
    items = (await get(reader, "jobs/j/actions"))["items"]
    assert [(one["action"], one["outcome"]) for one in items] == [
        ("restart", "done"),
        ("exclude", None),
    ]
    observed = await get(reader, "jobs/j/actions", mode="observe")
    assert [one["action"] for one in observed["items"]] == ["exclude"]
    restarts = await get(reader, "jobs/j/actions", action=["restart", "stop"])
    assert len(restarts["items"]) == 1


async def test_members_say_which_ranks_were_stopped_and_killed(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(*whole())
    members = (await get(reader, f"jobs/{JOB}/rounds/1"))["members"]
    assert [(one["stopped_ranks"], one["killed_ranks"]) for one in members] == [
        ([1], []),
        ([3], [3]),
    ]


# -- logs ----------------------------------------------------------------------------------

LOG = f"jobs/{JOB}/rounds/1/ranks/2/log"


async def test_the_end_of_a_log_is_read_from_the_bus(api: Api, reader: httpx2.AsyncClient) -> None:
    await api.add(*whole(await stored(api)))
    answer = await reader.get(LOG)
    assert (answer.status_code, answer.text) == (200, TAIL)
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["etag"]
    assert (await reader.get(LOG, params={"stream": "stderr"})).text == TAIL
    status, code, detail = await problem(reader, LOG, stream="stdout")
    assert (status, code) == (404, "log_not_kept")
    assert "only its stderr was" in detail


async def test_streams_that_were_kept_apart_are_shown_apart(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    refs = {kind: await stored(api, f"the {kind}") for kind in ("stdout", "stderr")}
    found = [
        EvidenceCollected(
            id=fact_id(), job=JOB, at=BEGAN, source="agent/n", round=1, incident=INCIDENT,
            node="n", rank=2, evidence="log", blob=ref,
            summary=f"{kind}: the last 9 bytes of /logs/{kind}",
        )
        for kind, ref in refs.items()
    ]  # fmt: skip
    await api.add(*begun(), *found)
    for kind in refs:
        assert (await reader.get(LOG, params={"stream": kind})).text == f"the {kind}"
    assert (await reader.get(LOG)).text == "the stderr"


async def test_a_copy_outlives_the_evidence_stream_and_the_bus(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """The log is in REST after the bus and its data are gone (A4.4, A11.2)."""
    await api.add(*whole(await stored(api)))
    assert await copier(api).copy_all() == 1
    api.bus._server.blobs.clear()
    await api.bus._server.set_up(up=False)
    assert (await reader.get(LOG)).text == TAIL


async def test_what_is_gone_is_gone_and_says_why(api: Api, reader: httpx2.AsyncClient) -> None:
    await api.add(*whole(BLOB))
    status, code, detail = await problem(reader, LOG)
    assert (status, code) == (410, "log_gone")
    assert "is gone" in detail
    assert await copier(api).copy_all() == 1
    assert await copier(api).copy_all() == 0  # it is not asked for again
    assert (await problem(reader, LOG))[:2] == (410, "log_gone")


async def test_without_the_bus_and_without_a_copy_it_says_to_try_later(
    api: Api, reader: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(*_: object) -> bytes:
        raise BusUnreachableError("no connection")

    monkeypatch.setattr(MemoryBlobs, "get", unreachable)
    await api.add(*whole(BLOB))
    answer = await reader.get(LOG)
    assert (answer.status_code, answer.json()["code"]) == (503, "bus_unavailable")
    assert answer.headers["retry-after"] == "5"
    with pytest.raises(BusUnreachableError):
        await copier(api).copy_all()
    monkeypatch.undo()
    assert await copier(api).copy_all() == 1


ABSENT = [
    (f"jobs/{JOB}/rounds/9/ranks/2/log", "not_found", "there is no round 9"),
    (f"jobs/{JOB}/rounds/1/ranks/7/log", "not_found", "its ranks are 0 to 3"),
    (f"jobs/{JOB}/rounds/1/ranks/0/log", "log_not_kept", "had written nothing"),
    (f"jobs/{JOB}/rounds/1/ranks/3/log", "log_not_kept", "did not fail by itself"),
    (f"jobs/{JOB}/rounds/2/ranks/1/log", "log_not_kept", "has not ended"),
    (f"jobs/{JOB}/incidents/nothing", "not_found", "there is no incident nothing"),
    ("jobs/nobody/incidents", "not_found", "there is no job nobody"),
    ("jobs/nobody/actions", "not_found", "there is no job nobody"),
]


async def test_what_is_not_there_says_why(api: Api, reader: httpx2.AsyncClient) -> None:
    await api.add(*whole(BLOB))
    for path, code, said in ABSENT:
        status, found, detail = await problem(reader, path)
        assert (status, found) == (404, code), path
        assert said in detail, path
    assert "on node-2" in (await problem(reader, f"jobs/{JOB}/rounds/1/ranks/3/log"))[2]


async def test_only_so_much_is_kept_and_the_oldest_goes_first(api: Api) -> None:
    noise = random.Random(5)
    refs = [await stored(api, noise.randbytes(4000).hex()) for _ in range(4)]
    kept = EvidenceCopies(api.database)
    for n, ref in enumerate(refs):
        await kept.keep(ref, await api.bus.blobs.get(ref), absent=None, now_us=n)
    assert await kept.make_room(10_000, absent="too much") == 2
    assert await kept.make_room(10_000, absent="too much") == 0
    found = [await kept.find(ref.id) for ref in refs]
    assert [one is not None and one.data is not None for one in found] == [False, False, True, True]
    assert found[0] is not None
    assert found[0].absent == "too much"


async def test_every_reference_is_seen_however_few_are_looked_at_at_once(api: Api) -> None:
    refs = [await stored(api, f"log {n}") for n in range(5)]
    large = BlobRef(job=JOB, id="e" * 32, size_bytes=LARGEST + 1, parts=1)
    await api.add(
        *(make("rank_exited", job=JOB, log=None) for _ in range(3)),
        *(make("rank_exited", job=JOB, log=ref) for ref in refs[:3]),
        make("evidence_collected", job=JOB, blob=large),
        *(make("evidence_collected", job=JOB, blob=ref) for ref in refs[2:]),
    )
    kept, seen, n = EvidenceCopies(api.database), set(), 0
    while True:
        wanted = await kept.wanted(n, most=2)
        seen |= {ref.id for ref in wanted.refs}
        if wanted.end_n == n:
            break
        n = wanted.end_n
    assert seen == {ref.id for ref in refs}
    assert n == 10
