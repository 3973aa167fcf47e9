"""Shows on the rank's page when torch compiles: a step that compiles for minutes is not a stall."""

from time import monotonic_ns

from trainer_sdk import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from trainer_sdk.bootstrap.agent_link import AgentLink


def show_begin(link: "AgentLink") -> None:
    """Show that torch compiles."""
    link.words[layout.COMPILING_NS] = monotonic_ns()


def show_end(link: "AgentLink") -> None:
    """Show that torch has finished compiling."""
    link.words[layout.COMPILED_NS] = monotonic_ns()
    link.words[layout.COMPILING_NS] = 0  # written last: the reader reads it first


def listen(callbacks: "Any", link: "AgentLink") -> None:
    """Register with torch's module for compiler callbacks, `callbacks`.

    Torch calls back when an outermost compilation begins, and when it ends or fails. It forgets the
    callbacks when its compiler is reset, so they are registered again then.
    """

    def register() -> None:
        handler.register_start_callback(lambda *_: show_begin(link))
        handler.register_end_callback(lambda *_: show_end(link))

    def clear() -> None:
        try:
            forget()
        finally:
            register()

    try:
        handler = callbacks.callback_handler
        forget = handler.clear
        register()
        handler.clear = clear
    except Exception:  # noqa: BLE001 - another release of torch: compilations are not shown
        return
