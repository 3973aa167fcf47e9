"""Adds to a dump what only the stack of its rank tells of the call in which the rank waits. Pure.

Gloo's recorder has no transfers, and no recorder has the root of a collective.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from everstep_services.attribution.flight_recorder.summary import GroupRecord, Pending, RankSummary

_SENDS = frozenset({"send", "isend"})
_PEERS = {**dict.fromkeys(_SENDS, "dst"), "recv": "src", "irecv": "src"}
_ROOTS = {
    "broadcast": "group_src", "scatter": "group_src", "reduce": "group_dst", "gather": "group_dst",
}  # fmt: skip
_DEFAULT = GroupRecord(name="0", description="default_pg")


def unrecorded(operation: str) -> str:
    """What else may differ between the ranks of a collective, in words: no recorder has it."""
    logged = "on some rank (NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=COLL logs it)"
    if operation.startswith(("all_to_all", "alltoall")):
        return f", other split sizes {logged}"
    return f", another root {logged}" if operation.startswith(tuple(_ROOTS)) else ""


def with_stack_call(dump: RankSummary, call: str, arguments: Mapping[str, int]) -> RankSummary:
    """The dump with the peer of a transfer, or the root of a collective, that is not over."""
    peer = arguments.get(_PEERS[call], arguments.get("peer")) if call in _PEERS else None
    root = arguments.get(_ROOTS.get(call, ""))
    if peer is not None and not any(group.sends or group.receives for group in dump.groups):
        return _with_transfer(dump, peer, is_send=call in _SENDS)
    return dump if root is None else _with_root(dump, call, root)


def _with_transfer(dump: RankSummary, peer: int, *, is_send: bool) -> RankSummary:
    default = next((it for it in dump.groups if it.description == "default_pg"), _DEFAULT)
    transfer = Pending(
        sequence=0, operation="send" if is_send else "recv", state="scheduled",
        created_ns=dump.newest_ns, peer=peer, is_send=is_send,
    )  # fmt: skip
    counted = {"sends" if is_send else "receives": ((peer, 1),)}
    own = replace(default, pending=(*default.pending, transfer), **counted)
    return replace(dump, groups=(*(it for it in dump.groups if it is not default), own))


def _with_root(dump: RankSummary, call: str, root: int) -> RankSummary:
    """The newest collective of this kind that is not over is the one in the stack."""
    begun = [
        pending
        for group in dump.groups
        for pending in group.pending
        if pending.peer is None and pending.operation.startswith(f"{call} ")
    ]
    if not begun:
        return dump
    newest = max(begun, key=lambda pending: pending.created_ns)
    rooted = {id(newest): replace(newest, root=root)}
    return replace(
        dump,
        groups=tuple(
            replace(group, pending=tuple(rooted.get(id(it), it) for it in group.pending))
            for group in dump.groups
        ),
    )
