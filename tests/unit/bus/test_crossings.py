"""What the server lets agents put on record is what their code records."""

import ast
from pathlib import Path

import everstep_services.agent
from everstep.bus.auth.roles import AGENTS_RECORD
from everstep.messages import FACTS, NodeExcluded, NodeLost, VerdictReached

AGENT = Path(everstep_services.agent.__file__).parent


def facts_named_in(folder: Path) -> set[str]:
    names = {fact.__name__ for fact in FACTS}
    return {
        node.id
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id in names
    }


def test_the_server_lets_agents_record_what_their_code_does_and_nothing_else() -> None:
    """A fact of theirs that were missing here would stay in their spools for ever."""
    assert {fact.__name__ for fact in AGENTS_RECORD} == facts_named_in(AGENT)


def test_what_services_decide_is_no_agents_word() -> None:
    assert not {NodeExcluded, NodeLost, VerdictReached} & set(AGENTS_RECORD)
