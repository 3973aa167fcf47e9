"""`DcpReader`: loads of `torch.distributed.checkpoint` from verified checkpoints."""

import io
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainer_sdk.checkpoint import arguments
from trainer_sdk.checkpoint.events import Reporter
from trainer_sdk.checkpoint.job_context import read_job_context
from trainer_sdk.checkpoint.manifest import step_name
from trainer_sdk.checkpoint.rank_group import group_of_all
from trainer_sdk.checkpoint.restore.choice import GLOBAL, Tier
from trainer_sdk.checkpoint.restore.errors import CorruptError, RestoreError, UnfitError
from trainer_sdk.checkpoint.restore.quarantine import quarantine_corrupt
from trainer_sdk.checkpoint.restore.stored_shards import StoredShards
from trainer_sdk.checkpoint.restore.target import fill
from trainer_sdk.checkpoint.restore.values import harmless
from trainer_sdk.checkpoint.storage import Storage, storage_for
from trainer_sdk.checkpoint.storage.checkpoints import StoredCheckpoint, look, stored_checkpoints
from trainer_sdk.environment import environ
from trainer_sdk.integrations.dcp.checkpoint_id import split
from trainer_sdk.integrations.dcp.nearest import (
    NearestState,
    note_restored,
    note_verified,
    require_all_ranks,
    take_verified,
)
from trainer_sdk.rank_session import session

_MOST_NAMED = 4


