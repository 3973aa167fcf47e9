"""`everstep ckpt`: on folders and URLs without any service, and on a job by the catalog."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep_services.cli.__main__ import main
from everstep_services.cli.errors import Exit
from tests.checkpoint_helpers.checkpoint_shelves import flip, leave, save
from tests.integration.catalog.replicas import QUICK, committed
from tests.integration.history.served_story import ServedStory
from tests.unit.history.facts import make
from tests.waiting import until
from trainer_sdk.checkpoint.manifest import MANIFEST, METADATA
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import stored_checkpoints
from trainer_sdk.checkpoint.storage.folder import Folder

Run = Callable[..., tuple[int, str, str]]
JOB = "llama"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path / "state"))

    def command(*arguments: str) -> tuple[int, str, str]:
        code = main(["ckpt", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return command


@pytest.fixture
def root(tmp_path: Path) -> str:
    place = str(tmp_path / "ckpt")
    for step in (100, 200, 300):
        save(place, JOB, step)
    return place


def steps(root: str) -> list[int]:
    return [one.step for one in stored_checkpoints(storage_for(root))]


def lines(out: str) -> list[list[str]]:
    return [line.split("\t") for line in out.splitlines()]


# ---- without any service


def test_a_folder_is_listed_and_one_of_it_shown(run: Run, root: str) -> None:
    code, out, _ = run("ls", root)
    assert code == 0
    assert [row[:6] for row in lines(out)] == [
        [str(step), "global", "2026-11-21 07:00:00", "8.0 KiB", "2", "committed"]
        for step in (300, 200, 100)
    ]
    record = json.loads(run("ls", root, "-o", "json", "-n", "1")[1])
    assert (record["schema"], record["items"][0]["step"]) == ("everstep.checkpoint/v1", 300)
    code, out, _ = run("show", root, "200")
    assert code == 0
    assert "job       llama" in out
    assert "__1_0.distcp  4.0 KiB" in out
    assert len(json.loads(run("show", root, "200", "-o", "json")[1])["files"]) == 3


def test_damage_that_shows_is_shown_with_the_code_and_the_size_of_verify(
    run: Run, root: str
) -> None:
    whole = run("verify", root, "100")[1].split("\t")[2]
    manifest = Path(root, "step-000000300", MANIFEST)
    manifest.write_bytes(manifest.read_bytes()[:-20])
    Path(root, "step-000000200", "__1_0.distcp").write_bytes(b"cut")
    Path(root, "step-000000100", METADATA).unlink()
    for step, flaw in (("100", f"{METADATA} is missing"), ("200", "has 3 bytes"), ("300", "")):
        code, out, _ = run("show", root, step)
        assert (code, flaw in out.splitlines()[0]) == (Exit.ERROR, True)
        assert "committed" not in out
        assert run("show", root, step, "-o", "json")[0] == Exit.ERROR
    assert run("verify", root, "100")[1].split("\t")[1:3] == ["NOT GOOD", whole]


def test_a_file_with_the_name_of_a_step_is_listed(run: Run, root: str) -> None:
    Path(root, "step-000000250").write_text("")
    code, out, _ = run("ls", root)
    assert (code, [row[0] for row in lines(out)]) == (0, ["300", "250", "200", "100"])
    assert "it is a file, not a folder: move it away" in out


def test_every_byte_is_read_back_and_one_bit_found(run: Run, root: str) -> None:
    code, out, _ = run("verify", root)
    assert code == 0
    assert [row[1] for row in lines(out)] == ["good"] * 3
    flip(root, 200)
    code, out, _ = run("verify", root)
    assert code == Exit.ERROR
    assert [row[1] for row in lines(out)] == ["good", "NOT GOOD", "good"]
    assert "__1_0.distcp differs from what was saved" in out
    assert run("verify", root, "300")[0] == 0
    assert run("verify", f"{root}/step-000000200")[0] == Exit.ERROR
    record = json.loads(run("verify", root, "200", "-o", "json")[1])["items"][0]
    assert (record["is_good"], record["step"]) == (False, 200)


def test_what_retention_removes_meanwhile_is_not_called_bad(
    run: Run, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Folder.read

    def read(folder: Folder, name: str, *where: Any) -> bytes:
        if name == "step-000000200/__0_0.distcp":
            folder.remove("step-000000200")
        return real(folder, name, *where)

    monkeypatch.setattr(Folder, "read", read)
    code, out, err = run("verify", root)
    assert (code, [row[:2] for row in lines(out)]) == (0, [["300", "good"], ["100", "good"]])
    assert "step-000000200 was removed while it was read" in err
    save(root, JOB, 200)
    assert run("verify", root, "200")[0] == Exit.NOT_FOUND
    save(root, JOB, 200)
    storage_for(root).remove("step-000000300")
    code, out, err = run("gc", root, "--keep-last", "1")
    assert (code, [row[:2] for row in lines(out)]) == (0, [["100", "stays"]])


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "{root}", "--tier", "memory"],
        ["show", "{root}", "200", "--tier", "peer"],
        ["verify", "{root}", "--reason", "audit"],
        ["gc", "{root}", "--keep-last", "2", "--reason", "audit"],
    ],
)
def test_what_a_folder_cannot_tell_or_keep_is_refused(
    run: Run, root: str, words: list[str]
) -> None:
    code, out, err = run(*(word.format(root=root) for word in words))
    assert (code, out) == (Exit.USAGE, "")
    assert "JOB" in err
    assert run(*(word.format(root=root) for word in words[:-2]))[0] == 0


def test_marks_stand_beside_the_files(run: Run, root: str) -> None:
    assert run("pin", root, "100", "--reason", "paper")[0] == 0
    assert run("quarantine", root, "300", "--reason", "NaN")[0] == 0
    states = {row[0]: row[5] for row in lines(run("ls", root)[1])}
    assert states == {"300": "quarantined", "200": "committed", "100": "committed, pinned"}
    assert run("unpin", root, "100")[0] == 0
    assert run("release", root, "300")[0] == 0
    assert {row[5] for row in lines(run("ls", root)[1])} == {"committed"}


def test_a_mark_stays_as_it_was_first_said(run: Run, root: str) -> None:
    assert "was not there" in run("unpin", root, "100")[1]
    assert "was not there" in run("release", root, "100")[1]
    for action, undo, name in (
        ("pin", "unpin", "pinned.json"),
        ("quarantine", "release", "quarantined.json"),
    ):
        assert "records that now" in run(action, root, "100", "--reason", "paper")[1]
        mark = (Path(root) / "step-000000100" / name).read_bytes()
        code, out, _ = run(action, root, "100")
        already = "records that already: paper; for another reason, "
        assert (code, already + undo in out) == (0, True)
        assert (Path(root) / "step-000000100" / name).read_bytes() == mark
        assert "is gone" in run(undo, root, "100")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["locate", "./ck"],
            "./ck is a folder or URL: see everstep jobs, or everstep ckpt ls ./ck",
        ),
        (["scan", "s3://b/ck"], "or everstep ckpt scan JOB --root s3://b/ck"),
        (["locate", ""], "JOB is empty: give it a name, or leave it out"),
        (["scan", "a.b"], "'a.b' cannot name a job"),
        *(([command, "a.b"], "'a.b' cannot name a job") for command in ("ls", "verify", "gc")),
        *(
            ([command, "", "7"], "WHERE is empty: give it a name")
            for command in ("show", "pin", "quarantine")
        ),
        (["pull", "./ck", "7", ""], "TO is a folder of this machine, and it is empty"),
    ],
)
def test_what_is_no_job_is_said_to_be_none(run: Run, words: list[str], said: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (Exit.USAGE, "")
    assert said in err


def test_a_folder_that_was_named_without_a_slash_is_hinted_at(
    run: Run, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(root).parent)
    code, _, err = run("verify", "ckpt")
    assert (code, "the folder of that name here is ./ckpt" in err) == (Exit.USAGE, True)
    assert run("verify", "./ckpt")[0] == Exit.OK


def test_a_clean_up_only_says_what_would_go_until_it_is_told_to(run: Run, root: str) -> None:
    run("pin", root, "100", "--reason", "paper")
    save(root, JOB, 400)
    flip(root, 400)
    code, out, err = run("gc", root, "--keep-last", "1")
    assert code == 0
    assert {row[0]: row[1] for row in lines(out)} == {
        "400": "stays",
        "300": "stays",
        "200": "goes",
        "100": "stays",
    }
    assert "__1_0.distcp differs from what was saved" in err
    assert "nothing was deleted" in err
    assert steps(root) == [400, 300, 200, 100]
    assert run("gc", root, "--keep-last", "1", "--delete")[0] == 0
    assert steps(root) == [400, 300, 100]
    assert run("gc", root)[0] == Exit.USAGE


def test_a_clean_up_takes_what_dead_saves_have_left_and_no_other(run: Run, root: str) -> None:
    old = leave(root, ".saving/400-r1-0a1b2c3d-7", hours_ago=25)
    new = leave(root, ".saving/400-r2-ffffffff-1", hours_ago=23)
    code, out, err = run("gc", root, "--keep-last", "3")
    assert code == 0
    assert [row[1] for row in lines(out)] == ["stays", "stays", "stays", "goes"]
    assert "its save has failed, and nothing has changed in it for 25 h" in lines(out)[3][3]
    assert "0 of 3 checkpoints and what 1 save left unfinished go, which would" in err
    assert old.exists()
    assert run("gc", root, "--keep-last", "3", "--delete")[0] == 0
    assert (old.exists(), new.exists()) == (False, True)
    assert steps(root) == [300, 200, 100]


def test_a_checkpoint_is_pulled_only_when_it_is_good(run: Run, root: str, tmp_path: Path) -> None:
    to = str(tmp_path / "here")
    code, out, _ = run("pull", root, "200", to)
    assert code == 0
    assert "every byte compared" in out
    assert steps(to) == [200]
    flip(root, 300)
    code, _, err = run("pull", root, "300", to)
    assert code == Exit.ERROR
    assert "differs from what was saved" in err
    assert steps(to) == [200]
    assert f"nothing was pulled into {to}: " in err
    assert not list((Path(to) / ".saving").iterdir())
    code, _, err = run("pull", root, "200", "s3://bucket/llama")
    assert code == Exit.USAGE
    assert "s3://bucket/llama is a URL" in err


def test_what_is_not_there_is_3_and_said_in_one_line(run: Run, root: str, tmp_path: Path) -> None:
    for arguments in (("ls", str(tmp_path / "nothing")), ("show", root, "7"), ("pin", root, "7")):
        code, out, err = run(*arguments)
        assert (code, out) == (Exit.NOT_FOUND, "")
        assert err.count("\n") == 1
    code, _, err = run("ls", "ftp://somewhere/llama")
    assert code == Exit.ERROR
    assert "cannot hold checkpoints" in err


def test_an_object_store_without_its_client_says_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "trainer_sdk.checkpoint.storage.objects", raising=False)
    code, _, err = run("ls", "s3://bucket/llama")
    assert code == Exit.ERROR
    assert err == (
        "everstep: s3://bucket/llama needs the client of object stores: "
        "pip install 'everstep[objectstore]'\n"
    )


# ---- a job, by the catalog


@pytest.fixture
def served(root: str, tmp_path: Path) -> Iterator[ServedStory]:
    flip(root, 300)
    hashes = {one.step: one.manifest_hash for one in stored_checkpoints(storage_for(root))}
    facts = [
        make("job_started", job=JOB, round=None),
        *(committed(JOB, root, step, hashes[step]) for step in (100, 200, 300)),
        make("checkpoint_failed", job=JOB, step=400, tier="global", stage="write",
             reason="the disk is full"),
        make("saves_delayed", job=JOB, node="n1", lag_s=610.0, waiting=2, reason="a slow disk"),
        make("saves_delayed", job=JOB, node="n2", lag_s=0.0, waiting=0, reason="it is over"),
        make("replication_degraded", job=JOB, survivable_losses=0, reason="slot 3"),
    ]  # fmt: skip
    folder = tmp_path / "served"
    folder.mkdir()
    with ServedStory(folder, facts, scope="operate", catalog=QUICK) as story:
        yield story


@pytest.fixture
def asked(run: Run, served: ServedStory) -> Run:
    def command(*arguments: str) -> tuple[int, str, str]:
        return run(*arguments, *served.arguments)

    until(
        lambda: {row[0]: row[5] for row in lines(command("ls", JOB)[1])},
        "all are read back",
        holds=lambda found: found == {"300": "quarantined", "200": "verified", "100": "verified"},
    )
    return command


def test_a_jobs_checkpoints_are_shown_changed_and_cleaned_up(
    asked: Run, root: str, tmp_path: Path
) -> None:
    for command in ("ls", "locate"):
        code, out, err = asked(command, JOB)
        assert asked(command) == (code, out, f"job {JOB}, the newest\n{err}")
    for command in ("scan", "gc"):
        assert "name the job: at work are llama, llama-8b" in asked(command)[2]
    assert asked("ls", JOB)[2].splitlines() == [
        "step 400 (global) was not saved, write: the disk is full",
        "n1 has 2 saves that wait, for 10 min 10 s: a slow disk",
        "what is in memory survives the loss of 0 nodes only: slot 3",
    ]
    code, out, _ = asked("show", JOB, "200")
    assert code == 0
    assert out.startswith("step 200 (global): verified\n")
    code, out, err = asked("locate", JOB)
    assert (code, [row[0] for row in lines(out)]) == (0, ["200", "100"])
    assert f"step 300 (global, {root}) is passed over: quarantined (corrupt)" in err
    assert "places: a training" not in err
    assert asked("locate", JOB, "--step", "7")[0] == Exit.NOT_FOUND
    code, out, _ = asked("pin", JOB, "100", "--reason", "paper")
    assert (code, out) == (0, "llama: step 100 is kept until somebody unpins it\n")
    code, out, err = asked("gc", JOB, "--keep-last", "1")
    assert {row[0]: row[1] for row in lines(out)} == {
        "300": "stays",
        "200": "stays",
        "100": "stays",
    }
    code, out, _ = asked("scan", JOB)
    assert "3 checkpoints of llama, 0 of them new to the index, 0 gone" in out
    code, out, _ = asked("verify", JOB, "300")
    assert (code, "is read back" in out) == (0, True)
    assert asked("verify", JOB)[0] == Exit.USAGE
    code, _, err = asked("release", JOB, "200")
    assert "step 200 is not quarantined; for its states in the memory of nodes, say --tier" in err
    code, _, err = asked("release", JOB, "200", "--tier", "memory")
    assert code != 0
    assert "rendezvous did not order the agents" in err
    assert asked("release", root, "200", "--tier", "memory")[0] == Exit.USAGE
    code, out, _ = asked("pull", JOB, "200", str(tmp_path / "here"))
    assert code == 0
    assert steps(str(tmp_path / "here")) == [200]


def test_a_manifest_that_was_not_committed_is_shown_beside_the_one_that_was(
    asked: Run, root: str
) -> None:
    hashes = {one.step: one.manifest_hash for one in stored_checkpoints(storage_for(root))}
    out = asked("show", JOB, "200")[1]
    assert ["manifest", hashes[200]] in [line.split() for line in out.splitlines()]
    assert "committed" not in out
    there = save(root, JOB, 200, size=64)
    assert f"its xxh3-128 is {there}, and {hashes[200]} was committed" in asked("scan", JOB)[1]
    out = asked("show", JOB, "200")[1]
    assert out.startswith("step 200 (global): committed\n")
    said = [line.split() for line in out.splitlines()]
    assert ["manifest", there] in said
    assert ["committed", hashes[200]] in said
    assert "is not the one that was committed" in out


def test_a_jobs_marks_stay_as_they_were_first_said(asked: Run, root: str) -> None:
    asked("pin", JOB, "100", "--reason", "paper")
    mark = Path(root, "step-000000100", "pinned.json")
    said = mark.read_bytes()
    assert "100 is pinned already, by " in asked("pin", JOB, "100")[1]
    assert mark.read_bytes() == said
    assert asked("unpin", JOB, "200")[:2] == (
        0,
        "llama: step 200 was not pinned, as far as the catalog knows\n",
    )
    assert "paper" in asked("show", JOB, "100")[1]
    code, out, _ = asked("quarantine", JOB, "300")
    assert (code, "300 is quarantined already (corrupt): " in out) == (0, True)
    assert "differs from what was saved" in asked("show", JOB, "300")[1]


def test_what_goes_is_said_with_its_size_and_how_to_have_it_done(asked: Run, root: str) -> None:
    code, _, err = asked("gc", JOB, "--keep-last", "1")
    assert (code, err) == (
        0,
        "1 of 3 checkpoints go, which frees 8.0 KiB; nothing was deleted: say --delete\n",
    )
    assert "--delete" not in asked("gc", JOB, "--keep-last", "1", "--delete")[2]
    until(lambda: steps(root), "100 is gone", holds=lambda found: found == [300, 200])


def test_a_folder_that_somebody_has_removed_is_not_called_good(asked: Run, root: str) -> None:
    storage_for(root).remove("step-000000200")
    assert {row[0]: row[5] for row in lines(asked("ls", JOB)[1])} == {
        "300": "quarantined",
        "200": "missing",
        "100": "verified",
    }
    code, out, err = asked("locate", JOB)
    assert (code, [row[0] for row in lines(out)]) == (0, ["100"])
    assert f"step 200 (global, {root}) is passed over: its files are gone" in err


def test_steps_of_several_places_are_said_to_be_of_several(
    asked: Run, root: str, tmp_path: Path
) -> None:
    other = str(tmp_path / "other")
    save(other, JOB, 150)
    assert "1 of them new" in asked("scan", JOB, "--root", other)[1]
    _, out, err = asked("locate", JOB)
    assert [(row[0], row[6]) for row in lines(out)] == [
        ("200", root),
        ("150", other),
        ("100", root),
    ]
    assert "these are in 2 places: a training restores from the one that it is given" in err
