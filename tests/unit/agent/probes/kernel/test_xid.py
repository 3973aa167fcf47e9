"""Xids alone, in company, in bursts: a table is replayed (A10.1)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_services.agent.probes.kernel.xid import (
    ACTIONS,
    Repeats,
    Together,
    XidEvent,
    judge,
    table,
)

_NOW = 100_000.0
_WINDOW_S = 6 * 3600.0
_A, _B = "0000:18:00", "0000:3b:00"
_TO_RESET = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
_TO_REBOOT = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
_TO_DRAIN = "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"
_TO_NONE = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
_TO_NEW = "GPU recovery action changed from 0x0 (None) to 0x9 (Something Else)"
_LINK = "NETIR_LINK_EVT {} XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000)"

Line = tuple[float, str, int, str]
"""Seconds ago, GPU, number, text."""


def _said(lines: list[Line]) -> list[tuple[str, int, str]]:
    events = [XidEvent(_NOW - ago, gpu, number, text) for ago, gpu, number, text in lines]
    return [(each.gpu, each.number, each.action) for each in judge(events, _NOW, _WINDOW_S)]


@pytest.mark.parametrize(
    ("number", "action"),
    [
        (13, "restart_app"),
        (31, "restart_app"),
        (43, "ignore"),
        (45, "ignore"),
        (48, "reset"),
        (63, "ignore"),
        (64, "reset"),
        (74, "reset"),
        (79, "reboot"),
        (92, "ignore"),
        (94, "restart_app"),
        (95, "reset"),
        (109, "reset"),
        (119, "reset"),
        (120, "reset"),
        (136, "reset"),
        (137, "ignore"),
        (140, "reset"),
        (143, "reset"),
        (158, "reset"),
    ],
)
def test_an_xid_alone_is_what_the_table_says(number: int, action: str) -> None:
    assert _said([(10, _A, number, "")]) == [(_A, number, action)]


def test_an_unknown_xid_is_reported_with_its_text_and_never_more() -> None:
    lines = [XidEvent(_NOW - 600 * n, _A, 9999, "something new") for n in range(20)]
    (judged,) = judge(lines, _NOW, _WINDOW_S)
    assert (judged.action, judged.reason) == ("report", "something new: unknown to this release")


COMPANY: list[tuple[str, list[Line], list[tuple[str, int, str]]]] = [
    (
        "memory that is repaired: drain, then reset",
        [(20, _A, 48, ""), (19, _A, 63, ""), (18, _A, 45, "")],
        [(_A, 48, "drain"), (_A, 45, "ignore"), (_A, 63, "ignore")],
    ),
    (
        "a repair long before is another trouble",
        [(900, _A, 63, ""), (20, _A, 48, "")],
        [(_A, 48, "reset"), (_A, 63, "ignore")],
    ),
    (
        "a repair on another GPU is another trouble",
        [(20, _B, 63, ""), (20, _A, 48, "")],
        [(_A, 48, "reset"), (_B, 63, "ignore")],
    ),
    (
        "contained: only one process is lost",
        [(20, _A, 94, ""), (19, _A, 45, "")],
        [(_A, 94, "restart_app"), (_A, 45, "ignore")],
    ),
    ("uncontained", [(20, _A, 95, ""), (19, _A, 45, "")], [(_A, 95, "reset"), (_A, 45, "ignore")]),
    (
        "a link down because the other GPU is gone",
        [(20, _A, 79, ""), (19, _B, 74, ""), (19, _B, 45, "")],
        [(_A, 79, "reboot"), (_B, 45, "ignore"), (_B, 74, "ignore")],
    ),
    (
        "a link down by itself",
        [(19, _B, 74, ""), (18, _A, 74, "")],
        [(_A, 74, "reset"), (_B, 74, "reset")],
    ),
    (
        "cleanups of a rack of killed processes",
        [(20, _A, 45, f"pid={n}, Ch {n}") for n in range(50)],
        [(_A, 45, "ignore")],
    ),
    (
        "a link of NVLink 5 that is lost",
        [(20, _A, 149, _LINK.format("Fatal"))],
        [(_A, 149, "reset")],
    ),
    ("a remark of NVLink 5", [(20, _A, 149, _LINK.format("Nonfatal"))], [(_A, 149, "ignore")]),
    (
        "a remark after a lost link",
        [(200, _A, 149, _LINK.format("Fatal")), (20, _A, 149, _LINK.format("Nonfatal"))],
        [(_A, 149, "reset")],
    ),
    (
        "the driver's word overrules the table",
        [(20, _A, 94, ""), (19, _A, 154, _TO_DRAIN)],
        [(_A, 154, "drain")],
    ),
    ("it needs a reset", [(20, _A, 31, ""), (19, _A, 154, _TO_RESET)], [(_A, 154, "reset")]),
    ("it needs a reboot", [(20, _A, 79, ""), (19, _A, 154, _TO_REBOOT)], [(_A, 154, "reboot")]),
    ("a word of a newer driver", [(19, _A, 154, _TO_NEW)], [(_A, 154, "report")]),
    ("a word that makes no sense", [(19, _A, 154, "")], [(_A, 154, "report")]),
    (
        "it is well again: what was before is over",
        [(900, _A, 95, ""), (899, _A, 154, _TO_RESET), (100, _A, 154, _TO_NONE)],
        [(_A, 154, "ignore")],
    ),
    (
        "what comes after the driver's word counts again",
        [(900, _A, 154, _TO_NONE), (100, _A, 95, "")],
        [(_A, 95, "reset"), (_A, 154, "ignore")],
    ),
    (
        "a word about one GPU is none about another",
        [(20, _A, 95, ""), (19, _B, 154, _TO_NONE)],
        [(_A, 95, "reset"), (_B, 154, "ignore")],
    ),
]


@pytest.mark.parametrize(
    ("lines", "said"), [row[1:] for row in COMPANY], ids=[r[0] for r in COMPANY]
)
def test_company_changes_what_an_xid_means(
    lines: list[Line], said: list[tuple[str, int, str]]
) -> None:
    assert _said(lines) == said


@pytest.mark.parametrize(
    ("number", "times", "every_s", "action"),
    [
        (31, 4, 600, "restart_app"),
        (31, 5, 600, "report"),
        (31, 500, 0.01, "restart_app"),
        (94, 2, 600, "restart_app"),
        (94, 3, 600, "drain"),
        (95, 2, 600, "reset"),
        (95, 3, 600, "replace"),
        (74, 18, 1, "reset"),
        (74, 3, 600, "replace"),
        (119, 40, 45, "reset"),
        (45, 40, 600, "ignore"),
    ],
)
def test_repetition_in_separate_troubles_changes_what_an_xid_means(
    number: int, times: int, every_s: float, action: str
) -> None:
    assert _said([(10 + n * every_s, _A, number, "") for n in range(times)]) == [
        (_A, number, action)
    ]


def test_what_is_older_than_the_window_is_over_unless_only_a_reboot_helps() -> None:
    long_ago = _WINDOW_S + 1
    assert _said([(long_ago, _A, 95, ""), (long_ago, _B, 79, "")]) == [(_B, 79, "reboot")]
    assert _said([(long_ago, _A, 154, _TO_REBOOT)]) == [(_A, 154, "reboot")]
    assert _said([(long_ago, _A, 154, _TO_RESET)]) == []
    assert _said([(long_ago + n * 600, _A, 95, "") for n in range(3)] + [(10, _A, 95, "")]) == [
        (_A, 95, "reset")
    ]


def test_the_reason_names_the_xid_and_what_it_means() -> None:
    events = [XidEvent(_NOW - 20, _A, 95), XidEvent(_NOW - 19, _A, 154, _TO_RESET)]
    (judged,) = judge(events, _NOW, _WINDOW_S)
    assert judged.reason == f"{_TO_RESET}, with Xid 95"
    (judged,) = judge([XidEvent(_NOW - 20, _A, 79)], _NOW, _WINDOW_S)
    assert judged.reason.startswith("GPU has fallen off the bus. ")


def test_each_row_of_the_table_is_complete() -> None:
    known = table()
    kinds = {"application", "driver", "memory", "hardware", "nvlink", "firmware", "notice"}
    assert len(known.rows) > 100
    for row in known.rows.values():
        assert row.kind in kinds | {"consequence"}
        assert row.action in ACTIONS
        assert row.name
        assert row.note
    rules: list[Together | Repeats] = [*known.together, *known.repeats]
    assert {rule.action for rule in rules} <= set(ACTIONS)
    used = {row.source for row in known.rows.values()} | {rule.source for rule in rules}
    assert used == set(known.sources)
    assert all(url.startswith("https://docs.nvidia.com/") for url in known.sources.values())
    assert {rule.number for rule in known.together} <= known.rows.keys()


_EVENTS = st.builds(
    XidEvent,
    at=st.floats(0, _NOW),
    gpu=st.sampled_from([_A, _B]),
    number=st.one_of(st.sampled_from(sorted(table().rows)), st.integers(0, 1000)),
    text=st.sampled_from(["", "Fatal", "Nonfatal", _TO_RESET, _TO_NONE]),
)


@given(st.lists(_EVENTS, max_size=30))
def test_no_events_make_it_stumble_and_only_known_ones_count(events: list[XidEvent]) -> None:
    judged = judge(events, _NOW, _WINDOW_S)
    assert judged == judge(reversed(events), _NOW, _WINDOW_S) or len(
        {event.at for event in events}
    ) < len(events)
    for each in judged:
        if each.number not in table().rows:
            assert each.action == "report"
    assert not any(each.action not in ("ignore",) for each in judged if each.number in (43, 45))
    gravity = [ACTIONS.index(each.action) for each in judged]
    assert gravity == sorted(gravity, reverse=True)