class DcpReader(StorageReader):
    """A `StorageReader`: `dcp.load(state, checkpoint_id="/ckpt/step-100", storage_reader=…)`.

    Without a step in `checkpoint_id`, the newest checkpoint of that root is loaded that is not
    quarantined. Each rank verifies the hash of every file that it reads, before it reads a tensor;
    a damaged checkpoint is quarantined, and the load raises on all ranks.

    With `keep_memory`, as for `DcpWriter`, each rank loads from its nearest tier: the memory of its
    node, another node's memory, or the global tier. All ranks of the job load together. A damaged
    image is passed over for the next tier; where the load has other shardings than the images, all
    ranks load the global tier's newest checkpoint, or its step of `checkpoint_id`, and a warning
    names both steps. `job` is as for `Checkpointer`.

    Every image is verified before it is loaded. The load after `newest_verified(keep_memory=True)`
    does not do it again for an image whose index and file are the same as then: no byte of an image
    changes without one of them (`ImageStamp`).
    """

    def __init__(
        self,
        checkpoint_id: "str | os.PathLike[str]" = "",
        *,
        keep_memory: bool = False,
        job: str = "",
    ) -> None:
        super().__init__()
        self._root, self._step = "", None
        self._rank = 0
        self._is_coordinator = False
        self._misfit = ""
        self._keep_memory = arguments.truth("keep_memory", keep_memory)
        self._job = arguments.job(job)
        self._nearest: NearestState | None = None
        self._loaded: tuple[int, Tier] | None = None
        self._shards: StoredShards | None = None
        self._checkpoint: StoredCheckpoint | None = None
        self.checkpoint_id: str | os.PathLike[str] = checkpoint_id
        if checkpoint_id:
            self.reset(checkpoint_id)

    _step: int | None

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        """Begin a load of this checkpoint."""
        self._release()
        if checkpoint_id is not None:
            self._root, self._step = split(checkpoint_id)
            self.checkpoint_id = checkpoint_id

    @property
    def tier(self) -> Tier | None:
        """The tier from which this rank has loaded: `memory`, `disk`, `peer` or `global`."""
        return None if self._loaded is None else self._loaded[1]

    @property
    def step(self) -> int | None:
        """The step that was loaded; None before a load."""
        return None if self._loaded is None else self._loaded[0]

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Choose the checkpoint; returns torch's metadata, verified."""
        # Torch would call this again for the metadata of a rank, if it had `kwargs`.
        del args, options
        if not self._root:
            raise ValueError("there is no checkpoint_id: give it to dcp.load, or to DcpReader")
        self._loaded = None
        return self._nearest_metadata() if self._keep_memory else self._published_metadata()

    def _nearest_metadata(self) -> Metadata:
        self._release()
        require_all_ranks()
        with session().section("dcp load", "checkpoint"):
            before = take_verified(self._root)
            nearest = NearestState(self._root, self._step, self._job, before=before)
        if nearest.choice is None:
            nearest.close()
            raise RestoreError(
                f"there has never been a checkpoint in {self._root} or in memory, or a fresh start "
                "is allowed: begin without dcp.load where newest_verified(…, keep_memory=True) "
                "returns None"
            )
        self._nearest = nearest
        return nearest.metadata()

    def _published_metadata(self) -> Metadata:
        storage = storage_for(self._root)
        chosen = self._checkpoint = _chosen(storage, self._step)
        assert chosen.manifest is not None
        self._shards = StoredShards(storage, step_name(chosen.step), chosen.manifest.identity)
        try:
            return self._shards.describe()
        except CorruptError as error:
            self._quarantine(error)
            raise RestoreError(str(error)) from error
        except UnfitError as error:
            raise RestoreError(str(error)) from error

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Note the rank of this process."""
        del metadata, args
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank", 0 if is_coordinator else 1)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave torch's plan as it is, and note why the image of this rank cannot serve it."""
        image = None if self._nearest is None else self._nearest.image
        self._misfit = "" if image is None else image.misfit(plan)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave torch's plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verify the files that have these items, and load the items."""
        with session().section("dcp load", "checkpoint"):
            try:
                if self._nearest is None:
                    self._load_published(plan, planner)
                else:
                    nearest = self._nearest.fitting(self._misfit)
                    if nearest is not self._nearest:
                        self._nearest = nearest
                        plan = self._planned_again(nearest, planner)
                    self._load_nearest(nearest, plan, planner)
            except CorruptError as error:
                self._quarantine(error)
                raise RestoreError(str(error)) from error
            except UnfitError as error:
                raise RestoreError(str(error)) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        """Whether this is a path or URL."""
        try:
            split(checkpoint_id)
        except (TypeError, ValueError):
            return False
        return True

    @staticmethod
    def is_there(checkpoint_id: "str | os.PathLike[str]") -> bool:
        """Whether Everstep has saved this step, and its checkpoint is visible."""
        root, step = split(checkpoint_id)
        return step is not None and look(storage_for(root), step) is not None

    def _load_published(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        assert self._shards is not None
        assert self._checkpoint is not None
        assert self._checkpoint.manifest is not None
        self._shards.verify_for(plan.items)
        self._load_shards(self._shards, plan, planner)
        identity = self._checkpoint.manifest.identity
        context = read_job_context(environ, self._job, self._root)
        # Where no agent counts rounds, later saves of this launch count as a later round.
        note_restored(self._root, identity, 0 if context.is_counted else identity.round + 1)
        self._loaded = identity.step, GLOBAL

    def _planned_again(self, nearest: NearestState, planner: LoadPlanner) -> LoadPlan:
        """A plan of this rank for another checkpoint than that for which torch has planned."""
        remedy = "load by DcpReader() without keep_memory"
        if not isinstance(planner, DefaultLoadPlanner):
            raise RestoreError(
                f"a {type(planner).__name__} is not a DefaultLoadPlanner, and cannot plan a load "
                f"of the global tier instead of the memory of the nodes: {remedy}"
            )
        state, metadata = planner.original_state_dict, nearest.metadata()
        try:
            planner.set_up_planner(state, metadata, self._is_coordinator)
            return planner.finish_plan(planner.create_local_plan())
        except Exception as error:
            raise RestoreError(
                f"the checkpoint of the global tier cannot be loaded instead of the memory of the "
                f"nodes: {error}; {remedy}"
            ) from error

    def _load_nearest(self, nearest: NearestState, plan: LoadPlan, planner: LoadPlanner) -> None:
        assert nearest.choice is not None
        image = nearest.image
        if image is None:
            self._load_shards(nearest.shards, plan, planner)
        else:
            for item, value in image.values(plan):
                planner.load_bytes(item, io.BytesIO(value))
            for item, part in image.parts(plan):
                self._fill(item, part, planner)
            image.check_unchanged()
        self._loaded = nearest.choice.identity.step, nearest.tier
        self._nearest = None
        nearest.loaded()

    def _load_shards(self, shards: StoredShards, plan: LoadPlan, planner: LoadPlanner) -> None:
        for item, octets in shards.read(plan.items):
            if item.type is LoadItemType.BYTE_IO:
                value = harmless(bytes(octets), item.dest_index.fqn)
                planner.load_bytes(item, io.BytesIO(value))
            else:
                self._fill(item, shards.part(item, octets), planner)

    def _fill(self, item: ReadItem, part: torch.Tensor, planner: LoadPlanner) -> None:
        target = planner.resolve_tensor(item).detach()
        if target.shape != part.shape:
            raise UnfitError(
                f"{item.dest_index.fqn} is {tuple(part.shape)} there, and {tuple(target.shape)} "
                "here"
            )
        fill(target, part)
        planner.commit_tensor(item, target)

    def _quarantine(self, error: CorruptError) -> None:
        assert self._checkpoint is not None
        _quarantine(storage_for(self._root), self._checkpoint, str(error), self._rank)

    def _release(self) -> None:
        """Close the files of a load that torch has given up."""
        nearest, self._nearest = self._nearest, None
        if nearest is not None:
            nearest.close()


def newest_verified(
    root: "str | os.PathLike[str]", *, keep_memory: bool = False, job: str = ""
) -> int | None:
    """The newest step of a root whose files all ranks have verified; None if there is none.

    All ranks call it together; each verifies a share of the files. Damaged checkpoints are
    quarantined. `RestoreError` if there are checkpoints, and none can be used. With `keep_memory`,
    states in the memory of the nodes count as well, and it follows `--allow-fresh-start`; a load
    with other shardings than those states takes another step, which `DcpReader.step` has.
    """
    if arguments.truth("keep_memory", keep_memory):
        place = split(f"{os.fspath(root)}/step-0")[0]
        with session().section("verify", "checkpoint"):
            nearest = NearestState(place, None, arguments.job(job))
            note_verified(place, nearest.stamp)
            nearest.close()
        return None if nearest.choice is None else nearest.choice.identity.step
    group = group_of_all(environ.get("WORLD_SIZE", ""))
    storage = storage_for(split(f"{os.fspath(root)}/step-0")[0])
    steps = group.follow(_steps(storage) if group.rank == 0 else [], list[int])
    flaws: list[str] = []
    with session().section("verify", "checkpoint"):
        for step in steps:
            flaw, is_damaged = _verified(storage, step, group.rank, group.size)
            answers = group.gather((flaw, is_damaged), tuple[str, bool])
            flawed = [answer for answer in answers if answer[0]]
            if not flawed:
                return step
            flaw, is_damaged = flawed[0]
            flaws.append(f"step {step}: {flaw}")
            if group.rank == 0 and is_damaged:
                with suppress(RestoreError):
                    _quarantine(storage, _chosen(storage, step), flaw, 0)
    if flaws:
        raise RestoreError(
            f"no checkpoint in {storage.url} can be used: {'; '.join(flaws[:_MOST_NAMED])}"
        )
    return None


def _steps(storage: Storage) -> list[int]:
    return [there.step for there in stored_checkpoints(storage) if _is_usable(there)]


def _is_usable(there: StoredCheckpoint) -> bool:
    return there.manifest is not None and not there.flaw and there.quarantined is None


def _verified(storage: Storage, step: int, rank: int, world_size: int) -> tuple[str, bool]:
    """Why this rank's share of a checkpoint is not good, and whether it is damaged."""
    try:
        there = _chosen(storage, step)
        assert there.manifest is not None
        StoredShards(storage, step_name(step), there.manifest.identity).verify(rank, world_size)
    except CorruptError as error:
        return str(error), True
    except Exception as error:  # noqa: BLE001 - the other ranks wait for the answer
        return f"{type(error).__name__}: {error}", False
    return "", False


def _chosen(storage: Storage, step: int | None) -> StoredCheckpoint:
    """The checkpoint of this step, or the newest; `RestoreError` if there is none to use."""
    if step is None:
        there: Sequence[StoredCheckpoint] = stored_checkpoints(storage)
        usable = next(filter(_is_usable, there), None)
        if usable is None:
            raise RestoreError(f"{storage.url} has no checkpoint of Everstep that can be used")
        return usable
    checkpoint = look(storage, step)
    if checkpoint is None:
        raise RestoreError(
            f"{storage.url} has no checkpoint of step {step} that Everstep has saved: choose one "
            f"of `everstep ckpt ls {storage.url}`, or adopt one of torch's by `everstep ckpt adopt`"
        )
    if checkpoint.quarantined is not None:
        raise RestoreError(f"{checkpoint.path} is quarantined: {checkpoint.quarantined.reason}")
    if checkpoint.manifest is None or checkpoint.flaw:
        raise RestoreError(checkpoint.flaw)
    return checkpoint


def _quarantine(storage: Storage, there: StoredCheckpoint, reason: str, rank: int) -> None:
    reporter = Reporter(rank, session()._link)  # noqa: SLF001 - one package
    identity = there.manifest.identity if there.manifest else None
    quarantine_corrupt(storage, step_name(there.step), identity, reason, rank, reporter)
