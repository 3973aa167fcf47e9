"""Faults that a variable plans: `exit@30:rank=1,amount=3; stall@50:target=forward,for=5`."""

from collections.abc import Iterator, Mapping

from trainer_sdk import layout
from trainer_sdk.inject.catalogue import BadFaultError, FaultRequest, fault_request

VARIABLE = "EVERSTEP_INJECT"
_WORDS = ("rank", "round", "for", "amount", "target")


def planned(environ: Mapping[str, str]) -> Iterator[tuple[int, FaultRequest]]:
    """The faults of this rank, each with its step; of the first round if no round is named."""
    for text in environ.get(VARIABLE, "").split(";"):
        if text.strip():
            planned_fault = _read(text.strip(), environ)
            if planned_fault is not None:
                yield planned_fault


def _read(text: str, environ: Mapping[str, str]) -> tuple[int, FaultRequest] | None:
    head, _, tail = text.partition(":")
    name, _, step = head.partition("@")
    options = dict(_pair(text, part) for part in tail.split(",") if part)
    try:
        wished = fault_request(
            name,
            for_s=float(options["for"]) if "for" in options else None,
            amount=int(options["amount"]) if "amount" in options else None,
            target=options.get("target", ""),
        )
        here = int(options.get("rank", environ.get("RANK", "0"))) == int(environ.get("RANK", "0"))
        now = int(options.get("round", "1")) == int(environ.get(layout.ROUND_VARIABLE, "1"))
        return (int(step), wished) if here and now else None
    except ValueError as error:
        raise BadFaultError(f"{VARIABLE}: {text!r} is not FAULT@STEP:…: {error}") from error


def _pair(text: str, part: str) -> tuple[str, str]:
    name, _, value = part.strip().partition("=")
    if name not in _WORDS or not value:
        raise BadFaultError(f"{VARIABLE}: {part.strip()!r} in {text!r}: use {', '.join(_WORDS)}")
    return name, value
