"""All messages of this release, by area."""

from collections.abc import Mapping
from types import ModuleType

from everstep.messages import (
    checkpoints,
    control,
    documents,
    health,
    incidents,
    jobs,
    orders,
    preemption,
    progress,
    questions,
    ranks,
    replicas,
    rounds,
    stragglers,
    timings,
)
from everstep.messages.base import Fact, Message


def _messages_in(module: ModuleType) -> tuple[type[Message], ...]:
    """The tagged messages that a module defines, in its order."""
    return tuple(
        thing
        for thing in vars(module).values()
        if isinstance(thing, type)
        and issubclass(thing, Message)
        and thing.__module__ == module.__name__
        and "." in str(thing.__struct_config__.tag)  # a base has its own name for a tag
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
    "Checkpoints": checkpoints,
    "Replicas": replicas,
    "Preemption": preemption,
    "Orders": orders,
    "Questions to rendezvous": questions.rendezvous,
    "Questions to health": questions.health,
    "Questions to logins": questions.logins,
    "Questions to straggler": questions.straggler,
    "Questions to attribution": questions.attribution,
    "Questions to the catalog": questions.catalog,
    "Answers": questions.answers,
    "Documents": documents,
    "Control": control,
}
"""The modules of the catalogue, in the order in which people should read them."""

CATALOGUE_BY_AREA: Mapping[str, tuple[type[Message], ...]] = {
    area: _messages_in(module) for area, module in AREAS.items()
}
CATALOGUE: tuple[type[Message], ...] = tuple(
    message for messages in CATALOGUE_BY_AREA.values() for message in messages
)
"""Every message of this release."""
FACTS: tuple[type[Fact], ...] = tuple(message for message in CATALOGUE if issubclass(message, Fact))
"""Those that are kept for ever."""
