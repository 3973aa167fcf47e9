"""The table: each fault with its place and its moment, and the truth about it."""

import signal
from collections.abc import Iterator
from typing import Any

from tests.chaos.truth import acts, launches
from tests.chaos.truth.scene import PLAN, Case, Truth, restarted, unharmed

KILL, SEGV, BUS, ABRT = (
    -int(it) for it in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
)
UNKNOWN, CODE, HOST, SCHEDULER = ("unknown",), ("user_code",), ("host",), ("scheduler",)


def _limits(short: str, seconds: int = 4) -> tuple[str, ...]:
    """Short where ranks hang; long where others wait for them."""
    found = dict.fromkeys(("data", "compute", "exchange", "outside"), 90) | {"first-step": 120}
    found[short] = seconds
    return tuple(word for name, s in found.items() for word in ("--limit", f"{name}={s}"))


def _of_rank(
    name: str, variant: int, rank: int, causes: tuple[str, ...], *ends: int,
    says: tuple[str, ...] = (), act: acts.Act = restarted, **more: Any,
) -> Case:  # fmt: skip
    """A fault that a rank makes itself, in round 1; the training goes on in round 2."""
    plan = {key: more.pop(key) for key in PLAN if key in more}
    marks = [key if value is True else f"{key}-{value}" for key, value in plan.items()]
    marks += ["attached"] if "begin" in more else []
    own = {"fault": name, "variant": variant, "rank": rank, **plan}
    truth = Truth((rank,), (), causes, ends, says)
    return Case("-".join([f"{name}-{variant}", *marks, f"rank{rank}"]), truth, act, own, **more)


def _ends() -> Iterator[Case]:
    """Ranks that end: where, when, and how."""
    yield _of_rank("sigkill", 0, 2, UNKNOWN, KILL, is_loaded=True)
    yield _of_rank("sigkill", 1, 0, UNKNOWN, KILL)
    yield _of_rank("sigkill", 2, 3, UNKNOWN, KILL)
    yield _of_rank("sigkill", 3, 1, UNKNOWN, KILL)
    yield _of_rank("sigkill", 4, 1, UNKNOWN, KILL)
    yield _of_rank("sigkill", 0, 2, UNKNOWN, KILL, at=1)
    yield _of_rank("segfault", 0, 1, UNKNOWN, SEGV, is_loaded=True)
    yield _of_rank("segfault", 3, 0, UNKNOWN, SEGV)
    yield _of_rank("segfault", 4, 3, UNKNOWN, SEGV)
    for variant, rank in ((0, 3), (1, 0), (2, 1), (3, 2), (4, 0)):
        yield _of_rank("exception", variant, rank, CODE, 1, is_loaded=variant == 0)
    yield _of_rank("exception", 5, 3, (*CODE, "data"), 1)
    yield _of_rank("exception", 0, 0, CODE, 1, at=1)
    for rank in (1, 2):
        yield _of_rank("exit", 0, rank, CODE, 0, says=("ended with code 0|exited with 0",),
                       is_loaded=rank == 2)  # fmt: skip
    for rank in (0, 3):
        yield _of_rank("exit", 3, rank, CODE, 3)
    yield _of_rank("exit", 9, 2, CODE, 1, says=("no more data",))
    yield _of_rank("dead_peer", 0, 3, (*CODE, *UNKNOWN), 1)
    yield _of_rank("dead_peer", 1, 0, (*CODE, *UNKNOWN), 0)
    yield _of_rank("dead_peer", 4, 2, (*CODE, *UNKNOWN, "framework"), ABRT)
    for variant, rank in ((0, 1), (1, 2), (3, 3), (4, 0)):
        yield _of_rank("wrong_shape", variant, rank, CODE, 1, ABRT, is_loaded=variant == 0)
    yield _of_rank("wrong_type", 0, 1, CODE, 1, ABRT)
    yield _of_rank("out_of_memory", 0, 2, (*HOST, *CODE), 1)  # by a limit of its own
    yield _of_rank("out_of_memory", 4, 1, HOST, KILL, needs="cgroup")
    yield _of_rank("missing_file", 0, 0, ("data", "configuration"), 1)
    yield _of_rank("disk_full", 0, 3, ("storage",), 1)
    yield _of_rank("permission", 0, 1, ("configuration",), 1)
    yield _of_rank("nan", 0, 2, CODE, 1)
    yield _of_rank("import", 1, 2, ("configuration", *CODE), 1)


