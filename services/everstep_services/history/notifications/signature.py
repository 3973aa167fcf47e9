"""Signs what a webhook gets: HMAC-SHA256 over the time, a dot and the body."""

import hashlib
import hmac

SIGNATURE = "Everstep-Signature"
TIMESTAMP = "Everstep-Timestamp"


def signed_headers(secret: str, body: bytes, timestamp_s: int) -> dict[str, str]:
    """The headers that prove who sent a body, and when."""
    signed = f"{timestamp_s}.".encode() + body
    digest = hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
    return {TIMESTAMP: str(timestamp_s), SIGNATURE: f"sha256={digest}"}
