"""Webhooks around a job that really runs, on PostgreSQL: notices come in, messages go out.

Acceptance: A11.5.
"""

import hashlib
import hmac
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import jsonschema_rs
import pytest

from tests.e2e import failure_logs
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import START_WITHIN_S, NewCluster
from tests.e2e.control_planes import PATIENT, Pieces
from tests.e2e.operators import command, operator
from tests.e2e.postgres import Postgres
from tests.e2e.processes import ROOT
from tests.waiting import until

pytestmark = pytest.mark.chaos  # it takes half a minute of a processor
SENDER = "change-management"
KEY, SECRET = "a key of change management", "the secret of messages"
NOTICE_SCHEMA = jsonschema_rs.validator_for(
    json.loads((ROOT / "docs/reference/notice.schema.json").read_text())
)
(_CHECK,) = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/guides/notifications.md").read_text(), re.DOTALL
)
IS_GENUINE: dict[str, Any] = {}
exec(_CHECK, IS_GENUINE)  # what receivers copy from the guide


class Receiver:
    """An HTTP server of somebody else. It refuses each message once, like a proxy that restarts."""

    def __init__(self) -> None:
        self.messages: list[tuple[dict[str, str], bytes]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}/everstep"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                keys = [known["idempotency-key"] for known, _ in receiver.messages]
                receiver.messages.append((headers, body))
                self.send_response(204 if headers["idempotency-key"] in keys else 503)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def about(self, node: str, event: str = "node_excluded") -> list[tuple[dict[str, str], bytes]]:
        return [
            (headers, body)
            for headers, body in self.messages
            if (said := json.loads(body))["nodes"] == [node] and said["event"] == event
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def pieces(
    tmp_path_factory: pytest.TempPathFactory, postgres: Postgres, receiver: Receiver
) -> Iterator[Pieces]:
    folder = tmp_path_factory.mktemp("pieces")
    keys = folder / "webhooks"
    keys.mkdir()
    (keys / f"{SENDER}.key").write_text(KEY)
    (folder / "notify.secret").write_text(SECRET)
    pieces = Pieces(
        folder,
        **PATIENT,
        EVERSTEP_HISTORY__DATABASE_URL=postgres.url,
        EVERSTEP_API__WEBHOOKS__KEYS_DIR=str(keys),
        EVERSTEP_API__WEBHOOKS__ENFORCE=SENDER,
        EVERSTEP_NOTIFY__SETTLE_S="0.2",
        EVERSTEP_NOTIFY__RETRY_FIRST_S="0.1",
        EVERSTEP_NOTIFY__WEBHOOK__URL=receiver.url,
        EVERSTEP_NOTIFY__WEBHOOK__SECRET_FILE=str(folder / "notify.secret"),
    )
    with failure_logs.shared("pieces", folder):
        try:
            pieces.start(START_WITHIN_S)
            yield pieces
        finally:
            pieces.stop()


@pytest.fixture
def cluster(new_cluster: NewCluster, pieces: Pieces, job: str) -> Cluster:
    return new_cluster(pieces, job)


class Sender:
    """A program outside, with nothing of ours but a token, a key and the guide."""

    def __init__(self, plane: Pieces, folder: Path) -> None:
        self._plane = plane
        environ = operator(plane, folder)
        words = ("token", "create", SENDER, "--scope", "webhook", "--api", plane.api)
        made = command(environ, *words)
        assert made.returncode == 0, made.stderr
        self._token = made.stdout.strip()

    def signed(self, body: dict[str, Any], *, age_s: int = 0) -> tuple[bytes, dict[str, str]]:
        data, at = json.dumps(body).encode(), str(int(time.time()) - age_s)
        mac = hmac.new(KEY.encode(), at.encode() + b"." + data, hashlib.sha256)
        return data, {
            "Authorization": f"Bearer {self._token}",
            "Content-Type": "application/json",
            "Everstep-Timestamp": at,
            "Everstep-Signature": f"sha256={mac.hexdigest()}",
        }

    def post(self, message: tuple[bytes, dict[str, str]]) -> dict[str, Any]:
        data, headers = message
        answer = httpx2.post(
            f"{self._plane.api}/api/v1/webhooks/maintenance",
            content=data, headers=headers, timeout=60, trust_env=False,
        )  # fmt: skip
        assert answer.status_code == 202, answer.text
        taken: dict[str, Any] = answer.json()
        return taken

    def send(self, *, age_s: int = 0, **body: Any) -> dict[str, Any]:
        return self.post(self.signed(body, age_s=age_s))


def later(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


def notice(cluster: Cluster, id_: str) -> dict[str, Any]:
    (found,) = (
        each
        for each in cluster.api.pages("webhooks/notices", {"sender": SENDER}, most=None)
        if each["id"] == id_
    )
    return dict(found)


def drains(cluster: Cluster) -> list[Any]:
    return [act for act in cluster.facts("operator_acted") if act["action"] == "drain_node"]


def with_a_spare(cluster: Cluster) -> tuple[str, str]:
    """A job on two nodes: the node of slot 1, and a spare that stands by."""
    options = ("--nnodes", "2", "--spares", "1", "--nproc-per-node", "1")
    # Names of their own: a node that takes part in several jobs is drained from all of them.
    first, second, spare = (f"{cluster.job}-{number}" for number in (1, 2, 3))
    for node in (first, second):
        cluster.steady(*options, node=node)
    cluster.until_stepping(1)
    cluster.steady(*options, node=spare)
    cluster.until_fact("node_joined", lambda body: body["node"] == spare)
    until(lambda: {*nodes(cluster)} >= {first, second, spare}, "history knows the nodes")
    return cluster.members(1)[1], spare


def test_a_notice_takes_a_node_out_of_its_job_and_a_message_says_so(
    cluster: Cluster, pieces: Pieces, receiver: Receiver, tmp_path: Path
) -> None:
    """Repeated, replayed and reordered messages drain the node once (A11.5)."""
    sender, id_ = Sender(pieces, tmp_path), f"CHG-{uuid4().hex}"
    leaving, spare = with_a_spare(cluster)

    # Tomorrow; then for now. The first message is also the last to arrive.
    about = {"id": id_, "action": "drain", "nodes": [leaving], "reason": "new fans"}
    tomorrow = sender.signed({**about, "starts_at": later(86400)}, age_s=20)
    now = sender.signed({**about, "ends_at": later(3600)})
    (taken,) = sender.post(tomorrow)["notices"]
    assert taken["state"] == "waiting"
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(sender.post, [now, now, now, tomorrow]))
    assert all(answer["notices"][0]["node"] == leaving for answer in answers)
    assert [answer["stale"] for answer in answers[:3]] == [0, 0, 0], "copies are one notice"

    cluster.until_stepping(2)
    assert cluster.members(2) == {**cluster.members(1), 1: spare}
    assert next(agent for agent in cluster.agents if agent.node == leaving).wait() == 0
    until(lambda: notice(cluster, id_), "it is done", holds=lambda it: it["state"] == "done")
    assert sender.post(now)["stale"] == 0, "a replay is the same notice, and it is done"
    assert sender.send(id=id_, action="cancel")["stale"] == 1, "too late"
    assert notice(cluster, id_)["state"] == "done"
    act = cluster.until_fact("operator_acted")
    assert (act["by"], act["origin"]) == (f"{SENDER} (webhook)", "rest")
    assert act["reason"] == f"new fans ({id_})"

    told = check_messages(receiver, leaving)
    assert f"new fans ({id_})" in told["text"]
    check_drained(receiver, leaving, cluster.job)
    assert include(cluster, receiver, leaving)["id"] == told["id"]
    assert len(drains(cluster)) == 1
    cluster.finish()
    cluster.until_done()
    assert cluster.incidents() == []


def include(cluster: Cluster, receiver: Receiver, node: str) -> dict[str, Any]:
    """Let a node in again, by a person; the message that its exclusion is over."""
    environ = operator(cluster.plane, cluster.folder)
    words = ("node", "include", node, "--reason", "done", "--api", cluster.plane.api)
    included = command(environ, *words)
    assert included.returncode == 0, included.stderr
    over = until(
        lambda: [json.loads(body) for _, body in receiver.about(node)],
        "a message that it is over",
        holds=lambda told: told[-1]["state"] == "resolved",
    )
    return dict(over[-1])


def check_drained(receiver: Receiver, node: str, job: str) -> None:
    """A message that the node has left its job: with it, a receiver may service the node."""
    told = until(
        lambda: [json.loads(body) for _, body in receiver.about(node, "node_drained")],
        "a message that the node has left",
        holds=lambda found: bool(found) and found[-1]["state"] == "resolved",
    )[-1]
    NOTICE_SCHEMA.validate(told)
    assert (told["job"], told["subject"], told["outcome"]) == (job, node, "left")


def check_messages(receiver: Receiver, node: str) -> dict[str, Any]:
    """The message that a node is excluded: signed, as its schema says, and repeated unchanged."""
    messages = until(lambda: receiver.about(node), "messages", holds=lambda got: len(got) >= 2)[:2]
    for headers, body in messages:
        assert IS_GENUINE["is_genuine"](SECRET, headers, body)
        assert not IS_GENUINE["is_genuine"](KEY, headers, body)
        NOTICE_SCHEMA.validate(json.loads(body))
    assert len({body for _, body in messages}) == 1, "refused once, and repeated as it was"
    told: dict[str, Any] = json.loads(messages[0][1])
    assert (told["event"], told["state"], told["subject"]) == ("node_excluded", "firing", node)
    return told


def test_a_cancellation_that_arrives_first_keeps_the_node(
    cluster: Cluster, pieces: Pieces, tmp_path: Path
) -> None:
    """Reordered on the way: nothing is drained, and the training never stops."""
    sender, id_ = Sender(pieces, tmp_path), f"CHG-{uuid4().hex}"
    node = f"{cluster.job}-1"
    cluster.steady("--nproc-per-node", "1", node=node)
    cluster.until_stepping(1)
    until(lambda: node in nodes(cluster), "history knows the node")
    drain = sender.signed({"id": id_, "action": "drain", "nodes": [node]})
    assert sender.send(id=id_, action="cancel") == {
        "notices": [],
        "stale": 0,
        "ignored": [f"{id_}: nothing is announced; what arrives later is cancelled"],
    }
    (taken,) = sender.post(drain)["notices"]
    assert (taken["state"], taken["outcome"]) == ("cancelled", f"cancelled by {SENDER}")
    other = f"CHG-{uuid4().hex}"
    sender.send(id=other, action="exclude", nodes=[node], reason="later", ends_at=later(60))
    until(lambda: notice(cluster, other), "its time", holds=lambda it: it["state"] == "done")
    assert notice(cluster, id_)["attempts"] == 0
    cluster.finish()
    cluster.until_done()
    assert [body["round"] for body in cluster.facts("round_formed")] == [1]
    assert drains(cluster) == []


def nodes(cluster: Cluster) -> list[str]:
    return [each["node"] for each in cluster.api.pages("nodes", {}, most=None)]