def _others() -> Iterator[Case]:
    """The same in trainings of other kinds."""
    again = "steps? again|steps? are made again"
    yield _of_rank("exception", 0, 1, CODE, 1, compiled=True)
    yield _of_rank("sigkill", 0, 3, UNKNOWN, KILL, compiled=True)
    yield _of_rank("exception", 0, 2, CODE, 1, sdk=True, says=(again,))
    yield _of_rank("sigkill", 0, 1, UNKNOWN, KILL, sdk=True, resumes=False, says=(again,))
    yield _of_rank("sigkill", 0, 1, UNKNOWN, KILL, resumes=False)
    yield _of_rank("exception", 0, 3, CODE, 1, sdk=True, saves=True)
    slow = Truth(incidents=0, says=("slow: rank 2",), never=("slow: rank [013]",))
    yield Case("slow-rank2", slow, acts.found_slow, {"fault": "slow", "rank": 2, "sdk": True},
               settings=_WINDOWS)  # fmt: skip
    none = Truth(incidents=0)
    yield Case("writer-killed", none, acts.writer_killed(1), {"sdk": True, "saves": True})


_WINDOWS = {"EVERSTEP_STRAGGLER__WINDOW_S": "1.5", "EVERSTEP_STRAGGLER__SLOWER_RATIO": "0.5"}
"""Short, and only what is slow beyond the noise of a busy machine counts."""


def _hangs() -> Iterator[Case]:
    yield _of_rank(
        "sleeping_rank", 0, 2, CODE, sdk=True, options=_limits("compute"), is_loaded=True
    )
    yield _of_rank("sleeping_rank", 4, 1, (*CODE, "data"), sdk=True, options=_limits("data"))
    yield _of_rank("sleeping_rank", 0, 0, CODE, options=_limits("outside", 6))
    yield _of_rank("skipped_collective", 0, 3, CODE, sdk=True, options=_limits("exchange"))
    yield _of_rank("skipped_collective", 1, 0, CODE, options=_limits("outside", 6))
    yield _of_rank("lock_held", 0, 1, CODE, sdk=True, options=_limits("compute"))
    yield _of_rank("stuck_loader", 0, 2, ("data", *CODE), sdk=True, options=_limits("data"))
    yield _of_rank("dead_peer", 2, 3, (*HOST, *UNKNOWN), sdk=True, options=_limits("exchange"))
    yield _of_rank("wrong_shape", 2, 1, CODE, options=_limits("outside", 6))
    # A send that is missing, or a receive too many: nothing tells.
    either = Truth((1, 2), (), CODE)
    yield Case("stages-0-rank1", either, restarted, {"fault": "stages", "rank": 1},
               options=_limits("outside", 6))  # fmt: skip
    yield _of_rank("stages", 1, 2, CODE, options=_limits("outside", 6))


