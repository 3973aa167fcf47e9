"""What a process writes about itself, and what it must never write."""

import io
import json
import logging
from collections.abc import Callable, Generator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.observe.logs import ConsoleFormatter, JsonFormatter, configure
from everstep.observe.redaction import redact
from everstep.observe.settings import LogSettings
from everstep.settings import read_secret, remember_secret

log = logging.getLogger("everstep_services.health.observer")
patient = settings(deadline=None)  # no promise about speed is made here


def as_json(message: object, *args: object, name: str = log.name, **rest: Any) -> dict[str, Any]:
    record = logging.LogRecord(name, logging.INFO, __file__, 1, message, args, None, **rest)
    line = JsonFormatter("history").format(record)
    assert "\n" not in line
    decoded: dict[str, Any] = json.loads(line)
    return decoded


def test_json_recovers_the_keys_and_keeps_the_types() -> None:
    line = as_json("round_formed round=%d nodes=%d waited_s=%.1f ok=%s", 3, 4, 1.25, True)
    assert {key: value for key, value in line.items() if key != "at"} == {
        "level": "info",
        "service": "health",
        "event": "round_formed",
        "round": 3,
        "nodes": 4,
        "waited_s": 1.25,
        "ok": True,
    }
    at = datetime.fromisoformat(line["at"])
    assert at.tzinfo is not None
    assert line["at"].endswith("Z")


@pytest.mark.parametrize(
    ("template", "args", "expected"),
    [
        ("stopped", (), {"event": "stopped"}),
        ("stream_%s name=%s", ("made", "FACTS"), {"event": "stream_made", "name": "FACTS"}),
        ("stream_%s name=%s", ("A b", "F"), {"event": "log", "text": "stream_A b name=F"}),
        ("ended reason=%r", ("silent for 6 s",), {"event": "ended", "reason": "silent for 6 s"}),
        ("sent to=%s bytes=%5d", ("a", 7), {"event": "sent", "to": "a", "bytes": 7}),
        ("sent to=%s", (None,), {"event": "sent", "to": None}),
        ("sent kind=fact to=%s", ("a",), {"event": "sent", "kind": "fact", "to": "a"}),
        ("sent to=%s", ({"a": 1},), {"event": "log", "text": "sent to=a"}),
        ("sent level=%s", ("high",), {"event": "sent", "level_": "high"}),
        ("Waiting for %s to close", ("x",), {"event": "log", "text": "Waiting for x to close"}),
        ("used disk=%d%%", (9,), {"event": "log", "text": "used disk=9%"}),
        ("used disk=%(d)s", ({"d": 9},), {"event": "log", "text": "used disk=9"}),
        ("sent to=%s", ("a", "b"), {"event": "log", "text": "sent to=%s ('a', 'b')"}),
        ("sent to=%s by=%s", ("a",), {"event": "log", "text": "sent to=%s by=%s ('a',)"}),
        ("sent to=%d", ("a",), {"event": "sent", "to": "a"}),
        ("sent to=%s", (b"\xff",), {"event": "sent", "to": "b'\\xff'"}),
        ("sent ratio=%g", (float("nan"),), {"event": "sent", "ratio": None}),
    ],
)
def test_templates(template: str, args: tuple[object, ...], expected: dict[str, object]) -> None:
    if args == ({"a": 1},):
        template, expected = "sent to=%(a)s", {"event": "log", "text": "sent to=1"}
    line = as_json(template, *args)
    assert {k: v for k, v in line.items() if k not in {"at", "level", "service"}} == expected


@patient
@given(st.text(), st.lists(st.none() | st.integers() | st.text() | st.binary() | st.floats()))
def test_any_record_is_one_valid_line(template: str, args: list[object]) -> None:
    assert as_json(template, *args)["service"] == "health"


def test_a_record_of_a_library_belongs_to_the_process() -> None:
    assert as_json("hello", name="uvicorn.error")["service"] == "history"


