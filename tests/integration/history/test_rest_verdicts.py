"""REST answers who caused an incident: verdicts, corrections, evidence, what is alike."""

import hashlib
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest

from everstep.bus.blobs import MAX_BLOB_BYTES
from everstep.evidence.archive import ArchiveMember, pack
from everstep.messages import BlobRef, CorrectVerdict, Done, Fact, Member, Message, ReadEvidence
from everstep_services.attribution.answers import EvidenceReader
from tests.integration.conftest import Api
from tests.unit.attribution.evidence import ALL_REDUCE, STEP, recorders, stack
from tests.unit.history.facts import make
from tests.unit.history.story import BLOB, INCIDENT, JOB, killed, whole

PATH = f"incidents/{INCIDENT}"


async def get(client: httpx2.AsyncClient, path: str, **query: Any) -> Any:
    answer = await client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def verdict(revision: int = 0, **values: Any) -> Fact:
    given = {"job": JOB, "incident": INCIDENT, "is_corrected": False, "is_inconclusive": False}
    return make("verdict_reached", revision=revision, **{**given, **values})


async def test_an_incident_is_found_by_its_id_alone(api: Api, reader: httpx2.AsyncClient) -> None:
    """One GET has verdict, evidence and what was done (A11.1)."""
    await api.add(*whole(), verdict(cause="user_code", kind="python_exception"))
    found = await get(reader, PATH)
    assert found == await get(reader, f"jobs/{JOB}/{PATH}")
    said = found["verdict"]
    assert (said["cause"], said["cause_kind"], said["is_inconclusive"]) == (
        "user_code",
        "python_exception",
        False,
    )
    assert said["evidence"][0]["says"]
    assert said["missing"]
    kinds = {kind["kind"]: kind for kind in found["evidence_coverage"]}
    assert sum(kind["pieces"] + kind["missing"] for kind in kinds.values()) == len(
        found["evidence"]
    )
    causes = [said["cause"], *(other["cause"] for other in said["alternatives"])]
    assert kinds["kernel_log"]["reasons"] == ["no agent has sent any"]
    assert kinds["stacks"]["decides"] in ([], list(dict.fromkeys(causes)))
    assert said["alternatives"][0]["reason"]
    listed = (await get(reader, "incidents"))["items"]
    assert [one["cause"] for one in listed] == ["user_code"]


