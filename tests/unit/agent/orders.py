"""Orders to an agent, and agents that have come so far, with plain numbers."""

from typing import Any

from everstep.messages import Joined, LeaveJob, StartRanks, StopRanks
from everstep_services.agent.core.actions import Action, SendReport
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.core.exit import RankExit
from everstep_services.agent.settings import AgentSettings

DONE = RankExit(code=0)
KILLED = RankExit(signal="SIGKILL")


def start(round: int = 1, *, slot: int = 0, ranks: int = 2) -> StartRanks:
    return StartRanks(
        **common(round),
        slot=slot,
        slots=2,
        first_rank=slot * ranks,
        ranks=ranks,
        world_size=2 * ranks,
        master_address="node-0",
        master_port=23456,
    )


def stop(round: int = 1, **rest: Any) -> StopRanks:
    known = {"cause": "rank_exited", "grace_s": 2.0, "incident": "i1"}
    return StopRanks(**(common(round) | known | rest))


def leave(round: int = 1, code: int = 0) -> LeaveJob:
    return LeaveJob(**common(round), exit_code=code, state="done")


def reply(round: int = 1, **rest: Any) -> Joined:
    return Joined(round=round, is_accepted=True, reason="", **rest)


def common(round: int) -> dict[str, Any]:
    return {"id": f"{round:032x}", "job": "j", "round": round, "reason": "because"}


def running(round: int = 1, *, slot: int = 0) -> Agent:
    agent = Agent(AgentSettings())
    agent.begin()
    agent.joined(reply(round - 1), now=0)
    agent.ordered(start(round, slot=slot))
    for rank in (2 * slot, 2 * slot + 1):
        agent.rank_runs(rank)
    assert agent.state == "running"
    return agent


def told(acts: list[Action]) -> list[str]:
    return [act.event for act in acts if isinstance(act, SendReport)]