def test_an_exception_is_one_field() -> None:
    error = KeyError("evs_verysecrettoken")
    record = logging.LogRecord(
        log.name, logging.ERROR, __file__, 1, "died", (), (KeyError, error, None)
    )
    line = json.loads(JsonFormatter("history").format(record))
    assert line["exception"].splitlines()[-1] == "KeyError: 'evs_***'"


def test_a_long_value_is_cut() -> None:
    assert len(as_json("said text=%s", "x" * 100_000)["text_"]) < 10_000


def test_the_console_is_aligned_and_obeys_nobody() -> None:
    record = logging.LogRecord(
        log.name, logging.WARNING, __file__, 1, "said to=%s", ("a\n\x1b[31mred",), None
    )
    plain = ConsoleFormatter("history", color=False).format(record)
    assert plain[12:] == "  warning  health      said                   to=a\\n\\x1b[31mred"
    assert "\x1b[33mwarning\x1b[0m" in ConsoleFormatter("history", color=True).format(record)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logging_restored() -> Generator[None, None, None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("logging_restored")
@pytest.mark.parametrize(
    ("stream", "environ", "form", "is_json", "has_color"),
    [
        (io.StringIO, {}, "auto", True, False),
        (Terminal, {}, "auto", False, True),
        (Terminal, {"NO_COLOR": "1"}, "auto", False, False),
        (Terminal, {"NO_COLOR": ""}, "auto", False, True),
        (Terminal, {}, "json", True, False),
        (io.StringIO, {}, "console", False, False),
    ],
)
def test_the_form_follows_the_stream(
    stream: Callable[[], io.StringIO],
    environ: dict[str, str],
    form: Any,
    is_json: bool,
    has_color: bool,
) -> None:
    written = stream()
    configure(LogSettings(format=form), "health", environ=environ, stream=written)
    log.warning("bus_lost after_s=%d", 3)
    log.debug("unseen")
    (line,) = written.getvalue().splitlines()
    assert line.startswith("{") is is_json
    assert ("\x1b[" in line) is has_color


# -- secrets -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("token evs_Ab12-_Cd34 used", "token evs_*** used"),
        ("nats://me:hunter22@host:4222", "nats://me:***@host:4222"),
        ("postgresql+asyncpg://u:p%40ss@h/db", "postgresql+asyncpg://u:***@h/db"),
        ("Authorization: Bearer abcdefgh123", "Authorization: Bearer ***"),
        ("http://127.0.0.1:7070/a@b", "http://127.0.0.1:7070/a@b"),
        ("write nats://HOST:PORT or tls://HOST:PORT", "write nats://HOST:PORT or tls://HOST:PORT"),
        ("nats://me:PORTcullis", "nats://me:***"),
        ("user@host: nothing", "user@host: nothing"),
    ],
)
def test_secrets_are_known_by_their_form(text: str, safe: str) -> None:
    assert redact(text) == safe


@pytest.mark.parametrize(
    "secret",
    [
        "hf_abcdefghijklmnopqrst", "ghp_0123456789abcdef0123", "sk-proj-abcdefgh12345678",
        "AKIAIOSFODNN7EXAMPLE", "xoxb-1234567890-abcdefg",
        "SUAIBDPBAUTWCWBKIO6XHQNINK5FWJW4OHLXC3HQ2KFE4PEJUA44CNHTC4",
    ],
)  # fmt: skip
def test_tokens_are_known_by_who_issues_them(secret: str) -> None:
    """A13.5: what a rank prints is quoted in verdicts and reports."""
    assert redact(f"KeyError: '{secret}' at step 3") == "KeyError: '***' at step 3"


