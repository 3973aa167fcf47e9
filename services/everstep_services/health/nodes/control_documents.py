"""The documents in `CONTROL`, read and changed by compare-and-set."""

from collections.abc import Callable

from everstep.bus.asking import RefusalError
from everstep.bus.errors import ConflictError
from everstep.bus.ports import Bus
from everstep.errors import EverstepError
from everstep.messages import ControlDocument
from everstep.messages.codec import BadMessageError, decode_as, encode
from everstep_services.health.nodes.control import blank

_ATTEMPTS = 20


class UnreadableSwitchesError(EverstepError):
    """What is stored is no document of ours. It is neither followed nor written over."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(
            f"the switches of {key} cannot be read ({why}): a newer release may have written them; "
            f"else look at key {key} of bucket CONTROL, and remove it"
        )


class Switches:
    """Any replica may change them: whoever comes second looks again."""

    def __init__(self, bus: Bus) -> None:
        self._documents = bus.documents("CONTROL")

    async def read(self, key: str) -> tuple[ControlDocument, int]:
        """As they stand, and their revision; 0 where nothing was ever changed."""
        found = await self._documents.get(key)
        if found.data is None:
            return blank(), 0
        try:
            return decode_as(found.data, ControlDocument), found.revision
        except BadMessageError as error:
            raise UnreadableSwitchesError(key, str(error)) from error

    async def put(self, key: str, document: ControlDocument, revision: int) -> int:
        """Write them, if nobody else did since that revision; `ConflictError` if so."""
        return await self._documents.put(key, encode(document), revision=revision)

    async def change(
        self, key: str, deed: Callable[[ControlDocument], ControlDocument]
    ) -> tuple[ControlDocument, ControlDocument, int]:
        """Before, after, and the revision from now on."""
        for _ in range(_ATTEMPTS):
            before, revision = await self.read(key)
            after = deed(before)
            if after == before:
                return before, after, revision
            try:
                return before, after, await self.put(key, after, revision)
            except ConflictError:
                continue
        raise RefusalError("503", f"others change the switches of {key} all the time: ask again")
