"""Wrong addresses and tokens: named at once, in one line, and never an answer from elsewhere."""

from pathlib import Path

import pytest

from everstep_services.cli.__main__ import main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("everstep: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("url", ["notaurl", "ftp://x", "http://", "//x", "http:x"])
@pytest.mark.parametrize("command", [("jobs",), ("mcp", "--http", "--port", "0")])
def test_an_address_that_is_none_is_wrong_usage(
    home: Path, capsys: pytest.CaptureFixture[str], url: str, command: tuple[str, ...]
) -> None:
    error = refused(capsys, *command, "--api", url)
    assert f"url must be http://HOST… or https://HOST…, got {url!r}" in error


def test_a_file_without_a_token_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api = ("jobs", "--api", "http://127.0.0.1:1", "--token-file")
    missing = refused(capsys, *api, str(home / "missing"))
    assert f"the secret in {home / 'missing'} cannot be read: No such file" in missing
    for number, text in enumerate(("evs_„copied“", "two lines\nof text", "evs_a evs_b")):
        path = home / f"token-{number}"
        path.write_text(text)
        assert f"{path} holds no token: it must be one line" in refused(capsys, *api, str(path))


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("--allowed-host", "a b", "write NAME or NAME:PORT"),
        ("--allowed-host", "http://a", "write NAME or NAME:PORT"),
        ("--allowed-origin", "foo", "write http://HOST[:PORT]"),
        ("--allowed-origin", "https://a/path", "write http://HOST[:PORT]"),
    ],
)
def test_names_that_no_client_could_send_are_wrong_usage(
    home: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, remedy: str
) -> None:
    pytest.importorskip("mcp")
    error = refused(capsys, "mcp", "--http", "--port", "0", option, value)
    assert f"{option} {value!r}: {remedy}" in error
