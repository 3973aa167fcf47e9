"""The parts of a page: where one of them fails, the others stand."""

import logging
import re
from collections.abc import Callable
from typing import Any, NoReturn

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
        cause = error.__cause__ if isinstance(error, FailedValueError) else error
        why = (context["bundle"] is not None and cause and damage_text(cause)) or _FAILED
        log.error("part_failed path=%s", context["path"], exc_info=error)
        return Markup('<p class="note warn">This part cannot be shown: {}.</p>').format(why)


class FailedValueError(Exception):
    """A part shows a value that could not be made; its cause says why."""


class FailedValue:
    """In place of a value that could not be made: only the parts that show it fail."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def _fail(self, *_: object) -> NoReturn:
        raise FailedValueError from self._error

    __iter__ = __len__ = __getitem__ = __getattr__ = __str__ = __html__ = _fail

    def __bool__(self) -> bool:
        """True: a part that stands only where there is something to show must fail, too."""
        return True


def attempt(make: Callable[[], Any]) -> Any:
    """What a function makes for a page; a `FailedValue` if it raises."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001  the part that shows it logs it
        return FailedValue(error)
