"""The plan of `everstep run` for words and variables, or what it refuses."""

from pathlib import Path

import pytest

from everstep.errors import EverstepError
from everstep_services.agent.run_plan import RunPlan
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.run.arguments import scan
from everstep_services.cli.run.plan import plan_run

BUS = ("--bus-url", "nats://127.0.0.1:4222")


def plan(home: Path, *words: str, **environ: str) -> RunPlan:
    surroundings = {"HOME": str(home), **environ}
    return plan_run(Invocation(environ=surroundings), scan(words, surroundings))


def refused(home: Path, *words: str, **environ: str) -> str:
    with pytest.raises(EverstepError) as error:
        plan(home, *words, **environ)
    text = str(error.value)
    assert "\n" not in text
    return text