async def test_the_words_of_a_model_stand_beside_the_verdict(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """They come with a revision of their own; a verdict without them has none (A11.1)."""
    words = "One batch has no labels."
    await api.add(*whole(), verdict(0, explanation=""), verdict(1, explanation=words))
    found = await get(reader, PATH)
    assert found["verdict"]["explanation"] == words
    assert [one["explanation"] for one in found["revisions"]] == [None]


async def test_an_id_that_two_jobs_have_needs_the_job(api: Api, reader: httpx2.AsyncClient) -> None:
    await api.add(*whole(), make("incident_opened", job="other", incident=INCIDENT))
    answer = await reader.get(PATH)
    assert (answer.status_code, answer.json()["code"]) == (409, "several_jobs")
    assert f"/jobs/{JOB}/incidents/{INCIDENT}" in answer.json()["detail"]
    missing = await reader.get("incidents/nothing")
    assert (missing.status_code, missing.json()["detail"]) == (404, "there is no incident nothing")


async def test_evidence_under_the_id_of_anothers_incident_changes_nothing_for_it(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """A13.1: any job's agents can send it, and rendezvous alone opens incidents."""
    await api.add(make("evidence_collected", job="theirs", incident=INCIDENT), *whole())
    assert (await get(reader, PATH))["job"] == JOB


async def test_a_correction_holds_over_later_verdicts(api: Api, reader: httpx2.AsyncClient) -> None:
    """What people say is kept, and is shown first (A11.1)."""
    about = {"job": JOB, "incident": INCIDENT}
    await api.add(
        *killed(),
        verdict(0, cause="network"),
        make("verdict_corrected", **about, cause="host", by="ann (ops)", was_cause="network"),
        verdict(1, cause="host", is_corrected=True),
        verdict(2, cause="network"),
    )
    found = await get(reader, PATH)
    assert (found["verdict"]["cause"], found["verdict"]["is_corrected"]) == ("host", True)
    assert [one["revision"] for one in found["revisions"]] == [2, 0]
    (said,) = found["corrections"]
    assert (said["cause"], said["was_cause"], said["corrected_by"]) == (
        "host",
        "network",
        "ann (ops)",
    )


async def test_a_person_corrects_by_rest(api: Api) -> None:
    """The question goes to attribution, with the person as authenticated (A11.1)."""
    asked: list[CorrectVerdict] = []

    async def answer(question: Message) -> Done:
        assert isinstance(question, CorrectVerdict)
        asked.append(question)
        return Done(text="taken down")

    await api.add(*whole())
    body = {"cause": "host", "culprit_nodes": ["node-2"], "reason": "its fan had stopped"}
    async with (
        api.bus.answer("attribution", {"correct": answer}),
        api.client(await api.token("operate")) as client,
    ):
        done = await client.post(f"{PATH}/correction", json=body)
        bad = await client.post(f"{PATH}/correction", json={**body, "cause": "gremlins"})
    assert (done.status_code, done.json()["text"]) == (202, "taken down")
    (question,) = asked
    assert (question.job, question.incident, question.cause) == (JOB, INCIDENT, "host")
    assert (question.culprit_nodes, question.reason) == (("node-2",), "its fan had stopped")
    assert (question.by, question.origin) == (done.json()["by"], "rest")
    assert bad.status_code == 422
    async with api.client(await api.token("read")) as client:
        assert (await client.post(f"{PATH}/correction", json=body)).status_code == 403


async def test_what_is_alike_is_named_with_what_they_share(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """Earlier incidents with the same failure, of any job, come first (A11.1)."""

    def other(name: str, job: str = "j2", **said: Any) -> list[Fact]:
        opened = make("incident_opened", job=job, incident=name, node=said.pop("node", "n9"))
        return [opened, verdict(job=job, incident=name, **said)]

    await api.add(
        *whole(),
        verdict(cause="host", fingerprint="f1", culprit_nodes=("node-2",)),
        *other("same", fingerprint="f1", culprit_nodes=()),
        *other("blamed", fingerprint="f2", culprit_nodes=("node-2",)),
        *other("reported", fingerprint="f3", node="node-2", culprit_nodes=()),
        *other("unlike", fingerprint="f4", node="node-22", culprit_nodes=("node-22",)),
    )
    found = await get(reader, PATH)
    assert [(one["incident"], one["same"]) for one in found["similar"]] == [
        ("same", "fingerprint"),
        ("reported", "node"),
        ("blamed", "node"),
    ]


async def test_on_the_only_node_of_a_job_the_same_node_says_nothing(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """A11.1: unless the verdict names the node, other incidents on it are not worth a line."""
    members = (Member(slot=0, node="n9", first_rank=0, ranks=4),)
    await api.add(
        *(make("round_formed", job=job, round=1, members=members) for job in ("j1", "j2")),
        *(
            make("incident_opened", job=job, incident=name, node="n9", rank=1)
            for job, name in (("j1", "first"), ("j1", "second"), ("j2", "third"))
        ),
        verdict(job="j1", incident="second", fingerprint="", culprit_nodes=()),
    )
    assert (await get(reader, "incidents/second"))["similar"] == []
    await api.add(verdict(1, job="j1", incident="second", fingerprint="", culprit_nodes=("n9",)))
    found = await get(reader, "incidents/second")
    assert [one["incident"] for one in found["similar"]] == ["third", "first"]


async def test_where_the_verdict_names_another_rank_the_headline_follows_it(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """A11.1: a victim raised first; the first sentence names the culprit all the same."""
    about = {"reason": "rank 1 alone has not ended", "culprit_ranks": (1,), "culprit_nodes": ()}
    ended = make(
        "job_ended", job=JOB, state="stopped", reason="no restart is left", incident=INCIDENT
    )
    members = (Member(slot=0, node="n9", first_rank=0, ranks=2),)
    await api.add(*whole(), ended, make("round_formed", job=JOB, round=1, members=members))
    before = await get(reader, PATH)
    assert (before["headline"], before["first_report"]) == (before["story"], None)
    await api.add(verdict(0, cause="unknown", kind="lost_by_all", **about))
    found = await get(reader, PATH)
    assert found["headline"] == "rank 1 alone has not ended"
    assert found["first_report"] == found["reason"]
    assert (found["rank"], found["culprit_ranks"], found["primary"]) == (2, [1], None)
    listed = (await get(reader, "incidents"))["items"]
    assert found["culprit_rank_nodes"] == listed[0]["culprit_rank_nodes"] == ["n9"]
    assert found["headline"] in {
        one["headline"] for one in (await get(reader, "incidents"))["items"]
    }
    one = await get(reader, f"jobs/{JOB}/rounds/1")
    wanted = f"rank 1 alone has not ended; first reported: {one['end_reason']}"
    assert one["end_headline"] == wanted
    rounds = (await get(reader, f"jobs/{JOB}/rounds"))["items"]
    assert [row["end_headline"] for row in rounds if row["round"] == 1] == [wanted]
    assert [row["end_headline"] for row in found["rounds"] if row["round"] == 1] == [wanted]
    job = await get(reader, f"jobs/{JOB}")
    assert job["end_headline"] == "rank 1 alone has not ended; first reported: no restart is left"
    await api.add(verdict(1, **{**about, "culprit_ranks": (0,), "reason": "its memory is bad"}))
    found = await get(reader, PATH)
    assert (found["headline"], found["primary"]["rank"]) == ("rank 0: its memory is bad", 0)


# -- evidence ------------------------------------------------------------------------------

ARCHIVE = pack([ArchiveMember(2, "json", b"{}")], {3: "it had exited"})
CONTENTS = [
    (ARCHIVE, "application/gzip", ".tar.gz"),
    (b'{"entries": []}', "application/json", ".json"),
    ("Zeile eins\n„naïve“ <script>\n".encode(), "text/plain; charset=utf-8", ".txt"),
    (b"42", "text/plain; charset=utf-8", ".txt"),
    (b"\x80\x02}q\x00.", "application/octet-stream", ".bin"),
    (bytes(range(256)) * 65536, "application/octet-stream", ".bin"),
]


async def piece(api: Api, ref: BlobRef | None, **values: Any) -> str:
    about = {"job": JOB, "incident": INCIDENT, "evidence": "flight_recorder", "node": "node-2"}
    fact = make("evidence_collected", **{**about, "rank": None, "blob": ref, **values})
    await api.add(*whole(), fact)
    return f"{PATH}/evidence/{fact.id}"


@pytest.mark.parametrize(("content", "kind", "suffix"), CONTENTS)
async def test_evidence_is_downloaded_as_it_was_collected(
    api: Api, reader: httpx2.AsyncClient, content: bytes, kind: str, suffix: str
) -> None:
    """Whatever size and kind: whole, with its hash, as a file to be kept (A11.1, A13.3)."""
    path = await piece(api, await api.bus.blobs.put(JOB, content))
    answer = await reader.get(path)
    assert answer.status_code == 200
    assert answer.content == content
    headers = answer.headers
    assert headers["content-type"] == kind
    name = f"{INCIDENT}-flight_recorder-node-2{suffix}"
    assert headers["content-disposition"] == f'attachment; filename="{name}"'
    digest = b64encode(hashlib.sha256(content).digest()).decode()
    assert headers["repr-digest"] == f"sha-256=:{digest}:"
    assert headers["x-content-type-options"] == "nosniff"
    head = await reader.head(path)
    assert (head.content, head.headers["content-length"]) == (b"", str(len(content)))


async def test_evidence_that_is_not_there_says_why(api: Api, reader: httpx2.AsyncClient) -> None:
    """A piece that was not collected, and one that is gone (A4.4)."""
    none = await piece(api, None, missing="timed out after 5 s")
    gone = await piece(api, BLOB)
    large = await piece(api, BlobRef(job=JOB, id="e" * 32, size_bytes=MAX_BLOB_BYTES + 1, parts=1))
    told = {}
    for path in (none, gone, large, f"{PATH}/evidence/nothing"):
        answer = await reader.get(path)
        told[path] = (answer.status_code, answer.json()["code"])
    assert list(told.values()) == [
        (404, "not_collected"),
        (410, "evidence_gone"),
        (410, "evidence_gone"),
        (404, "not_found"),
    ]
    assert "timed out after 5 s" in (await reader.get(none)).json()["detail"]


async def test_evidence_says_how_long_it_stays(api: Api, reader: httpx2.AsyncClient) -> None:
    """As long as the bus keeps it; a copy of history outlasts that (A4.4, A11.1)."""
    refs = [await api.bus.blobs.put(JOB, content) for content in (b"only there", b"copied")]
    for kind, ref in zip(("stacks", "gpu"), refs, strict=True):
        await piece(api, ref, evidence=kind)
    await piece(api, None, evidence="cgroup", missing="it had exited")
    await api.context.kept.keep(refs[1], b"copied", absent=None, now_us=1)
    found = {one["kind"]: one for one in (await get(reader, PATH))["evidence"]}
    at = datetime.fromisoformat(found["stacks"]["at"])
    assert datetime.fromisoformat(found["stacks"]["expires_at"]) == at + timedelta(days=30)
    copied = {kind: (one["is_copied"], one["expires_at"] is None) for kind, one in found.items()}
    assert copied["stacks"] == (False, False)
    assert copied["gpu"] == (True, True)
    assert copied["cgroup"] == (False, True)


async def test_evidence_that_the_bus_has_forgotten_says_so(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """What happened to it after its time, without a download that fails (A4.4, A11.1)."""
    old = datetime.now(UTC) - timedelta(days=31)
    large = BlobRef(job=JOB, id="e" * 32, size_bytes=129 << 10, parts=1)
    await piece(api, large, at=old)
    shown = (await get(reader, PATH))["evidence"]
    (found,) = (one for one in shown if one["blob"] and one["blob"]["id"] == large.id)
    day = f"{old + timedelta(days=30):%Y-%m-%d %H:%M}"
    assert found["gone_reason"] == (
        f"the bus kept it until {day} UTC, and history copies at most 128 KiB"
    )


async def test_evidence_of_another_incident_is_not_given(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    path = await piece(api, await api.bus.blobs.put(JOB, b"mine"))
    await api.add(make("incident_opened", job=JOB, incident="another"))
    assert (await reader.get(path)).content == b"mine"
    assert (await reader.get(path.replace(INCIDENT, "another"))).status_code == 404
    async with api.client(None) as stranger:
        assert (await stranger.get(path)).status_code == 401


# -- what it says --------------------------------------------------------------------------


@asynccontextmanager
async def reading(api: Api) -> AsyncIterator[None]:
    """Attribution, as far as it reads evidence."""
    reader = EvidenceReader(api.bus)

    async def collectives(question: Message) -> Message:
        assert isinstance(question, ReadEvidence)
        return await reader.collectives(question)

    async def stacks(question: Message) -> Message:
        assert isinstance(question, ReadEvidence)
        return await reader.stacks(question)

    async with api.bus.answer("attribution", {"collectives": collectives, "stacks": stacks}):
        yield


async def test_how_far_each_rank_was_is_read_from_the_recorders(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """The matrix of group, sequence and rank, by one GET (A11.1)."""
    await piece(api, await api.bus.blobs.put(JOB, recorders(2, 3)))
    async with reading(api):
        found = await get(reader, f"{PATH}/collectives")
    assert (found["job"], found["incident"], found["verdict"]) == (JOB, INCIDENT, "culprits")
    assert (found["ranks"], found["dumps"], found["is_cut"]) == (4, 4, False)
    assert [one["rank"] for one in found["faults"][0]["suspects"]] == [2]
    (waits,) = found["collectives"]
    assert (waits["operation"], waits["never_joined"]) == ("all_reduce of 4 Float", [2])
    assert sorted(waits["started"] + waits["scheduled"]) == [0, 1, 3]


async def test_where_ranks_stood_is_folded(api: Api, reader: httpx2.AsyncClient) -> None:
    """Equal stacks are one, and the rank that stands elsewhere is named (A11.1)."""
    stood = {rank: stack(*ALL_REDUCE) for rank in (0, 1, 3)} | {2: stack(STEP)}
    members = [ArchiveMember(rank, "json", content) for rank, content in stood.items()]
    blob = await api.bus.blobs.put(JOB, pack(members, {4: "it had exited"}))
    await piece(api, blob, evidence="stacks")
    async with reading(api):
        found = await get(reader, f"{PATH}/stacks")
    assert (found["verdict"], found["ranks"], found["missing"]) == ("odd_ranks", 4, [4])
    assert [one["rank"] for one in found["suspects"]] == [2]
    assert [one["ranks"] for one in found["stacks"]] == [[0, 1, 3], [2]]
    assert "all_reduce" in found["stacks"][0]["frames"][0]


async def test_pieces_that_only_history_has_are_read_too(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """The bus has forgotten them, or is another one: the answer is the same (A11.1)."""
    of_ranks, gone = recorders(2, 3), BlobRef(job=JOB, id="d" * 32, size_bytes=1, parts=1)
    await piece(api, gone)
    async with reading(api):
        answer = await reader.get(f"{PATH}/collectives")
        assert (answer.status_code, answer.json()["code"]) == (409, "not_readable")
        await api.context.kept.keep(gone, of_ranks, absent=None, now_us=1)
        found = await get(reader, f"{PATH}/collectives")
        assert [one["rank"] for one in found["faults"][0]["suspects"]] == [2]
        assert (await get(reader, f"{PATH}/collectives"))["summary"] == found["summary"]


async def test_what_cannot_be_read_says_why(api: Api, reader: httpx2.AsyncClient) -> None:
    """Not collected, gone, damaged, or attribution away: each by a line of its own (A11.1)."""

    async def told(what: str) -> tuple[int, str, str]:
        answer = await reader.get(f"{PATH}/{what}")
        return answer.status_code, answer.json()["code"], answer.json()["detail"]

    await api.add(*whole())
    status, code, detail = await told("collectives")
    assert (status, code) == (404, "not_collected")
    assert "node-2: the rank had exited" in detail
    assert "no node has reported any" in (await told("stacks"))[2]
    await piece(api, BLOB, evidence="stacks")
    assert (await told("stacks"))[:2] == (503, "attribution_unavailable")
    async with reading(api):
        assert (await told("stacks"))[:2] == (409, "not_readable")
        assert "is gone" in (await told("stacks"))[2]
    assert (await reader.get("incidents/nothing/stacks")).status_code == 404