@pytest.mark.parametrize(
    "text",
    [
        "token=50257", "pad_token='<eos>'", "tokens=123456 rank 3", "KeyError: 'api_key'",
        "token=7", "token=123456", "max_tokens=4096", "num_tokens: 12", "token: 'hello'",
        "unexpected token: hello", "next_token='hello'", "eos_token='</s>'", "token=None",
        "{'token': None}", "mask_token='[MASK]'", "tokenizer=hello", "--token 50257", "token=0x7f",
        "--max-tokens 4096 --tokenizer gpt2", "--secret --verbose", "token: -3.5e-05",
        "--eos-token endoftext", "sk-learn", "token_id=0x7f", "cache key: 17", "SUM of squares",
    ],
)  # fmt: skip
def test_words_of_trainings_are_no_secrets(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "part",
    [
        "x",
        "a:",
        "a.",
        "token=",
        "--a ",
        "--token ",
        "a_token: ",
        "--",
        "secret=a ",
        "a://b:",
        "-----BEGIN SEED-----",
        "sk-",
        "[",
        "1",
    ],
)
def test_a_long_line_is_looked_at_once(part: str) -> None:
    """An agent waits for that: with a pattern of quadratic time this would take hours."""
    assert redact(part * (200_000 // len(part)))


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("WANDB_API_KEY=0123456789abcdef", "WANDB_API_KEY=***"),
        ("aws_secret_access_key = abcd1234", "aws_secret_access_key = ***"),
        ('{"password": "hunter22"}', '{"password": "***"}'),
        ("token: abcdef0123456789xyz.", "token: ***"),
        ("token=hunter2secret rank 3", "token=*** rank 3"),
        ("HF_TOKEN=hunter2secret", "HF_TOKEN=***"),
        ("HF_TOKEN: abcd", "HF_TOKEN: ***"),
        ("access_token='hunter2secret'", "access_token='***'"),
        ("login(accessToken=hunter)", "login(accessToken=***)"),
        ("AWS_SESSION_TOKEN=abcd", "AWS_SESSION_TOKEN=***"),
        ('{"token": "hunter2secret"}', '{"token": "***"}'),
        ("{'hf_token': 'hunter'}", "{'hf_token': '***'}"),
        ("token: hunter2", "token: ***"),
        ("run --api-key a8F3kdl29fKd --lr 0.1", "run --api-key *** --lr 0.1"),
        ("--hf-token 'abcd'", "--hf-token '***'"),
        ("argv: ['t.py', '--token', 'hunter']", "argv: ['t.py', '--token', '***']"),
        ("--password abc123", "--password ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\nx",
         "-----BEGIN RSA PRIVATE KEY----- ***\nx"),
    ],
)  # fmt: skip
def test_values_of_secret_names_are_masked(text: str, safe: str) -> None:
    """A13.5."""
    assert redact(text) == safe


@patient
@given(
    st.text(st.characters(exclude_categories=["C", "Z"]), min_size=4, max_size=40),
    st.text(),
    st.text(),
)
def test_a_secret_is_in_no_log_line(secret: str, before: str, after: str) -> None:
    """Any secret, anywhere in a record, in both forms of logs (A13.5)."""
    secret = f"<{secret}>"
    remember_secret(secret)
    record = logging.LogRecord(
        log.name,
        logging.INFO,
        __file__,
        1,
        "said a=%s b=%r",
        (before + secret + after, secret),
        None,
    )
    for formatter in (JsonFormatter("x"), ConsoleFormatter("x", color=False)):
        assert secret not in formatter.format(record)


def test_whatever_was_read_as_a_secret_is_masked_line_by_line(tmp_path: Path) -> None:
    """Each line of a file of secrets (A13.5)."""
    file = tmp_path / "secret"
    file.write_text("-----BEGIN SEED-----\n  SUAKX7-of-logs  \n-----END SEED-----\n")
    read_secret(file)
    assert redact("seed=SUAKX7-of-logs.") == "seed=***."


def test_of_two_secrets_one_of_which_is_part_of_the_other_nothing_is_left() -> None:
    remember_secret("swordfish")
    remember_secret("swordfish-and-more")
    assert redact("'swordfish-and-more'") == "'***'"


def test_a_short_secret_blanks_no_words() -> None:
    remember_secret("a")
    assert redact("banana") == "banana"
