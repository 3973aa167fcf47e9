"""NVRx's local checkpoints: each rank's state on its node, with copies on other nodes.

A file counts once its record is there, with its hash; it is checked before it is loaded. Files are
found by what is on the node, whichever rank has written them.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from everstep.evidence.files import read_regular
from trainer_sdk.checkpoint.file_saver import TorchFile
from trainer_sdk.checkpoint.image_folder import put_durably
from trainer_sdk.environment import environ
from trainer_sdk.nvrx.async_calls import AsyncRequest
from trainer_sdk.nvrx.rank_groups import GroupWrapper
from trainer_sdk.nvrx.replication import ReplicationStrategy
from trainer_sdk.nvrx.tensor_state import TensorAwareStateDict
from trainer_sdk.nvrx.written_files import DamagedFileError, FileRecord, check, write
from trainer_sdk.sdk_log import warn

CkptID = tuple[int, int, str]
"""Iteration, the rank whose state it is, and the session."""
_DIGITS = 7
_NONE = -1


class CheckpointingException(Exception):  # noqa: N818 - NVRx's name
    """A local checkpoint cannot be saved or loaded."""


class SameMachineReplicationException(CheckpointingException):
    """For `except` clauses; it is never raised here: names of files in progress differ."""

    def __init__(self, ckpt_id: CkptID) -> None:
        super().__init__(f"the checkpoint {ckpt_id} is on this machine already")


class BaseCheckpointManager(ABC):
    """Which local checkpoint is the newest that all ranks can have; how it is saved and loaded.

    All ranks make each call together.
    """

    def __init__(
        self, session_id: str = "", repl_strategy: ReplicationStrategy | None = None
    ) -> None:
        self.session_id = session_id
        self.repl_strategy = repl_strategy
        self.latest_iteration = _NONE
        self.globally_available_ids: Mapping[int, Sequence[CkptID]] = {}
        self._ranks = GroupWrapper()
        self._damaged: set[CkptID] = set()

    @property
    def rank(self) -> int:
        """The own rank."""
        return self._ranks.my_global_rank

    def _ckpt_id(self, iteration: int) -> CkptID:
        """The id of this rank's state."""
        if iteration < 0:
            raise CheckpointingException(f"iteration must be at least 0, and is {iteration}")
        return iteration, self.rank, self.session_id

    @abstractmethod
    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        """What this rank can read."""

    @abstractmethod
    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        """Read a state; `CheckpointingException` or `OSError` if that is not possible."""

    @abstractmethod
    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> Any:
        """Write a state, or begin to; the result is for `_complete`."""

    def _complete(self, begun: Any, ckpt_id: CkptID) -> None:  # noqa: B027 - as below
        """Wait until it is durable, and make it count: nothing, if `_save` has done it."""

    def _discard(self, ckpt_id: CkptID) -> None:  # noqa: B027 - NVRx asks for no such method
        """Make a damaged state not count for later processes, either."""

    @abstractmethod
    def _cleanup(self, iteration: int) -> None:
        """Remove all that is older than this complete iteration."""

    @abstractmethod
    def _cleanup_failed_save(self, iteration: int) -> None:
        """Remove this iteration, which is not complete."""

    def find_latest(self) -> int:
        """The newest iteration for which all ranks have a state; -1 if there is none."""
        if self.latest_iteration != _NONE:
            return self.latest_iteration
        own = [id_ for id_ in self._my_ckpt_ids() if id_ not in self._damaged]
        if self.repl_strategy is None:  # nobody could send the states of other ranks
            own = [id_ for id_ in own if id_[1] == self.rank]
        gathered = self._ranks.all_gather_object(own)
        self.globally_available_ids = dict(zip(self._ranks.ranks, gathered, strict=True))
        owners: dict[int, set[int]] = {}
        for iteration, owner, _ in (id_ for ids in gathered for id_ in ids):
            owners.setdefault(iteration, set()).add(owner)
        everybody = set(self._ranks.ranks)
        complete = [iteration for iteration, there in owners.items() if there == everybody]
        self.latest_iteration = max(complete, default=_NONE)
        return self.latest_iteration

    def load(self) -> tuple[TensorAwareStateDict, CkptID]:
        """The newest state that all ranks can read, and its id.

        A damaged file is reported, and put aside: a copy of it is used instead, or an older
        iteration. `CheckpointingException` if there is none.
        """
        while self.find_latest() != _NONE:
            id_ = self._ckpt_id(self.latest_iteration)
            state = self._try(id_)
            if state is not None:
                state.restore_tensor_device(non_blocking=False)
                return state, id_
            self.latest_iteration = _NONE
        raise CheckpointingException(
            f"rank {self.rank}: there is no local checkpoint that all ranks can read: restore a "
            "global one"
        )

    def save(
        self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False
    ) -> AsyncRequest | None:
        """Save now, or copy now and return the request that finishes the save."""
        own = self._ckpt_id(iteration)
        if iteration <= self.latest_iteration:
            raise CheckpointingException(
                f"iteration {iteration} is not newer than {self.latest_iteration}, which is there"
            )
        states, ids = [state_dict], [own]
        if self.repl_strategy is not None:
            states, ids = self.repl_strategy.replicate(state_dict, own)
        self.latest_iteration = _NONE
        self._damaged.difference_update(ids)
        failures: list[str] = []
        begun: list[tuple[Any, CkptID]] = []
        try:
            for state, id_ in zip(states, ids, strict=True):
                # A state of the script's own may have no more than this method and a pickle.
                if state is state_dict or any(each.device.type != "cpu" for each in state.tensors):
                    state.copy_tensors_to_cpu(non_blocking=False)
                begun.append((self._save(state, id_), id_))
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
            failures.append(f"{type(error).__name__}: {error}")
        request = AsyncRequest(
            self._finish,
            (begun, failures),
            [lambda: self._validate(iteration, failures)],
            async_fn_kwargs={},
        )
        if is_async:
            return request
        request.execute_sync()
        return None

    def _finish(self, begun: Sequence[tuple[Any, CkptID]], failures: list[str]) -> None:
        try:
            for one, id_ in begun:
                self._complete(one, id_)
        except Exception as error:  # noqa: BLE001 - all ranks raise it together, in `_validate`
            failures.append(f"{type(error).__name__}: {error}")

    def _validate(self, iteration: int, failures: Sequence[str]) -> None:
        """After the save: remove older iterations, or this one if it is not complete."""
        self.latest_iteration = _NONE
        newest = self.find_latest()
        if newest >= iteration:
            self._cleanup(iteration)
            return
        texts = self._ranks.all_gather_object(list(failures))
        self._cleanup_failed_save(iteration)
        self.latest_iteration = _NONE
        reasons = "; ".join(
            f"rank {rank}: {text}"
            for rank, of_rank in zip(self._ranks.ranks, texts, strict=True)
            for text in of_rank
        )
        raise CheckpointingException(
            f"the local checkpoint of iteration {iteration} failed ({reasons or 'a state is gone'}"
            f"); the newest one is of {newest}" + (" (none)" if newest == _NONE else "")
        )

    def _try(self, id_: CkptID) -> TensorAwareStateDict | None:
        """The state, if all ranks can read what they must; else what is damaged is discarded."""
        plan, needed = None, {id_}
        if self.repl_strategy is not None:
            plan = self.repl_strategy.retrieve_plan(self.globally_available_ids, [id_])
            needed = plan.required_ids()
        states: dict[CkptID, TensorAwareStateDict] = {}
        is_damaged = False
        for each in sorted(needed):
            try:
                states[each] = self._load(each)
            except (OSError, DamagedFileError, CheckpointingException) as error:
                warn(f"the local checkpoint {each} cannot be used: {error}", rank=self.rank)
                self._damaged.add(each)
                self._discard(each)
                is_damaged = True
        if self._ranks.highest([is_damaged])[0]:
            return None
        if plan is None or self.repl_strategy is None:
            return states[id_]
        received: dict[CkptID, TensorAwareStateDict] = self.repl_strategy.retrieve_execute(
            plan, states
        )
        return received[id_]


