"""Elects one leader among replicas; only the leader reads the facts and acts on its own."""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from everstep.bus.errors import BusError, LeaseLostError
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus, Held
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.ids import new_id

log = logging.getLogger(__name__)

_LEASE_S = 10
_RENEW_S = _LEASE_S / 3
_RETRY_S = 2.0


class Term:
    """The leadership of one replica; no other replica leads while it is renewed."""

    def __init__(self, bus: Bus, clock: Clock, held: Held) -> None:
        self._bus = bus
        self._clock = clock
        self._held = held
        self._renewed = clock.now()

    async def renew(self) -> None:
        """Call it every second or two; `LeaseLostError` when the term is over."""
        now = self._clock.now()
        if now - self._renewed >= _RENEW_S:
            self._held, self._renewed = await self._bus.leases.renew(self._held), now

    async def end(self) -> None:
        """Let another replica lead at once, if the bus can be reached."""
        if self._bus.connected:
            with suppress(BusError, TimeoutError):
                await self._bus.leases.release(self._held)


async def lead_for_ever(
    bus: Bus, clock: Clock, lease: str, work: Callable[[Term], Awaitable[None]]
) -> None:
    """Take the lease whenever it is free, and work; survive losses of the bus."""
    name = f"{lease}-{new_id()}"
    failures = InputFailures(lease)
    while True:
        wait_s = _RENEW_S
        try:
            await bus.wait_connected()
            held = await bus.leases.acquire(lease, name, _LEASE_S)
            if held is not None:
                await _lead(Term(bus, clock, held), work)
        except LeaseLostError as error:
            log.warning("leader_replaced lease=%s error=%s", lease, error)
        except (EverstepError, TimeoutError) as error:
            log.warning("not_leading lease=%s error=%s", lease, error)
            wait_s = _RETRY_S
        except Exception as error:  # noqa: BLE001  the rest of the service is not affected
            failures.note("the work of the leader", error)
        await clock.sleep(wait_s)


async def _lead(term: Term, work: Callable[[Term], Awaitable[None]]) -> None:
    try:
        await work(term)
    finally:
        await term.end()
