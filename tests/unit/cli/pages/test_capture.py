"""What `everstep capture` waits for, writes and prints."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from everstep.evidence.archive import ArchiveMember, pack
from everstep_services.agent.settings import KINDS
from everstep_services.cli.api.client import Api
from everstep_services.cli.commands.jobs.capture import CaptureRequest, await_pieces, fetch
from everstep_services.cli.errors import CliError, Exit

BLOB = {"job": "j", "id": "b", "size_bytes": 2, "parts": 1}


class FakeApi(Api):
    """Answers from what a test has put down."""

    def __init__(self, blobs: Mapping[str, bytes]) -> None:
        self.told: list[dict[str, Any]] = []
        self._blobs = blobs

    def get(self, path: str, params: object = None) -> Any:
        return {"items": []}

    def content(self, path: str) -> bytes:
        return self._blobs[path.rpartition("/")[2]]

    def pages(self, path: str, params: object, **_: object) -> Iterator[dict[str, Any]]:
        if path.endswith("/ranks"):
            yield from ({"rank": rank, "node": f"n{rank // 2}"} for rank in range(4))
        else:
            yield from self.told

    def tell(self, capture: CaptureRequest, kind: str, node: str, **more: Any) -> None:
        body = {"incident": capture.incident, "evidence": kind, "node": node, "id": kind, **more}
        self.told.append({"n": len(self.told) + 1, "body": body})


def test_all_kinds_of_all_nodes_are_waited_for() -> None:
    api = FakeApi({})
    capture = CaptureRequest.new(api, "j", (), ())
    assert (sorted(capture.nodes), capture.kinds) == (["n0", "n1"], KINDS)

    def another(_: float) -> None:
        kind, node = capture.untold(_keys(api))[0]
        api.tell(capture, kind, node, missing="no")

    told = await_pieces(api, capture, 30, sleep=another)
    assert capture.untold(told) == []
    assert len(told) == 2 * len(KINDS)


def _keys(api: FakeApi) -> dict[tuple[str, str], Any]:
    return {(one["body"]["evidence"], one["body"]["node"]): one for one in api.told}


def test_what_others_have_captured_is_not_ours() -> None:
    api = FakeApi({})
    capture, other = (CaptureRequest.new(api, "j", (0,), ("stacks",)) for _ in range(2))
    api.tell(other, "stacks", "n0", summary="theirs")
    api.tell(capture, "stacks", "n0", summary="ours")
    (body,) = await_pieces(api, capture, 30).values()
    assert body["summary"] == "ours"


@pytest.mark.parametrize(("ranks", "kinds", "said"), [
    ((9,), (), "its ranks are 0 to 3"), ((), ("stakcs",), "is not a kind of evidence: page"),
])  # fmt: skip
def test_what_is_not_there_is_said_before_anybody_is_asked(
    ranks: tuple[int, ...], kinds: tuple[str, ...], said: str
) -> None:
    with pytest.raises(CliError, match=said) as caught:
        CaptureRequest.new(FakeApi({}), "j", ranks, kinds)
    assert caught.value.code is Exit.USAGE


def test_archives_become_files_and_documents_one(tmp_path: Path) -> None:
    api = FakeApi({"stacks": pack([ArchiveMember(1, "json", b"[]")], {0: "gone"}), "page": b"{}"})
    capture = CaptureRequest.new(api, "j", (), ())
    api.tell(capture, "stacks", "n0", blob=BLOB)
    api.tell(capture, "page", "n1", blob=BLOB)
    api.tell(capture, "gpu", "n1", missing="none here")
    told = {key: one["body"] for key, one in _keys(api).items()}
    files = fetch(api, capture, told, tmp_path / "it")
    written = sorted(str(one.relative_to(tmp_path)) for one in tmp_path.glob("it/*/**/*.json"))
    assert written == ["it/page/n1.json", "it/stacks/n0/missing.json", "it/stacks/n0/rank_1.json"]
    assert set(files) == {("stacks", "n0"), ("page", "n1")}
    assert (tmp_path / "it").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("kind", "node"), [("stacks", "../up"), ("../up", "n0")])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, kind: str, node: str) -> None:
    """A13.3: a fact with a name of its own making is not written anywhere."""
    api = FakeApi({kind: b"{}"})
    capture = CaptureRequest.new(api, "j", (), ())
    api.tell(capture, kind, node, blob=BLOB)
    told = {key: one["body"] for key, one in _keys(api).items()}
    (why,) = fetch(api, capture, told, tmp_path / "it").values()
    assert "has no name for a file" in str(why)
    assert list(tmp_path.iterdir()) == []


def test_a_hostile_archive_is_not_fetched_and_the_rest_is(tmp_path: Path) -> None:
    """A13.3."""
    api = FakeApi({"stacks": b"\x1f\x8bnonsense", "page": b"{}"})
    capture = CaptureRequest.new(api, "j", (), ())
    api.tell(capture, "stacks", "n0", blob=BLOB)
    api.tell(capture, "page", "n0", blob=BLOB)
    told = {key: one["body"] for key, one in _keys(api).items()}
    files = fetch(api, capture, told, tmp_path / "it")
    assert "cannot be unpacked" in str(files["stacks", "n0"])
    assert files["page", "n0"] == tmp_path / "it/page/n0.json"
