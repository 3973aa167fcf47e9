"""A server process that speaks Google's XML API, as far as it is documented, with one bucket.

No emulator does: of this API, `gcp-storage-emulator` has no HEAD, DELETE, lists or uploads in
parts, and `fake-gcs-server` no PUT. It is the API of S3 but for conditions, which name an object's
generation, and deletions of nothing: moto keeps the objects, and what is here decides about these.
"""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.contract.s3_server import make_bucket, served

BUCKET = "checkpoints"
_BEFORE_MOTO = """
import itertools

generations, made = {}, itertools.count(1)
known_to_moto = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, "

def refused(start, status):
    start(status, [("Content-Length", "0")])
    return [b""]

def google(environ, start):
    name, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
    environ["HTTP_AUTHORIZATION"] = known_to_moto
    wanted = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
    if wanted is not None and int(wanted) != generations.get(name, 0):
        return refused(start, "412 Precondition Failed")
    if method == "DELETE" and not environ["QUERY_STRING"] and name not in generations:
        return refused(start, "404 Not Found")  # S3 says that it has removed it

    def answer(status, headers, *more):
        query = environ["QUERY_STRING"]
        is_written = method == "PUT" and not query or method == "POST" and "uploadId=" in query
        if status.startswith("2"):
            if is_written:
                generations[name] = next(made)
            if method == "DELETE" and not query:
                generations.pop(name, None)
            if name in generations:
                headers = [*headers, ("x-goog-generation", str(generations[name]))]
        return start(status, headers, *more)

    return moto(environ, answer)

app = google
"""


@contextmanager
def google_server(folder: Path) -> Generator[dict[str, str]]:
    """The environment in which the bucket can be used."""
    with served(folder, _BEFORE_MOTO) as url:
        make_bucket(url, BUCKET)
        account = {
            "gcs_base_url": url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        yield {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account), "GOOGLE_ALLOW_HTTP": "true"}
