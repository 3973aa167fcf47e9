"""What every storage of checkpoints keeps to: a folder, memory, and servers of object stores."""

import base64
import re
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.contract.conftest import SERVED
from trainer_sdk.checkpoint.storage import Storage, StorageError, storage_for
from trainer_sdk.checkpoint.storage.port import MissingError

MIB = 1 << 20


def test_what_was_kept_is_read_whole_or_in_part(storage: Storage) -> None:
    assert storage.put("step-000000001/a", [b"abc", memoryview(bytearray(b"defgh"))]) == 8
    assert storage.read("step-000000001/a") == b"abcdefgh"
    assert storage.read("step-000000001/a", 2, 3) == b"cde"
    assert storage.read("step-000000001/a", 6) == b"gh"
    assert storage.read("step-000000001/a", 8) == b""
    assert storage.size("step-000000001/a") == 8


def test_another_process_reads_the_same(storage: Storage, place: str) -> None:
    storage.put("a", [b"1"])
    assert storage_for(place).read("a") == b"1"


def test_a_second_write_takes_the_place_of_the_first(storage: Storage) -> None:
    storage.put("a", [b"first"])
    storage.put("a", [])
    assert storage.read("a") == b""


def test_more_than_one_part_of_an_upload_arrives_in_order(storage: Storage) -> None:
    pieces = [bytes([number]) * (3 * MIB + number) for number in range(12)]
    assert storage.put("large", (memoryview(piece) for piece in pieces)) == sum(map(len, pieces))
    assert storage.read("large") == b"".join(pieces)


def test_a_write_that_breaks_off_leaves_nothing(storage: Storage) -> None:
    def torn() -> Generator[bytes]:
        yield b"x" * MIB
        raise RuntimeError("the writer stops")

    with pytest.raises(RuntimeError, match="the writer stops"):
        storage.put("step-000000001/a", torn())
    assert storage.size("step-000000001/a") is None
    assert storage.files("step-000000001") == []


def test_one_of_many_who_put_if_absent_wins(storage: Storage) -> None:
    with ThreadPoolExecutor(8) as pool:
        tried = list(pool.map(lambda n: storage.put_if_absent("owner", b"%d" % n), range(16)))
    assert tried.count(True) == 1
    assert storage.read("owner") == b"%d" % tried.index(True)


def test_whoever_has_won_may_ask_again(storage: Storage) -> None:
    assert storage.put_if_absent("owner", b"we")
    assert storage.put_if_absent("owner", b"we")
    assert not storage.put_if_absent("owner", b"others")


@pytest.mark.parametrize("place", ["memory", *SERVED], indirect=True)
def test_one_of_many_who_replace_the_same_wins(storage: Storage) -> None:
    from trainer_sdk.checkpoint.storage.objects import Objects

    assert isinstance(storage, Objects)
    storage.put("it", [b"before"])
    with ThreadPoolExecutor(8) as pool:
        tried = list(pool.map(lambda n: storage.replace("it", b"%d" % n, b"before"), range(16)))
    assert tried.count(True) == 1
    now = storage.read("it")
    assert now == b"%d" % tried.index(True)
    assert storage.replace("it", now, b"before"), "the winner may ask again"
    assert not storage.replace("it", b"later", b"before")
    with pytest.raises(MissingError):
        storage.replace("nothing", b"later", b"before")


def test_folders_and_files_are_listed_in_order(storage: Storage) -> None:
    assert storage.folders() == []
    for name in ("step-000000002/b", "step-000000001/part/c", "step-000000001/a", ".saving/x/y"):
        storage.put(name, [name.encode()])
    storage.put("owner.json", [b"{}"])
    assert storage.folders() == ["step-000000001", "step-000000002"]
    found = storage.files("step-000000001")
    assert [(one.name, one.size_bytes) for one in found] == [
        ("step-000000001/a", 16),
        ("step-000000001/part/c", 21),
    ]
    assert storage.files("step-000000009") == []


def test_a_removed_folder_is_gone_and_may_be_removed_again(storage: Storage) -> None:
    for name in ("manifest.json", "a", "part/b"):
        storage.put(f"step-000000001/{name}", [b"12345"])
    storage.put("step-000000002/manifest.json", [b"1"])
    assert storage.remove("step-000000001") == 15
    assert storage.remove("step-000000001") == 0
    assert storage.folders() == ["step-000000002"]
    assert storage.files("step-000000001") == []


@pytest.mark.parametrize("place", ["memory", *SERVED], indirect=True)
def test_what_somebody_else_removes_meanwhile_stops_no_removal(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("manifest.json", "a", "b", "c"):
        storage.put(f"step-000000001/{name}", [b"12345"])
    found = storage.files("step-000000001")
    storage.delete("step-000000001/a")
    with monkeypatch.context() as patched:
        patched.setattr(type(storage), "files", lambda *_: found)
        storage.remove("step-000000001")
    assert storage.files("step-000000001") == []


@pytest.mark.parametrize("place", SERVED, indirect=True)
def test_a_bucket_that_is_not_there_is_said(storage: Storage, place: str) -> None:
    scheme, _, rest = place.partition("://")
    other = storage_for(f"{scheme}://nobody-has-this/{rest}")
    uses: list[Callable[[], object]] = [
        lambda: other.read("a"),
        lambda: other.put("a", [b"1"]),
        lambda: other.put_if_absent("a", b"1"),
        other.folders,
        other.now,
    ]
    for use in uses:
        with pytest.raises(StorageError, match="there is no bucket of this name") as said:
            use()
        assert not isinstance(said.value, MissingError)


@pytest.mark.parametrize("place", ["az"], indirect=True)
def test_whom_the_store_does_not_know_is_told_so_in_one_line(
    storage: Storage, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = base64.b64encode(b"wrong" * 8).decode()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", wrong)
    stranger = storage_for(place)
    for use in (lambda: stranger.read("a"), stranger.folders, stranger.now):
        with pytest.raises(StorageError, match="AuthorizationFailure.*credentials") as said:
            use()
        assert wrong not in str(said.value)
        assert not re.search(r"\n|<\?xml|Debug", str(said.value))
    with pytest.raises(StorageError, match=r"\.clock/\w+ cannot be written"):
        stranger.now()


def test_what_is_not_there_is_said(storage: Storage) -> None:
    storage.delete("nothing")
    assert storage.size("nothing") is None
    with pytest.raises(MissingError, match="nothing is not there"):
        storage.read("nothing")


def test_what_is_too_short_is_said(storage: Storage) -> None:
    storage.put("a", [b"abc"])
    with pytest.raises(StorageError, match=r"a ends at 3 bytes, and 9 were wanted"):
        storage.read("a", 1, 8)


def test_a_relative_path_is_named_so_that_others_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert storage_for("ckpt/").url == str(tmp_path / "ckpt")


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "a//b", "", "."])
def test_no_name_leads_out_of_the_place(storage: Storage, name: str) -> None:
    """Names with `..`, absolute ones and empty ones (A13.3)."""
    with pytest.raises(StorageError, match="may lead out"):
        storage.read(name)
    with pytest.raises(StorageError, match="may lead out"):
        storage.put(name, [b""])


def test_a_server_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(name, value)
    from trainer_sdk.checkpoint.storage import objects

    monkeypatch.setattr(objects, "RETRIES", {"max_retries": 0})
    with pytest.raises(StorageError, match=r"s3://b/p/a cannot be read.*endpoint"):
        storage_for("s3://b/p").read("a")
