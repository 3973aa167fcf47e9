"""Renews a login: gives its holder the same login with a later end.

The service stores nothing. The token names the holder, its signature proves that this control plane
made it, and the subject of the question, which the server has checked, names the job.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from everstep.bus import BusSettings, connect
from everstep.bus.auth.accounts import LoginRefusedError, Signers
from everstep.bus.auth.roles import LOGINS
from everstep.bus.ports import Bus
from everstep.bus.requests import RefusalError
from everstep.messages import LoginRenewed, Message, RenewLogin
from everstep.runtime import Loop, Parts


class LoginService:
    """One replica; any number of them may run."""

    def __init__(self, bus: Bus, signers: Signers) -> None:
        self._bus = bus
        self._signers = signers
        self._counters = {"renewed_total": 0.0, "refused_total": 0.0}

    @property
    def loops(self) -> tuple[Loop, ...]:
        """What the process runs until it ends."""
        return (self.answer_for_ever,)

    def statistics(self) -> dict[str, float]:
        """The numbers for metrics."""
        return dict(self._counters)

    async def answer_for_ever(self) -> None:
        """Answer until cancelled."""
        async with self._bus.answer(LOGINS, {"renew": self._renew}):
            await asyncio.Event().wait()

    async def _renew(self, question: Message) -> Message:
        if not isinstance(question, RenewLogin):
            raise RefusalError("400", f"renew takes a login, not {type(question).__name__}")
        try:
            token = self._signers.renewed(question.token, question.job)
        except LoginRefusedError as error:
            self._counters["refused_total"] += 1
            raise RefusalError("403", str(error)) from error
        self._counters["renewed_total"] += 1
        return LoginRenewed(token=token)


@asynccontextmanager
async def opened(signers: Signers, bus_settings: BusSettings) -> AsyncIterator[Parts]:
    """A replica, whether or not the bus is there."""
    async with connect(bus_settings.of_service, "logins", wait=False) as bus:
        service = LoginService(bus, signers)
        yield Parts(
            loops=service.loops,
            checks={"bus": bus.prove},
            statistics={"logins": service.statistics, "bus": bus.statistics},
        )
