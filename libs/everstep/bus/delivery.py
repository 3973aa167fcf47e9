"""Messages whose sender learns whether anybody heard them.

The sender marks its message and gives it a reply subject of the job that it is for; whoever
takes it into an inbox answers at once. Without the mark nothing is answered: a fact on its way
to the stream has a reply subject, too, and an answer of ours there would pass for the stream's.
"""

import logging

from nats import errors as nats_errors
from nats.aio.msg import Msg

from everstep.bus.connection import Connection
from everstep.bus.errors import BusUnreachableError
from everstep.bus.jetstream import JetStream
from everstep.messages import Message
from everstep.messages.codec import encode

log = logging.getLogger(__name__)

_MARK = "Everstep-Acknowledge"
_HEARD = b"+"


async def deliver(jetstream: JetStream, subject: str, message: Message, *, within_s: float) -> bool:
    """See `everstep.bus.ports.Bus.deliver`."""
    connection = jetstream.connection
    is_settled = connection.back_for_s > _others_back_s(connection)
    reply = await jetstream.acknowledged(
        subject, encode(message), headers={_MARK: "1"}, within_s=within_s
    )
    if (reply.headers or {}).get("Status") != "503":
        return True
    if not is_settled:
        # After the server went away, everybody comes back at a time of his own.
        raise BusUnreachableError(
            f"nobody hears {subject} yet, but the connection to {connection.settings.url} was "
            f"lost less than {_others_back_s(connection):g} s ago: others may still be on their "
            f"way back"
        )
    return False


async def acknowledge(connection: Connection, message: Msg) -> None:
    """Tell the sender that its message is in an inbox here, if that is what it asked."""
    if not message.reply or _MARK not in (message.headers or {}):
        return
    if not connection.connected:  # the server that would let us answer is gone
        return
    try:
        await connection.client.publish(message.reply, _HEARD)
    except nats_errors.Error as error:
        log.debug("acknowledgement_lost subject=%s error=%s", message.subject, error)


def _others_back_s(connection: Connection) -> float:
    settings = connection.settings
    return settings.reconnect_jitter_s + 2 * settings.reconnect_wait_s