def _unusual() -> Iterator[Case]:
    """What nobody had tried before."""
    yield _of_rank("files", 0, 1, (*CODE, *HOST, "configuration"), 1)
    yield _of_rank("child", 0, 0, UNKNOWN, KILL)
    yield _of_rank("worker", 0, 2, ("data", *HOST, *UNKNOWN, *CODE), 1)
    yield _of_rank("hook", 0, 1, CODE, 1)
    yield _of_rank("recursion", 0, 3, CODE, 1)
    yield _of_rank("deadlock", 0, 1, CODE, sdk=True, options=_limits("compute"))
    yield _of_rank("no_sigterm", 0, 1, UNKNOWN, KILL)
    yield _of_rank("keyboard", 0, 2, (*CODE, *UNKNOWN), 1, 130, -signal.SIGINT)
    yield _of_rank("exit", 7, 3, (*CODE, *UNKNOWN), 0, says=("ended with code 0|exited with 0",))
    calm = Truth(incidents=0, never=("hung", "stalled"))
    for name, variant in (("wrong_type", 1), ("stdout_closed", 0), ("clocks", 0), ("folder", 0)):
        plan = {"fault": name, "variant": variant, "rank": 1, "sdk": True}
        yield Case(f"{name}-{variant}-harmless", calm, unharmed, plan)
    yield Case("slow-harmless", calm, unharmed, {"fault": "slow", "rank": 2, "sdk": True},
               is_loaded=True)  # fmt: skip
    yield Case("warden-paused", calm, acts.warden_paused)


def _from_outside() -> Iterator[Case]:
    alone = Truth((2,), (), UNKNOWN, (130, -signal.SIGINT))
    yield Case("sent-SIGINT-rank2", alone, acts.signalled(2, signal.SIGINT))
    for rank, number in ((0, signal.SIGKILL), (3, signal.SIGSEGV), (1, signal.SIGBUS)):
        truth = Truth((rank,), (), UNKNOWN, (-int(number),))
        yield Case(f"sent-{number.name}-rank{rank}", truth, acts.signalled(rank, number),
                   is_loaded=rank == 0)  # fmt: skip
    twice = Truth((0,), (), UNKNOWN, (KILL,), incidents=2)
    yield Case("killed-twice", twice, acts.killed_twice(0, 0), is_loaded=True)
    yield Case("budget-spent", Truth((1,), (), UNKNOWN, (KILL,)), acts.budget_spent,
               options=("--max-restarts", "0"))  # fmt: skip
    for rank in (0, 3):
        injected = Truth((rank,), (), ("injected",), (KILL,))
        kill = acts.injected("kill", "--rank", str(rank))
        yield Case(f"injected-kill-rank{rank}", injected, kill, options=("--allow-injection",))
    cannot = Truth((0, 1, 2, 3), (), ("configuration", *CODE), (1,))
    yield Case(
        "import-0-everywhere", cannot, acts.ended_with(93), {"fault": "import", "rounds": [1, 2, 3]}
    )
    always = Truth((0, 1, 2, 3), (), CODE, (1,), incidents=2)
    yield Case("same-error-everywhere", always, acts.ended_with(93),
               {"fault": "same_error", "rounds": [1, 2, 3], "at": 3, "resumes": False},
               options=("--stop-on-repeat",))  # fmt: skip


