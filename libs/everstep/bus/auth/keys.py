"""NATS keys (nkeys), the tokens (JWT) that they sign, and the files that hold a login.

Claims and file formats are NATS's own: `nsc` reads what is written here, and the reverse.
"""

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from functools import cache
from typing import Any

import msgspec
import nkeys

from everstep.bus.errors import BusConfigError

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_TOKEN = re.compile(r"-----BEGIN NATS USER JWT-----\s*(\S+)\s*-+END")
_SEED = re.compile(r"-----BEGIN USER NKEY SEED-----\s*(\S+)\s*-+END")


class KeyKind(IntEnum):
    """The kind of a key, which is the first letter of its text."""

    OPERATOR = nkeys.PREFIX_BYTE_OPERATOR
    ACCOUNT = nkeys.PREFIX_BYTE_ACCOUNT
    USER = nkeys.PREFIX_BYTE_USER


class Key:
    """A key pair, made from its seed. Only the seed is secret."""

    def __init__(self, seed: str) -> None:
        try:
            self._pair = nkeys.from_seed(seed.strip().encode())
            self.public: str = self._pair.public_key.decode()
        except Exception as error:  # the library raises errors of several unrelated classes
            raise BusConfigError("this is not the seed of a NATS key") from error
        self.seed = seed.strip()

    @classmethod
    def new(cls, kind: KeyKind) -> "Key":
        """A random key."""
        return cls(nkeys.encode_seed(secrets.token_bytes(32), kind).decode())

    def derived(self, kind: KeyKind, purpose: str) -> "Key":
        """Return the key for a purpose: always the same, and this key cannot be derived from it."""
        raw = hmac.new(self.seed.encode(), purpose.encode(), hashlib.sha256).digest()
        return Key(nkeys.encode_seed(raw, kind).decode())

    def sign(self, data: bytes) -> bytes:
        """The signature, 64 bytes."""
        return bytes(self._pair.sign(data))

    def signed(self, subject: str, name: str, claims: dict[str, Any], **more: int) -> str:
        """Return a token about `subject`, signed by this key."""
        body: dict[str, Any] = {"iss": self.public, "sub": subject, "name": name, **more}
        body["nats"] = {**claims, "version": 2}
        digest = hashlib.sha256(msgspec.json.encode(body)).digest()
        body["jti"] = base64.b32encode(digest).decode().rstrip("=")
        text = f"{_encoded(msgspec.json.encode(_HEADER))}.{_encoded(msgspec.json.encode(body))}"
        return f"{text}.{_encoded(self.sign(text.encode()))}"

    def has_signed(self, token: str) -> bool:
        """Whether this key has signed the token, and it is unchanged."""
        text, _, signature = token.rpartition(".")
        try:
            return bool(self._pair.verify(text.encode(), _decoded(signature)))
        except Exception:  # noqa: BLE001  the library raises errors of several unrelated classes
            return False


class Claims(msgspec.Struct, frozen=True):
    """The claims of a token. Reading them proves nothing: see `Key.has_signed`."""

    iss: str
    sub: str
    name: str = ""
    iat: int = 0
    exp: int = 0
    nats: dict[str, Any] = {}

    @property
    def ends_at(self) -> datetime | None:
        """When it ends; None if it never does."""
        return datetime.fromtimestamp(self.exp, UTC) if self.exp else None


def claims_of(token: str) -> Claims | None:
    """Return the claims of a token; None if the text is not a token."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        return msgspec.json.decode(_decoded(parts[1]), type=Claims)
    except ValueError:  # base64 and msgspec alike
        return None


@dataclass(frozen=True, slots=True)
class Credentials:
    """A login: the token shown to the server, and the seed that proves whose token it is."""

    token: str
    seed: str

    @classmethod
    def parsed(cls, text: str) -> "Credentials | None":
        """The login in the text of a `.creds` file; None if there is none."""
        token, seed = _TOKEN.search(text), _SEED.search(text)
        return None if token is None or seed is None else cls(token[1], seed[1])

    @property
    def claims(self) -> Claims | None:
        """Return the claims of the token."""
        return claims_of(self.token)

    def answer(self, nonce: str) -> bytes:
        """The signature of the server's nonce, in base64."""
        return base64.b64encode(_key(self.seed).sign(nonce.encode()))

    def text(self) -> str:
        """The text of a `.creds` file."""
        return (
            f"-----BEGIN NATS USER JWT-----\n{self.token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{self.seed}\n------END USER NKEY SEED------\n"
        )


@cache
def _key(seed: str) -> Key:
    return Key(seed)


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
