"""All messages of this release, by area."""

from collections.abc import Mapping
from types import ModuleType

from everstep.messages import documents, orders
from everstep.messages.base import Fact, Message
from everstep.messages.beats import progress, timings
from everstep.messages.documents.buckets import BUCKETS
from everstep.messages.facts import (
    checkpoints,
    control,
    health,
    incidents,
    jobs,
    numerics,
    preemption,
    ranks,
    replicas,
    rounds,
    stragglers,
)
from everstep.messages.questions import answers, attribution, catalog, logins, rendezvous
from everstep.messages.questions import health as questions_to_health
from everstep.messages.questions import straggler as questions_to_straggler


def _messages_in(module: ModuleType) -> tuple[type[Message], ...]:
    """The tagged messages that a module defines, in its order; for documents, that of buckets."""
    if module is documents:
        return tuple(bucket.holds for bucket in BUCKETS)
    return tuple(
        class_
        for class_ in vars(module).values()
        if isinstance(class_, type)
        and issubclass(class_, Message)
        and class_.__module__ == module.__name__
        and "." in str(class_.__struct_config__.tag)  # a base has its own name for a tag
    )


AREAS: Mapping[str, ModuleType] = {
    "Jobs": jobs,
    "Rounds": rounds,
    "Ranks": ranks,
    "Progress": progress,
    "Timings": timings,
    "Health": health,
    "Stragglers": stragglers,
    "Incidents": incidents,
    "Numerics": numerics,
    "Checkpoints": checkpoints,
    "Replicas": replicas,
    "Preemption": preemption,
    "Orders": orders,
    "Questions to rendezvous": rendezvous,
    "Questions to health": questions_to_health,
    "Questions to logins": logins,
    "Questions to straggler": questions_to_straggler,
    "Questions to attribution": attribution,
    "Questions to the catalog": catalog,
    "Answers": answers,
    "Documents": documents,
    "Control": control,
}
"""The modules with messages, in the order in which people should read them."""

MESSAGE_TYPES_BY_AREA: Mapping[str, tuple[type[Message], ...]] = {
    area: _messages_in(module) for area, module in AREAS.items()
}
MESSAGE_TYPES: tuple[type[Message], ...] = tuple(
    message for messages in MESSAGE_TYPES_BY_AREA.values() for message in messages
)
"""Every message of this release."""
FACTS: tuple[type[Fact], ...] = tuple(
    message for message in MESSAGE_TYPES if issubclass(message, Fact)
)
"""Those that are kept for ever."""
