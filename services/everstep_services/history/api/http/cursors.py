"""Cursors: where a page ended, signed by this server."""

import base64
import binascii
import hashlib
import hmac
from typing import Any

import msgspec

from everstep.store.queries import Key
from everstep_services.history.api.http.problems import ProblemError

_SIGNATURE = 12


class Cursors:
    """Signs cursors with the secret of the database, so that all replicas accept them."""

    def __init__(self, secret: str) -> None:
        self._secret = bytes.fromhex(secret)

    def make(self, key: Key, question: object) -> str:
        """The cursor after `key`, for the same question: its filters and its order."""
        body = msgspec.json.encode((*key,))
        return base64.urlsafe_b64encode(self._sign(body, question) + body).decode().rstrip("=")

    def read(self, cursor: str, question: object) -> Key:
        """The key in a cursor; a `ProblemError` if it is forged, or of another question."""
        try:
            data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise _bad() from None
        signature, body = data[:_SIGNATURE], data[_SIGNATURE:]
        if not hmac.compare_digest(signature, self._sign(body, question)):
            raise _bad()
        key: tuple[Any, ...] = tuple(msgspec.json.decode(body))
        return key

    def _sign(self, body: bytes, question: object) -> bytes:
        asked = msgspec.json.encode(question)
        signed = len(asked).to_bytes(4, "big") + asked + body
        return hmac.digest(self._secret, signed, hashlib.sha256)[:_SIGNATURE]


def _bad() -> ProblemError:
    return ProblemError(
        400,
        "bad_cursor",
        "the cursor is damaged, or belongs to other filters: begin again without one",
    )
