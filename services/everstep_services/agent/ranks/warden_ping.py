"""Asks the wardens of other nodes whether they live, while their agents are not heard."""

import asyncio
import logging
import socket
from collections.abc import Collection

from everstep.messages import WardenPlace
from everstep_services.agent.ranks.liveness_port import answer, family_of

log = logging.getLogger(__name__)

_WITHIN_S = 0.5
_AGAIN_S = 0.15
_LONGEST = 64
_MOST = 64


async def who_lives(wardens: Collection[WardenPlace]) -> tuple[str, ...]:
    """The nodes whose wardens answer soon; each is asked a few times, as datagrams may be lost."""
    async with asyncio.TaskGroup() as asking:
        asked = [(warden.node, asking.create_task(_lives(warden))) for warden in [*wardens][:_MOST]]
    return tuple(node for node, task in asked if task.result())


async def _lives(warden: WardenPlace) -> bool:
    loop = asyncio.get_running_loop()
    try:
        with socket.socket(family_of(warden.address), socket.SOCK_DGRAM) as ours:
            ours.settimeout(0)
            async with asyncio.timeout(_WITHIN_S):
                await loop.sock_connect(ours, (warden.address, warden.port))
                while True:
                    await loop.sock_sendall(ours, warden.token.encode())
                    try:
                        async with asyncio.timeout(_AGAIN_S):
                            reply = await loop.sock_recv(ours, _LONGEST)
                    except TimeoutError:
                        continue
                    if reply == answer(warden.token):
                        return True
    except (OSError, TimeoutError, ValueError, OverflowError) as error:
        log.debug("warden_silent node=%s error=%r", warden.node, error)
        return False