def _nodes() -> Iterator[Case]:
    lost = Truth((), (2,), HOST)
    yield Case("node-lost-spare", lost, acts.nodes_lost(2), spares=1, is_loaded=True)
    yield Case("node1-lost-spare", Truth((), (1,), HOST), acts.nodes_lost(1), spares=1)
    yield Case("node-lost-replaced", lost, acts.node_lost_and_replaced)
    yield Case("node-lost-shrinks", lost, acts.nodes_lost(2, world=2), options=("--nnodes", "1:2"))
    grown = Truth((0,), (2,), (*HOST, *UNKNOWN), (KILL,), incidents=2)
    yield Case("node-lost-grows", grown, acts.grown, options=("--nnodes", "1:2"))
    yield Case("two-nodes-lost", Truth((), (2, 3), HOST), acts.nodes_lost(2, 3), nodes=3, spares=2,
               per_node=1)  # fmt: skip
    yield Case("two-nodes-lost-shrinks", Truth((), (2, 3), HOST), acts.nodes_lost(2, 3, world=1),
               nodes=3, per_node=1, options=("--nnodes", "1:3"))  # fmt: skip
    yield Case("agent-killed-spare", lost, acts.agents_killed(2, again=False), spares=1)
    yield Case("agent-killed-again", lost, acts.agents_killed(2, again=True))
    yield Case("both-agents-killed", Truth((), (1, 2), HOST), acts.agents_killed(1, 2, again=True))
    warden = Truth((), (), UNKNOWN, (KILL,), may_nodes=(2,))
    yield Case("warden-killed", warden, acts.warden_killed)
    last = Truth((), (2,), HOST, may_nodes=(1,))
    yield Case("node-lost-then-sigterm", last, acts.node_lost_then_stopped)
    none = Truth(incidents=0)
    yield Case("node-paused", none, acts.paused(2))
    yield Case("both-nodes-paused", none, acts.paused(1, 2))
    yield Case("agent-paused", none, acts.agents_paused(acts.PAUSE_S, 2))
    yield Case("both-agents-paused", none, acts.agents_paused(20, 1, 2))
    yield Case("log-disk-full", none, acts.log_disk_full, {"talks": True}, needs="small_disk",
               options=("--log-dir", "{disk}"))  # fmt: skip
    yield Case("bus-paused", none, acts.bus_paused)
    yield Case("killed-without-bus", Truth((2,), (), UNKNOWN, (KILL,)), acts.killed_without_bus)


def _people() -> Iterator[Case]:
    taken = Truth((), (), SCHEDULER, may_nodes=(2,))
    yield Case("preempted-spare", taken, acts.preempted_with_spare, {"sdk": True, "asks": True},
               spares=1, is_loaded=True)  # fmt: skip
    yield Case("preempted-spare-unasked", taken, acts.preempted_with_spare, spares=1,
               options=("--preempt-grace", "2"))  # fmt: skip
    gone, ended = Truth(incidents=0), Truth((), (), SCHEDULER, (-signal.SIGINT, 130))
    yield Case("preempted", gone, acts.preempted, {"sdk": True, "asks": True})
    yield Case("interrupted", ended, acts.interrupted, is_loaded=True)
    yield Case("stopped", gone, acts.stopped)
    moved = Truth(incidents=0)
    yield Case("drained", moved, acts.asked("drain", "{node}", "--job", "{job}"), spares=1)
    yield Case("restarted", moved, acts.asked("restart", "{job}"))
    yield Case("brake", Truth((1,), (), UNKNOWN, (KILL,)), acts.killed_with_brake)


def _launched() -> Iterator[Case]:
    more: Any = {"nodes": 1, "per_node": 4, "begin": launches.by_torchrun, "sdk": True}
    yield _of_rank("exception", 0, 1, CODE, 1, act=launches.over(1), **more)
    yield _of_rank("exit", 3, 3, CODE, 3, act=launches.over(1), **more)
    yield _of_rank("sleeping_rank", 0, 2, CODE, act=launches.found_hanging, **more)
    sent = Truth((2,), (), UNKNOWN, (KILL,))
    yield Case("attached-SIGKILL-rank2", sent, launches.killed(2),
               {"sdk": True}, nodes=1, per_node=4, begin=launches.by_torchrun)  # fmt: skip
    raised = Truth((1,), (), CODE, (1,))
    killed = Truth((1,), (), UNKNOWN, (KILL,), says=("in their processes without it",),
                   never=("no other round followed",))  # fmt: skip
    yield Case("in-process-raises", raised, launches.over(0, 0), nodes=1,
               begin=launches.in_process("raises"))  # fmt: skip
    yield Case("in-process-killed", killed, launches.over(0, -9, 0), nodes=1, per_node=3,
               begin=launches.in_process("killed"))  # fmt: skip


CASES = (
    *_ends(), *_others(), *_hangs(), *_unusual(), *_from_outside(), *_nodes(), *_people(),
    *_launched(),
)  # fmt: skip
