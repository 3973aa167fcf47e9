"""`DcpWriter`: saves of `torch.distributed.checkpoint` through the writer of Everstep.

Torch plans which rank saves what. Each rank copies its items into a buffer, which its writer
process hashes and writes; rank 0's writer makes the checkpoint visible when all parts are durable.
"""

import io
import os
import pickle  # noqa: TID251 - torch's metadata is one; it is written here, and never read
import secrets
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trainer_sdk.checkpoint import arguments
from trainer_sdk.checkpoint.save.plan import layout_of
from trainer_sdk.checkpoint.save.request import Timeouts
from trainer_sdk.integrations.dcp.checkpoint_id import root_and_step
from trainer_sdk.integrations.dcp.items import planned_piece
from trainer_sdk.integrations.dcp.nearest import require_all_ranks
from trainer_sdk.integrations.dcp.rank_saves import (
    PlannedSave,
    RankSaves,
    close_saves,
    saves_of,
    section,
)

_MARKS = {is_kept: secrets.token_hex(4) for is_kept in (False, True)}


class DcpWriter(StorageWriter):
    """A `StorageWriter`: `dcp.save(state, checkpoint_id="/ckpt/step-100", storage_writer=…)`.

    `dcp.save` returns when the checkpoint is visible, or raises. All ranks use the same arguments.
    `job` is as for `Checkpointer`; with `on_error="retry"`, a save is tried three times.

    With `keep_memory`, each save also stays in the memory of the node, or on its disk, and the
    agent sends it to other nodes, as for `Checkpointer`; the newest complete state stays. Without
    `to_root`, a save goes there only: it returns when the images of all ranks are complete.
    """

    def __init__(
        self,
        checkpoint_id: "str | os.PathLike[str]" = "",
        *,
        keep_memory: bool = False,
        to_root: bool = True,
        job: str = "",
        on_error: str = "warn",
        timeouts: Timeouts | None = None,
    ) -> None:
        super().__init__()
        arguments.one_of("on_error", on_error, ("warn", "retry"))
        self._keeps = arguments.truth("keep_memory", keep_memory)
        self._to_root = arguments.truth("to_root", to_root)
        if not self._to_root and not self._keeps:
            raise ValueError("to_root=False saves in memory only: give keep_memory=True as well")
        self._job = arguments.job(job)
        self._on_error = on_error
        self._timeouts = arguments.instance("timeouts", timeouts, Timeouts)
        self._root, self._step = "", 0
        self._rank = 0
        self.checkpoint_id: str | os.PathLike[str] = checkpoint_id
        if checkpoint_id:
            self.reset(checkpoint_id)

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        """Begin a save of this checkpoint."""
        if checkpoint_id is not None:
            self._root, self._step = root_and_step(checkpoint_id)
            self.checkpoint_id = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note the rank of this process, and start its writer."""
        del args
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "use_collectives=False makes a checkpoint of each rank, which no restore could "
                "verify as a whole: leave it True"
            )
        if not self._root:
            raise ValueError(
                "there is no checkpoint_id: give it to dcp.save, or to DcpWriter, as /ckpt/step-100"
            )
        if self._keeps:
            require_all_ranks()
        self._rank = kwargs.get("rank", 0 if is_coordinator else 1)
        self._saves.begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave torch's plan as it is, and note all items of this rank for its image."""
        self._saves.planned(plan)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give all ranks the same name of the save."""
        layout = layout_of([[planned_piece(item) for item in plan.items] for plan in plans])
        count, items = self._saves.next_count(), sum(len(plan.items) for plan in plans)
        return [
            replace(
                plan,
                storage_data=PlannedSave(
                    _MARKS[self._keeps], count, layout, len(plans), rank, items
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's items; its writer begins, and rank 0's when `finish` has the index."""
        with section("dcp copy"):
            stored = self._saves.copy(self._step, plan, planner, to_root=self._to_root)
        if not self._to_root:
            self._saves.wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(stored)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, and wait until the checkpoint is visible. Only rank 0 is called."""
        places: dict[Any, _StorageInfo] = {}
        for result in (result for of_rank in results for result in of_rank):
            self._saves.check(result.storage_data.saving)
            places[result.index] = result.storage_data.info
        described = replace(metadata, storage_data=places, version=CURRENT_DCP_VERSION)
        octets = io.BytesIO()
        pickle.dump(described, octets)
        if self._to_root:
            self._saves.publish(octets.getvalue())

    def close(self) -> None:
        """Wait for saves in progress, and end the writer of this root; a later save starts it."""
        if self._root:
            close_saves((self._root, self._job, self._rank, self._keeps))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        """Whether this is the path or URL of a step."""
        try:
            root_and_step(checkpoint_id)
        except (TypeError, ValueError):
            return False
        return True

    @property
    def _saves(self) -> "RankSaves":
        key = self._root, self._job, self._rank, self._keeps
        return saves_of(key, self._on_error, self._timeouts)
