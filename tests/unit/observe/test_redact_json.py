"""JSON without secrets: masked strings, and everything else as it was."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.observe.redaction import names_a_secret, redact, redact_json
from tests.unit.observe.test_logs import patient

SECRET = "Hunter22-and-more"


@pytest.mark.parametrize(
    ("document", "safe"),
    [
        ({"password": SECRET}, {"password": "***"}),
        ({"DB_PASSWORD": SECRET, "n": 1.50}, {"DB_PASSWORD": "***", "n": 1.50}),
        (["train.py", "--password", SECRET, "x"], ["train.py", "--password", "***", "x"]),
        (["--hf-token", "--verbose"], ["--hf-token", "--verbose"]),
        ({"text": f"nats://a:{SECRET}@h", "b": "c@d"}, {"text": "nats://a:***@h", "b": "c@d"}),
        ({"token": ["one", "two"]}, {"token": ["one", "two"]}),
        ({"job": "sk-abcdefghijklmnopqrstu"}, {"job": "sk-abcdefghijklmnopqrstu"}),
        ({"a": f'he said "password={SECRET}"'}, {"a": 'he said "password=***"'}),
        ({"a": "-----BEGIN PRIVATE KEY-----\nMII"}, {"a": "-----BEGIN PRIVATE KEY----- ***"}),
        ({"pad_token": "<eos>"}, {"pad_token": "<eos>"}),
        ({"api_key": "", "b": SECRET}, {"api_key": "", "b": SECRET}),
    ],
)  # fmt: skip
def test_strings_are_masked_in_their_places(document: Any, safe: Any) -> None:
    """A13.5."""
    assert json.loads(redact_json(json.dumps(document))) == safe


def test_an_escaped_secret_is_a_secret() -> None:
    """A13.5: strangers may write any character as an escape."""
    escaped = "".join(f"\\u{ord(c):04x}" for c in f"password={SECRET}")
    assert json.loads(redact_json(f'{{"text": "{escaped}"}}')) == {"text": "password=***"}


@pytest.mark.parametrize(
    "text",
    [
        f"https://h/x?a=b&sig={SECRET}", f"https://h/?access_token={SECRET}",
        f"s3://b/k?X-Amz-Signature={SECRET}&x=1", "https://0123456789abcdef0123456789@h/x",
        f"DJANGO_SECRET_KEY={SECRET}", "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSM",
        f"cut off: nats://me:{SECRET}", f"cut off: nats://me:{SECRET}…",
    ],
)  # fmt: skip
def test_secrets_in_addresses_are_masked(text: str) -> None:
    """A13.5."""
    safe = redact(text)
    for secret in (SECRET, "0123456789abcdef", "eyJhbGci"):
        assert secret not in safe


@pytest.mark.parametrize("part", ["eyJ", "?sig=", "a://0", "eyJaaaaaaaa.", '"', "\\", '"a":'])
def test_a_long_text_is_looked_at_once(part: str) -> None:
    assert redact_json(part * (100_000 // len(part)))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@patient
@given(_json)
def test_what_is_masked_is_json_of_the_same_shape_and_stays_as_it_is(document: Any) -> None:
    text = json.dumps(document)
    safe = redact_json(text)
    assert shape(json.loads(safe)) == shape(document)
    assert redact_json(safe) == safe


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return [shape(one) for one in value.values()]
    if isinstance(value, list):
        return [shape(one) for one in value]
    return type(value)


def test_names_of_training_options_are_no_secrets() -> None:
    assert not any(map(names_a_secret, ("token_id", "eos_token", "max_tokens", "keys", "author")))
    assert all(map(names_a_secret, ("HF_TOKEN", "--api-key", "db.password", "credentials")))


@pytest.mark.parametrize("text", ["nats://host:4222", "http://[::1]:7070", "see http://h:80, then"])
def test_ports_are_no_passwords(text: str) -> None:
    assert redact(text) == text
