"""Reports what Megatron's re-run state machine finds, as Everstep's own numerics do.

The machine logs each unexpected result and each re-run by one method, on the rank that has the
result. That method is wrapped: the machine itself is left as it is.
"""

import hashlib
import json
import math
import os
import re
import sys

from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.bootstrap.torch_hooks import RERUN_MACHINE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_KINDS = {
    "first_rerun_not_reproducible": "transient",
    "second_rerun_not_reproducible": "persistent",
    "second_rerun_reproducible": "correct_but_unexpected",
}
_MOST = 1e18
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


def watch(link: AgentLink, environ: "Mapping[str, str]") -> None:
    """Report from now on; a release of Megatron without that method is left alone."""
    machine: Any = getattr(sys.modules[RERUN_MACHINE], "RerunStateMachine", None)
    logged = getattr(machine, "_log_validation_error_to_file", None)
    if logged is None:
        sys.stderr.write("everstep: this release of Megatron has another re-run state machine\n")
        return

    def report(self: "Any", status: "Any", result: "Any", message: str) -> None:
        logged(self, status=status, result=result, message=message)
        try:
            RerunReport(self, link, environ, result, message).send(
                str(getattr(status, "value", status))
            )
        # Their attributes may have other names in another release: that must end no training.
        except Exception as error:  # noqa: BLE001
            sys.stderr.write(f"everstep: a result of Megatron could not be reported: {error!r}\n")

    machine._log_validation_error_to_file = report  # noqa: SLF001


class RerunReport:
    """One result of one rank, while the machine logs it."""

    def __init__(
        self,
        machine: "Any",
        link: AgentLink,
        environ: "Mapping[str, str]",
        result: "Any",
        message: str,
    ) -> None:
        self._machine = machine
        self._link = link
        self._message = message
        self._result, self._first = _number(result), _number(machine.initial_result)
        self._shown = f"{_shown(result)}", f"{_shown(machine.initial_result)}"
        self._rank = int(environ.get("RANK", "0"))
        self._step = max(int(machine.current_iteration), 0) + 1  # it counts from 0
        self._node = environ.get("EVERSTEP_NODE") or os.uname()[1]
        self._device = sys.modules["torch"].cuda.current_device()

    def send(self, status: str) -> None:
        """Send the events of this status."""
        if self._machine.error_injector.should_inject_errors:
            self._link.send("injected", '"fault":"an error of Megatron\'s own injector"')
        if status in {"initial_run", "rerun_disabled"}:
            fields = {"moved_at": self._step, "rank": self._rank, "value": self._result}
            self._event("suspected", signal=self._signal(self._result), **fields)
        elif status == "first_rerun_reproducible":
            if self._machine.checkpoint_requested:  # else the training goes on with it
                reason = f"{self._message}: rank {self._rank} has {self._shown[1]} each time on "
                reason += f"{self._node} (GPU {self._device}), and another GPU must compute it"
                self._event("acted", action="move", outcome="done", reason=reason)
        elif status in _KINDS:
            self._judged(_KINDS[status])

    def _judged(self, kind: str) -> None:
        node, device = self._node, self._device
        result, first = self._shown
        here = f"on {node} (GPU {device})"
        rank = f"{self._message}: rank {self._rank}"
        again: dict[str, Any] = {"elsewhere": self._result, "elsewhere_by": self._rank}
        match kind:
            case "transient":
                reason = f"{rank} had {first} {here}, and {result} in the next run on the same GPU"
                again = {"again": [self._result]}
            case "persistent":
                node, device = self._suspicious()
                reason = (
                    f"{rank} had {first} on {node} (GPU {device}) each time, and {result} {here}"
                )
            case _:
                reason = f"{rank} had {first}, and has {result} on another GPU, too"
        self._event(
            "judged", signal=self._signal(self._first), kind=kind, reason=reason,
            ranks=[self._rank], node=node, device=f"cuda:{device}", first=self._first, **again,
        )  # fmt: skip

    def _suspicious(self) -> "tuple[str, Any]":
        """Where the result was computed before the job moved, by Everstep's name of the node."""
        host, device = str(self._machine.suspicious_node), self._machine.suspicious_device
        if host == os.uname()[1]:
            return self._node, device
        return _UNSAFE.sub("-", host).strip("-_"), device

    def _signal(self, value: float | None) -> str:
        """A number that JSON has none for is sent as nothing; the shown value tells which."""
        if value is None:
            return "nan" if "nan" in "".join(self._shown).lower() else "inf"
        return "grad_norm_spike" if "grad" in self._message.lower() else "loss_spike"

    def _event(self, name: str, **fields: "Any") -> None:
        key = f"{self._step} {self._rank} {self._message}"
        case = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        body = json.dumps({"case": case, "step": self._step, **fields})
        self._link.send("numerics", f'"event":"{name}","body":{body}')


def _number(result: "Any") -> float | None:
    """The result as a number; None if it is not finite, or no number."""
    try:
        value = float(result)
    except (TypeError, ValueError, RuntimeError):
        return None
    return max(-_MOST, min(_MOST, value)) if math.isfinite(value) else None


def _shown(result: "Any") -> str:
    try:
        return f"{float(result):.9g}"
    except (TypeError, ValueError, RuntimeError):
        return str(result)[:100]
