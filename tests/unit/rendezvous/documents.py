"""Documents about rounds as large as a fleet."""

import random
from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec.structs import replace

from everstep.messages import JobSpec, RoundDocument, Seat


def round_document(job: str, *, seats: int, name_characters: int) -> RoundDocument:
    """A running round of this number of seats, whose host names share no more than real ones do."""
    noise = random.Random(seats)
    names = [
        f"gpu-{number:05d}-{noise.randbytes(name_characters).hex()}"[:name_characters]
        for number in range(seats)
    ]
    return RoundDocument(
        job=job,
        round=3,
        phase="running",
        spec=JobSpec(
            name=job,
            labels={},
            command=("train.py",),
            config_fingerprint="0" * 32,
            nodes_min=seats,
            nodes_max=seats,
            ranks_per_node=8,
        ),
        allocation="a1",
        phase_since=datetime(2026, 1, 1, tzinfo=UTC),
        seats=tuple(
            Seat(
                node=name,
                slot=number,
                ranks=8,
                address=name,
                infra_rank=number,
                place=f"block-{number // 512}/rack-{number // 16}",
                last_slot=number,
                replica_port=29_400,
                warm=True,
                stage="running",
                instance=noise.randbytes(16).hex(),
                failure_domain=f"rack-{number // 16}",
                master_port=29_500 + number % 100,
            )
            for number, name in enumerate(names)
        ),
        world_size=8 * seats,
    )


def seated(
    job: str, nodes: Sequence[str], *, ranks: int = 1, round_: int = 1, former: Sequence[str] = ()
) -> RoundDocument:
    """A running round in which these nodes have the slots, in order."""
    known = round_document(job, seats=len(nodes), name_characters=8)
    seats = tuple(
        replace(seat, node=node, ranks=ranks) for seat, node in zip(known.seats, nodes, strict=True)
    )
    return replace(
        known, round=round_, seats=seats, slots=len(seats), world_size=ranks * len(seats),
        former=tuple(former),
    )  # fmt: skip
