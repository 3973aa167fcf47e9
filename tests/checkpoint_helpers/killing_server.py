"""Makes an S3 server kill a client at a counted request, which then fails.

It knows its clients by their access keys, which those that they start have from them, and says how
many parts it has of an object.
"""

import os
import urllib.request

from tests.contract.s3_server import BUCKET
from trainer_sdk.checkpoint.manifest import step_name
from trainer_sdk.checkpoint.writer.protocol import WriteState

KILLS = r'''
import os, re, signal
from collections import Counter

asked, sent = Counter(), Counter()
is_victim = re.compile(r"Credential=kill-(\d+)-at-(\d+)-busy-(\d+)-")

def refused(environ, start):
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    start("503 Slow Down", [("Content-Length", "0")])
    return [b""]

def kill(process):
    """If it is there still: nobody else of this group can have its number so soon."""
    try:
        if os.getpgid(process) == os.getpgrp():
            os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        pass

def killing(environ, start):
    path = environ["PATH_INFO"]
    if path.startswith("/.sent/"):
        start("200 OK", [("Content-Type", "text/plain")])
        return [b"%d" % sent[path.removeprefix("/.sent")]]
    victim = is_victim.search(environ.get("HTTP_AUTHORIZATION", ""))
    if victim:
        process, point, busy = map(int, victim.groups())
        asked[victim.group()] += 1
        if asked[victim.group()] == point:
            kill(process)
            return refused(environ, start)
        if busy and asked[victim.group()] % busy == 0:
            return refused(environ, start)
    answer = list(moto(environ, start))
    if "partNumber=" in environ["QUERY_STRING"]:
        sent[path] += 1
    return answer

app = killing
'''


def be_killed_at(point: int, busy: int) -> None:
    """At this number of requests of this process and its children; each `busy`-th is refused.

    0: none is.
    """
    os.environ["AWS_ACCESS_KEY_ID"] = f"kill-{os.getpid()}-at-{point}-busy-{busy}-"


def sent(order: WriteState) -> int:
    """How many parts of this shard have come."""
    path = f"{step_name(order.identity.step)}/{order.saving}/{order.shard}"
    return int(_read(f"/.sent/{order.root.removeprefix('s3://')}/{path}"))


def unfinished() -> int:
    """How many uploads were begun and nobody has ended."""
    return _read(f"/{BUCKET}?uploads").count(b"<Upload>")


def _read(path: str) -> bytes:
    with urllib.request.urlopen(os.environ["AWS_ENDPOINT_URL"] + path, timeout=30) as answer:
        found: bytes = answer.read()
    return found
