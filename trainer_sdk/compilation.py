"""Shows in the rank's page when torch compiles: what then takes minutes has not stalled."""

from time import monotonic_ns

from trainer_sdk import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from trainer_sdk.bootstrap.agent_link import AgentLink


def show_begin(link: "AgentLink") -> None:
    """Torch compiles."""
    link.words[layout.COMPILING_NS] = monotonic_ns()


def show_end(link: "AgentLink") -> None:
    """It does not any more."""
    link.words[layout.COMPILED_NS] = monotonic_ns()
    link.words[layout.COMPILING_NS] = 0  # the last: the reader reads it first


def listen(callbacks: "Any", link: "AgentLink") -> None:
    """Have torch call us; `callbacks` is its module for that.

    It does when it begins to compile what nothing else compiles around, and when that has ended,
    by an error, too. It forgets us when its compiler is reset.
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
    except Exception:  # noqa: BLE001 - another release: then nobody knows when it compiles
        return
