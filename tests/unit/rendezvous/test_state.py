"""The state of a job: what decisions may change in its document."""

from typing import get_args, get_origin, get_type_hints

from everstep.messages import RoundDocument
from everstep_services.rendezvous.domain.state import DocumentChanges, Phase

KEPT_APART = {"job", "seats", "former", "outbox"}


def test_decisions_may_change_each_field_of_the_document_that_is_not_kept_apart() -> None:
    assert set(DocumentChanges.__annotations__) == set(RoundDocument.__struct_fields__) - KEPT_APART


def test_a_change_has_the_type_that_the_document_has() -> None:
    changes, document = get_type_hints(DocumentChanges), get_type_hints(RoundDocument)
    differing = {name for name, hint in changes.items() if document[name] != hint}
    assert differing == {"phase"}, "closed here, open on the wire"
    assert get_origin(Phase) is get_origin(changes["phase"])
    assert all(isinstance(phase, str) for phase in get_args(Phase))
