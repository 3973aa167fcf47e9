"""The documents in `CONTROL`: read, and changed by compare-and-set."""

from collections.abc import Callable

from everstep.bus.errors import ConflictError
from everstep.bus.ports import Bus
from everstep.bus.requests import RefusalError
from everstep.errors import EverstepError
from everstep.messages import ControlDocument
from everstep.messages.codec import BadMessageError, decode_as, encode
from everstep_services.health.nodes.control import blank

_ATTEMPTS = 20


class UnreadableSwitchesError(EverstepError):
    """The stored document cannot be decoded. Health neither follows nor overwrites it."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(
            f"health cannot read the switches of {key} ({why}): a newer release may have written "
            f"them; otherwise look at key {key} of bucket CONTROL, and remove it"
        )


class ControlDocuments:
    """Any replica may change them; a replica that is overtaken reads again."""

    def __init__(self, bus: Bus) -> None:
        self._documents = bus.documents("CONTROL")

    async def read(self, key: str) -> tuple[ControlDocument, int]:
        """The document of a job or the cluster, and its revision; 0 where nobody changed any."""
        stored = await self._documents.get(key)
        if stored.data is None:
            return blank(), 0
        try:
            return decode_as(stored.data, ControlDocument), stored.revision
        except BadMessageError as error:
            raise UnreadableSwitchesError(key, str(error)) from error

    async def put(self, key: str, document: ControlDocument, revision: int) -> int:
        """Write it over this revision; `ConflictError` if there is a newer one."""
        return await self._documents.put(key, encode(document), revision=revision)

    async def change(
        self, key: str, edit: Callable[[ControlDocument], ControlDocument]
    ) -> tuple[ControlDocument, ControlDocument, int]:
        """Apply `edit`; return the document before and after, and the new revision."""
        for _ in range(_ATTEMPTS):
            before, revision = await self.read(key)
            after = edit(before)
            if after == before:
                return before, after, revision
            try:
                return before, after, await self.put(key, after, revision)
            except ConflictError:
                continue
        raise RefusalError("503", f"other replicas keep changing the switches of {key}: ask again")
