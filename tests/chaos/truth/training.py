"""A training of the corpus that goes on until the file `end` is there.

Its plan, a file of JSON, says which fault it makes in which rounds. Each rank writes to
`progress_RANK` what it has done: that is what sentences about it are compared with.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.chaos.truth import faults
from tests.corpus.training import CorpusTraining

_PACE_S = 0.04
_ENDLESS = 100_000
_SAVES_EVERY = 5


class TruthTraining(CorpusTraining):
    """A rank that knows its round, and may begin after the step of the newest checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.plan = json.loads((folder / "plan.json").read_text())
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.round = int(os.environ.get("EVERSTEP_ROUND", restarts + 1))
        super().__init__(
            argparse.Namespace(fault="none", variant=0, seed=0, folder=str(folder), steps=_ENDLESS)
        )
        self.culprit, self.at = self.plan["rank"], self.plan["at"]
        injection = faults.injection(self.plan["fault"], self.plan["variant"])
        is_mine = injection is not None and (injection.runs_everywhere or self.is_culprit)
        is_now = self.round in self.plan["rounds"]
        self._injection = injection if is_now and is_mine else None
        self.section: Callable[[str], Any] = lambda _: nullcontext()
        self.made_one: Callable[[], object] = lambda: None
        self.session: Any = None
        self.checkpoints: Any = None

    def tell(self, text: str) -> None:
        with (self.folder / f"progress_{self.rank}").open("a") as file:
            file.write(f"round {self.round} pid {os.getpid()} {text}\n")
        if self.plan["talks"]:
            print(text, "x" * 200, flush=True)

    def run(self) -> None:
        self._inject("start")
        self.start()
        self._inject("prepare")
        first = self._resumed()
        if self.plan["sdk"]:
            self._with_sdk(first)
        loader = self._loader()
        self.tell(f"begins after {first}")
        for step in range(first + 1, _ENDLESS):
            self.step = step
            self._next = loader
            with self.section("data"):
                self._do("load", self.load)
                time.sleep(_PACE_S)
            with self.section("compute"):
                self._do("forward", self.forward)
            with self.section("exchange"):
                self._do("backward", self.backward)
                self._do("optimize", self.optimize)
                self._do("metrics", self.metrics)
                self._do("save", self.save)
            self.made_one()
            self.tell(f"step {step}")
            if self.checkpoints is not None:
                self.checkpoints.step(step, self._state())
            if self._is_over():
                break
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.finish()

    def start(self) -> None:
        super().start()
        if self.plan["compiled"]:
            import torch

            self.net: Any = torch.compile(self.net)

    def _with_sdk(self, first: int) -> None:
        import trainer_sdk

        self.session = session = trainer_sdk.session()
        session.start_at(first)
        self.section, self.made_one = session.section, session.step

    def _resumed(self) -> int:
        """The step after which this round begins, the same on all ranks."""
        import torch
        import torch.distributed as dist

        if self.plan["saves"]:
            return self._restored()
        path = self.folder / "saved"
        is_there = self.plan["resumes"] and path.exists()
        first = torch.tensor([int(path.read_text()) if is_there else 0])
        dist.broadcast(first, 0)
        return int(first)

    def _restored(self) -> int:
        from trainer_sdk.checkpoint import Checkpointer

        self.checkpoints = Checkpointer(self.folder / "states", every=_SAVES_EVERY)
        found = self.checkpoints.restore(self._state())
        return 0 if found is None else int(found.step)

    def _state(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer}

    def save(self) -> None:
        """Rank 0 writes the number of some steps; all wait for it."""
        import torch.distributed as dist

        if self.rank == 0 and self.step % _SAVES_EVERY == 0:
            new = self.folder / "saved.new"
            new.write_text(str(self.step))
            new.replace(self.folder / "saved")
        dist.barrier(group=self.other_group)

    def _is_over(self) -> bool:
        import torch
        import torch.distributed as dist

        if self.plan["asks"] and self.session.should_stop:
            return True
        over = torch.tensor([(self.folder / "end").exists()], dtype=torch.int)
        dist.broadcast(over, 0, group=self.other_group)
        return bool(over.item())


if __name__ == "__main__":
    TruthTraining(Path(sys.argv[1])).run()
