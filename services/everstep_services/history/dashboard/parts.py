"""The parts of a page: where one of them fails, the others stand."""

import logging
import re
from collections.abc import Callable

from jinja2 import pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from everstep_services.history.bundle import damage_text

log = logging.getLogger(__name__)

_PARTS = re.compile(r"<section\b|</section>|^<dl\b|^</dl>", re.MULTILINE)
_FAILED = "an error of Everstep; the log of the history service has it"


def guarded(template: str) -> str:
    """A template of whose sections, and lists of facts at its first level, each may fail alone."""
    return _PARTS.sub(_around, template)


def _around(tag: re.Match[str]) -> str:
    return f"{tag[0]}{{% endcall %}}" if tag[0][1] == "/" else f"{{% call part() %}}{tag[0]}"


@pass_context
def part(context: Context, caller: Callable[[], Markup]) -> Markup:
    """A section, or one line in its place."""
    try:
        return caller()
    except Exception as error:
        why = (context["bundle"] is not None and damage_text(error)) or _FAILED
        log.error("part_failed path=%s", context["path"], exc_info=error)
        return Markup('<p class="note warn">This part cannot be shown: {}.</p>').format(why)
