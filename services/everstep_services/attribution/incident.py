"""The input of an analyzer: the case, and the contents of its evidence."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

from everstep.bus.errors import BlobMissingError, BusError
from everstep.evidence.archive import BadArchiveError, is_archive, unanswered_s, unpack
from everstep.messages import BlobRef, Case, EvidencePiece
from everstep.observe.printable import beginning
from everstep_services.attribution.domain.claims import Claim

Fetch = Callable[[BlobRef], Awaitable[bytes]]
_BYTES_MOST = 256 << 20
"""The most bytes of one kind of evidence; the rest is named as missing."""
_PATIENT_S = 1.0
"""A rank that does not answer for that long is stuck; before, it may only be slow."""


def is_given_up(reason: str) -> bool:
    """Whether evidence is missing because we waited too short: that shows nothing of the rank."""
    waited_s = unanswered_s(reason)
    return waited_s is not None and waited_s < _PATIENT_S


class Incident:
    """One incident while it is analyzed. Each analyzer has its own object."""

    def __init__(self, case: Case, fetch: Fetch) -> None:
        self.case = case
        self._fetch = fetch
        self.missing: list[str] = []
        """Evidence that could not be read, and why; the verdict names it."""
        self.given_up: dict[str, dict[int, str]] = {}
        """By kind, the ranks that we have not waited for long enough, with the reason; `by_rank`
        adds those whose node has not answered yet."""

    def pieces(self, *kinds: str) -> list[EvidencePiece]:
        """The pieces of these kinds that are there."""
        return [it for it in self.case.evidence if it.evidence in kinds and it.blob is not None]

    async def content(self, piece: EvidencePiece) -> bytes | None:
        """The content of a piece; None, with the reason in `missing`, if it cannot be read."""
        if piece.blob is None:
            return None
        try:
            return await self._fetch(piece.blob)
        except (BlobMissingError, BusError, TimeoutError) as error:
            why = str(error) or "the bus did not bring it in time"
            self.missing.append(beginning(f"{piece.evidence} of {piece.node}: {why}", 500))
            return None

    async def contents(self, *kinds: str) -> AsyncIterator[tuple[EvidencePiece, int | None, bytes]]:
        """Each piece with its rank, archives unpacked; one piece is held at a time."""
        size = 0
        for piece in self.pieces(*kinds):
            data = await self.content(piece)
            if data is None:
                continue
            for rank, part in self._parts(piece, data):
                size += len(part)
                if size > _BYTES_MOST:
                    most = _BYTES_MOST >> 20
                    self.missing.append(f"{kinds[0]}: more than {most} MiB; the rest was not read")
                    return
                yield piece, rank, part

    async def by_rank(self, kind: str) -> tuple[Mapping[int, bytes], str | None]:
        """The first content of each rank, and the fact that the first of them comes from."""
        contents: dict[int, bytes] = {}
        fact: str | None = None
        async for piece, rank, data in self.contents(kind):
            if rank is not None and rank not in contents:
                contents[rank] = data
                fact = fact or piece.fact
        self.given_up.setdefault(kind, {}).update(self._awaited(kind))
        return contents, fact

    def _awaited(self, kind: str) -> Iterator[tuple[int, str]]:
        """The ranks of living nodes that have sent neither evidence of this kind nor a reason."""
        answered = {it.node for it in self.case.evidence if it.evidence == kind}
        answered |= {sign.node for sign in self.case.nodes if sign.sign == "lost"}
        for member in self.case.members:
            if member.node not in answered:
                for rank in range(member.first_rank, member.first_rank + member.ranks):
                    yield rank, f"{member.node} has not sent it yet"

    def _parts(self, piece: EvidencePiece, data: bytes) -> Sequence[tuple[int | None, bytes]]:
        if not is_archive(data):
            return [(piece.rank, data)]
        try:
            archive = unpack(data)
        except BadArchiveError as error:
            self.missing.append(beginning(f"{piece.evidence} of {piece.node}: {error}", 500))
            return []
        late = {rank: why for rank, why in archive.missing.items() if is_given_up(why)}
        self.given_up.setdefault(piece.evidence, {}).update(late)
        for rank, why in list(archive.missing.items())[:8]:
            self.missing.append(beginning(f"{piece.evidence} of rank {rank}: {why}", 300))
        return [(member.rank, member.content) for member in archive.members]


Analyzer = Callable[[Incident], Awaitable[Sequence[Claim]]]
"""Returns claims about an incident. If it raises or is slow, only its own claims are lost."""