class _LocalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record next to a file: whose it is, and what was written."""

    job: str
    session: str
    iteration: int
    owner: int
    world_size: int
    file: FileRecord


class LocalCheckpointManager(BaseCheckpointManager):
    """Local checkpoints in a folder of each node."""

    def __init__(
        self,
        root_local_ckpt_dir: "str | os.PathLike[str]",
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
    ) -> None:
        super().__init__(session_id, repl_strategy)
        self.root_local_ckpt_dir = root_local_ckpt_dir
        self._session = Path(os.fspath(root_local_ckpt_dir)) / session_id
        self._job = environ.get("EVERSTEP_JOB", "")  # the agent's variable
        self._places: dict[CkptID, tuple[Path, FileRecord]] = {}

    @property
    def local_ckpt_dir(self) -> Path:
        """The folder that this rank writes to."""
        return self._session / str(self.rank)

    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        """All that is on this node, of this job and number of ranks."""
        self._places = {}
        for place, record in self._records():
            path = _file_of(place)
            if record.world_size != self._ranks.world_size or not path.is_file():
                continue
            try:
                foreign = [each for each in (place.parent, place, path) if not _is_own(each)]
            except FileNotFoundError:
                continue  # another rank has just removed it
            if foreign:
                warn(f"{foreign[0]} is not used: it belongs to another user", rank=self.rank)
                continue
            id_ = (record.iteration, record.owner, self.session_id)
            if id_ not in self._places or path.parent == self.local_ckpt_dir:
                self._places[id_] = path, record.file
        return sorted(self._places)

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        if ckpt_id not in self._places:
            raise FileNotFoundError(f"{ckpt_id} is not on this node")
        path, record = self._places[ckpt_id]
        check(path, record)
        # This user has written the file, and its hash has just been checked.
        state: TensorAwareStateDict = torch.load(path, map_location="cpu", weights_only=False)
        return state

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> Any:
        self.local_ckpt_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return write(TorchFile(state_dict), self._local_ckpt_path_from_id(ckpt_id))

    def _local_ckpt_path_from_id(self, ckpt_id: CkptID) -> Path:
        iteration, owner, _ = ckpt_id
        return self.local_ckpt_dir / f"iter_{iteration:0{_DIGITS}d}_{owner}_local.pt"

    def _complete(self, begun: Any, ckpt_id: CkptID) -> None:
        iteration, owner, session = ckpt_id
        record = _LocalRecord(
            job=self._job,
            session=session,
            iteration=iteration,
            owner=owner,
            world_size=self._ranks.world_size,
            file=begun.record(),
        )
        put_durably(_record_of(Path(begun.path)), msgspec.json.encode(record))

    def _discard(self, ckpt_id: CkptID) -> None:
        if ckpt_id in self._places:
            with suppress(OSError):
                path = self._places[ckpt_id][0]
                _record_of(path).rename(_record_of(path).with_suffix(".damaged"))

    def _cleanup(self, iteration: int) -> None:
        self._remove(lambda of_file: of_file < iteration)

    def _cleanup_failed_save(self, iteration: int) -> None:
        self._remove(lambda of_file: of_file == iteration)

    def _remove(self, is_unwanted: Any) -> None:
        """Remove files, also of ranks that are on other nodes now; the record first."""
        for place, record in self._records():
            if is_unwanted(record.iteration):
                for path in (place, _file_of(place)):
                    with suppress(OSError):
                        path.unlink()

    def _records(self) -> Iterable[tuple[Path, _LocalRecord]]:
        """The records on this node, of this session and job."""
        for place in sorted(self._session.glob("*/iter_*_local.json")):
            with suppress(OSError, msgspec.DecodeError):
                record = msgspec.json.decode(read_regular(place), type=_LocalRecord)
                if (record.session, record.job) == (self.session_id, self._job):
                    yield place, record


def _is_own(path: Path) -> bool:
    """Whether nobody else can have put it there: a state of the script's own is code."""
    return path.lstat().st_uid == os.geteuid()


def _record_of(path: Path) -> Path:
    return path.with_suffix(".json")


def _file_of(record: Path) -> Path:
    return record.with_suffix(".pt")
