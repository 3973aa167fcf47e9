"""NVRx's strategies for copies of local checkpoints on other ranks."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from trainer_sdk.environment import environ
from trainer_sdk.nvrx.rank_groups import (
    ExchangePlan,
    GroupWrapper,
    ProcessGroupLike,
    parse_group_sequence,
)
from trainer_sdk.nvrx.tensor_state import TensorAwareStateDict

EagerT = TypeVar("EagerT", bound="ReplicationStrategy")


class NoReplicasAvailableError(Exception):
    """No rank of the group has a copy."""


class ReplicationStrategy(ABC):
    """Gives copies to other ranks, and gets them back."""

    @abstractmethod
    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: Any
    ) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """The states that this rank shall keep, its own among them, and their ids."""

    @abstractmethod
    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Sequence[Any]], wanted: Sequence[Any]
    ) -> ExchangePlan:
        """Which rank sends what, so that each has what it wants."""

    @abstractmethod
    def retrieve_execute(self, *args: Any, **kwargs: Any) -> Any:
        """Carry out such a plan."""


class CliqueReplicationStrategy(ReplicationStrategy):
    """Each rank of a group keeps the states of all its ranks."""

    def __init__(self, local_group: ProcessGroupLike, target_device: Any = "cpu") -> None:
        self.local_group = GroupWrapper.wrap(local_group)
        self.target_device = target_device

    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: Any
    ) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """The states of all ranks of the group; `local_ckpt` is hollow then."""
        tensors = list(local_ckpt.pop_tensors())
        gathered = self.local_group.all_gather_object((id_, local_ckpt))
        batches = self.local_group.all_gather_batch(tensors, target_device=self.target_device)
        for (_, state), batch in zip(gathered, batches, strict=True):
            state.insert_tensors(batch)
        return [state for _, state in gathered], [its_id for its_id, _ in gathered]

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Sequence[Any]], wanted: Sequence[Any]
    ) -> ExchangePlan:
        """A rank that has a state keeps it; others get it from the holder that sends the least."""
        plan = ExchangePlan(self.local_group)
        ranks = self.local_group.ranks
        sends = dict.fromkeys(ranks, 0)
        all_wanted = self.local_group.all_gather_object(list(wanted))
        for receiver, of_rank in zip(ranks, all_wanted, strict=True):
            for id_ in of_rank:
                holders = [rank for rank in ranks if id_ in globally_available_ids[rank]]
                if not holders:
                    raise NoReplicasAvailableError(
                        f"no rank of {list(ranks)} has {id_}: restore a global checkpoint"
                    )
                if receiver in holders:
                    sender = receiver
                else:
                    sender = min(holders, key=lambda rank: (sends[rank], rank))
                    sends[sender] += 1
                plan.plan(sender, receiver, id_)
        return plan

    def retrieve_execute(
        self, exchange_plan: ExchangePlan, my_data: Mapping[Any, TensorAwareStateDict]
    ) -> dict[Any, TensorAwareStateDict]:
        """The states that this rank has received, or kept."""
        return self.local_group.execute_plan(exchange_plan, my_data)

    @classmethod
    def from_replication_params(
        cls, replication_jump: int | None = None, replication_factor: int = 2
    ) -> "CliqueReplicationStrategy":
        """The groups of all ranks, made by all ranks together.

        `replication_jump` is the number of ranks that fail together; by default the number of
        devices of a node, or of its ranks where there is none.
        """
        jump = _ranks_of_node() if replication_jump is None else replication_jump
        sequence = parse_group_sequence(jump, replication_factor, dist.get_world_size())
        groups = [dist.new_group(list(ranks)) for ranks in sequence]
        return cls(GroupWrapper.from_list_of_groups(groups), target_device="cpu")


class LazyReplicationStrategyBuilder(ReplicationStrategy, Generic[EagerT]):
    """Makes its strategy at the first use, when the process groups can be made."""

    def __init__(self) -> None:
        self._strategy: EagerT | None = None

    @property
    def replication_strategy(self) -> EagerT:
        """The strategy."""
        if self._strategy is None:
            self._strategy = self._eager_build()
        return self._strategy

    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: Any
    ) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """As the strategy does."""
        return self.replication_strategy.replicate(local_ckpt, id_)

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Sequence[Any]], wanted: Sequence[Any]
    ) -> ExchangePlan:
        """As the strategy does."""
        return self.replication_strategy.retrieve_plan(globally_available_ids, wanted)

    def retrieve_execute(self, *args: Any, **kwargs: Any) -> Any:
        """As the strategy does."""
        return self.replication_strategy.retrieve_execute(*args, **kwargs)

    @abstractmethod
    def _eager_build(self) -> EagerT:
        """Make the strategy."""


class LazyCliqueReplicationStrategy(LazyReplicationStrategyBuilder[CliqueReplicationStrategy]):
    """A `CliqueReplicationStrategy` that makes its groups at the first use."""

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2) -> None:
        super().__init__()
        self._build = functools.partial(
            CliqueReplicationStrategy.from_replication_params, replication_jump, replication_factor
        )

    def _eager_build(self) -> CliqueReplicationStrategy:
        return self._build()


def _ranks_of_node() -> int:

    text = environ.get("LOCAL_WORLD_SIZE", "")  # the launcher's variable
    return torch.cuda.device_count() or (int(text) if text.isdecimal() else 1)
