"""Makes steps until the file `end` is there, and keeps its state in the memory of its node.

The state of a step is the step, many times. What is found of it at the start is written to
`found-ROUND-RANK`, and training goes on from there.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import msgspec
import xxhash

from tests.e2e.scripts.meeting import Meeting
from tests.e2e.scripts.stepping import Steps
from trainer_sdk.bootstrap import agent_link
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, Identity, ImageIndex, decode, encode

EVERY, TIMES = 20, 10_000
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
number, world = int(os.environ["EVERSTEP_ROUND"]), int(os.environ["WORLD_SIZE"])
images = Path(os.environ["EVERSTEP_IMAGES"])


def state_of(step: int) -> bytes:
    return random.Random(step).randbytes(TIMES)


def offered() -> bool:
    try:
        return bool(json.loads((images / "offer.json").read_bytes())["round"] >= number)
    except FileNotFoundError:
        return False


def found() -> tuple[int, str]:
    """The newest state of this rank on this node, and where it was."""
    newest = 0, ""
    for where in (f"own/rank-{rank}/[ab]", f"held/slot-*/rank-{rank}/[0-9]*"):
        for place in images.glob(where):
            try:
                index = decode((place / INDEX).read_bytes(), ImageIndex, str(place))
                octets = (place / IMAGE).read_bytes()
            except FileNotFoundError:
                continue  # not whole yet, or forgotten meanwhile
            assert octets == state_of(index.identity.step)
            newest = max(newest, (index.identity.step, place.relative_to(images).parts[0]))
    return newest


def remember(step: int) -> None:
    place = images / "own" / f"rank-{rank}" / "ab"[step // EVERY % 2]
    place.mkdir(parents=True, exist_ok=True)
    (place / INDEX).unlink(missing_ok=True)
    octets = state_of(step)
    (place / IMAGE).write_bytes(octets)
    index = ImageIndex(
        identity=Identity(
            job=os.environ["EVERSTEP_JOB"], round=number, step=step, world_size=world, layout=""
        ),
        rank=rank,
        size_bytes=len(octets),
        hash=xxhash.xxh3_128_hexdigest(octets),
        entries=(),
    )
    (place / f".{INDEX}").write_bytes(encode(index))
    (place / f".{INDEX}").rename(place / INDEX)
    body = msgspec.json.encode({"step": step, "size_bytes": len(octets)}).decode()
    assert agent_link.bootstrap_link is not None
    agent_link.bootstrap_link.send("checkpointed", f'"event":"image","body":{body}')


while not offered():
    time.sleep(0.01)
step, tier = found()
(folder / f"found-{number}-{rank}").write_text(json.dumps([step, tier]))
steps, meeting = Steps(step), Meeting()
while meeting.step(go_on=not (folder / "end").exists()):
    time.sleep(0.01)
    steps.made_one()
    if steps.made % EVERY == 0:
        remember(steps.made)
