"""`DcpReader`: loads of `torch.distributed.checkpoint` from verified checkpoints."""

import io
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainer_sdk.checkpoint.events import Reporter
from trainer_sdk.checkpoint.manifest import step_name
from trainer_sdk.checkpoint.rank_group import group_of_all
from trainer_sdk.checkpoint.restore.errors import CorruptError, RestoreError, UnfitError
from trainer_sdk.checkpoint.restore.quarantine import quarantine_corrupt
from trainer_sdk.checkpoint.restore.restorer import note_round
from trainer_sdk.checkpoint.restore.stored_shards import StoredShards
from trainer_sdk.checkpoint.restore.target import fill
from trainer_sdk.checkpoint.restore.values import read_value
from trainer_sdk.checkpoint.storage import Storage, storage_for
from trainer_sdk.checkpoint.storage.checkpoints import StoredCheckpoint, look, stored_checkpoints
from trainer_sdk.environment import environ
from trainer_sdk.integrations.dcp.checkpoint_id import split
from trainer_sdk.rank_session import session

_MOST_NAMED = 4


class DcpReader(StorageReader):
    """A `StorageReader`: `dcp.load(state, checkpoint_id="/ckpt/step-100", storage_reader=…)`.

    Without a step in `checkpoint_id`, the newest checkpoint of that root is loaded that is not
    quarantined. Each rank verifies the hash of every file that it reads, before it reads a tensor;
    a damaged checkpoint is quarantined, and the load raises on all ranks.
    """

    def __init__(self, checkpoint_id: "str | os.PathLike[str]" = "") -> None:
        super().__init__()
        self._root, self._step = "", None
        self._rank = 0
        self._shards: StoredShards | None = None
        self._checkpoint: StoredCheckpoint | None = None
        self.checkpoint_id: str | os.PathLike[str] = checkpoint_id
        if checkpoint_id:
            self.reset(checkpoint_id)

    _step: int | None

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        """Begin a load of this checkpoint."""
        if checkpoint_id is not None:
            self._root, self._step = split(checkpoint_id)
            self.checkpoint_id = checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Choose the checkpoint; returns torch's metadata, verified."""
        del args, kwargs
        if not self._root:
            raise ValueError("there is no checkpoint_id: give it to dcp.load, or to DcpReader")
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
        self._rank = kwargs.get("rank", 0 if is_coordinator else 1)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave torch's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave torch's plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verify the files that have these items, and load the items."""
        assert self._shards is not None
        with session().section("dcp load", "checkpoint"):
            try:
                self._shards.verify_for(plan.items)
                for item, octets in self._shards.read(plan.items):
                    self._load(item, octets, planner)
            except CorruptError as error:
                self._quarantine(error)
                raise RestoreError(str(error)) from error
            except UnfitError as error:
                raise RestoreError(str(error)) from error
        self._note_restored()
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

    def _load(self, item: ReadItem, octets: memoryview, planner: LoadPlanner) -> None:
        assert self._shards is not None
        if item.type is LoadItemType.BYTE_IO:
            value = bytes(octets)
            read_value(value, item.dest_index.fqn)  # torch's planner would run what is in it
            planner.load_bytes(item, io.BytesIO(value))
            return
        target = planner.resolve_tensor(item).detach()
        part = self._shards.part(item, octets)
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

    def _note_restored(self) -> None:
        """Have later saves of this launch count as a later round; where no agent counts rounds."""
        assert self._checkpoint is not None
        assert self._checkpoint.manifest is not None
        note_round(self._root, self._checkpoint.manifest.identity.round + 1)


def newest_verified(root: "str | os.PathLike[str]") -> int | None:
    """The newest step of a root whose files all ranks have verified; None if there is none.

    All ranks call it together; each verifies a share of the files. Damaged checkpoints are
    quarantined. `RestoreError` if there are checkpoints, and none can be used.
    """
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
