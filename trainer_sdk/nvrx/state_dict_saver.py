"""NVRx's three steps of an asynchronous save in the format of torch.distributed.checkpoint."""

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from trainer_sdk.nvrx.filesystem_async import FileSystemWriterAsync
from trainer_sdk.nvrx.rank_groups import GroupWrapper

Planned = tuple[FileSystemWriterAsync, Metadata | None, _DistWrapper]


class CheckpointMetadataCache:
    """The plans of the last save, for a save of the same structure: no plan is exchanged then.

    Each save compares its own plan with the last one, and all ranks agree by one number.
    """

    def __init__(self) -> None:
        self.cached_central_plan: SavePlan | None = None
        self.cached_local_plan: SavePlan | None = None
        self.cached_global_metadata: Metadata | None = None
        self.loaded_all_plans: list[SavePlan] | None = None
        self.validated_cache_reuse = False
        """Whether the last save has used the plans of the save before."""
        self.validated_loaded_metadata_reuse = False
        """Whether the last save has used the metadata of the checkpoint that was loaded."""

    def set_cached_global_metadata(self, cached_global_metadata: Metadata) -> None:
        """Take the metadata of a checkpoint that was loaded."""
        self.cached_global_metadata = cached_global_metadata
        self.loaded_all_plans = getattr(cached_global_metadata, "all_local_plans", None)

    def get_cache_metadata(
        self,
    ) -> tuple[SavePlan | None, SavePlan | None, bool, list[SavePlan] | None]:
        """The central plan, the local one, whether the last save has used them, loaded plans."""
        return (
            self.cached_central_plan,
            self.cached_local_plan,
            self.validated_cache_reuse,
            self.loaded_all_plans,
        )

    def set_cache_metadata(
        self, central_plan: SavePlan, local_plan: SavePlan, global_md_verify_reuse: bool
    ) -> None:
        """Keep the plans of a save."""
        self.validated_loaded_metadata_reuse = global_md_verify_reuse
        self.cached_central_plan, self.cached_local_plan = central_plan, local_plan

    def has_plan_of(self, local_plan: SavePlan | None) -> bool:
        """Whether the last save had this local plan."""
        return local_plan is not None and self.cached_local_plan == local_plan

    def has_loaded_plan_of(self, local_plan: SavePlan | None, rank: int, size: int) -> bool:
        """Whether the loaded checkpoint had this local plan, but for its place."""
        plans = self.loaded_all_plans
        if local_plan is None or plans is None or len(plans) != size:
            return False
        names = [each.name for each in fields(local_plan) if each.name != "storage_data"]
        return all(getattr(local_plan, name) == getattr(plans[rank], name) for name in names)


_checkpoint_metadata_cache: CheckpointMetadataCache | None = None


def init_checkpoint_metadata_cache(cached_global_metadata: Metadata | None = None) -> None:
    """Make the cache of saves that are given none."""
    global _checkpoint_metadata_cache  # noqa: PLW0603 - NVRx's interface
    _checkpoint_metadata_cache = CheckpointMetadataCache()
    if cached_global_metadata is not None:
        _checkpoint_metadata_cache.set_cached_global_metadata(cached_global_metadata)


def save_state_dict_async_plan(  # noqa: PLR0913 - NVRx's arguments
    state_dict: Mapping[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: "dist.ProcessGroup | None" = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
) -> Planned:
    """Plan the save on all ranks; the result is for `save_state_dict_async_finalize`."""
    cache = (metadata_cache or _checkpoint_metadata_cache) if enable_cache else None
    wrapper = _DistWrapper(process_group, dist.is_initialized(), coordinator_rank)
    planning = _Planning(wrapper, storage_writer, planner or DefaultSavePlanner(), cache)
    central, metadata = planning.plan(state_dict)
    storage_writer.prepare_write_data(planning.planner.finish_plan(central), planning.planner)
    return storage_writer, metadata, wrapper


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync,
    global_metadata: Metadata | None,
    dist_wrapper: _DistWrapper,
) -> None:
    """Write the metadata, which makes the checkpoint complete; all ranks call it together.

    Raises `CheckpointException` on all ranks if one could not write its files.
    """
    gathered = dist_wrapper.gather_object(storage_writer.retrieve_write_results())
    failures: dict[int, Any] = {}
    if dist_wrapper.is_coordinator:
        assert gathered is not None, "the coordinator has the results of all ranks"
        failures = {
            rank: result for rank, result in enumerate(gathered) if isinstance(result, tuple)
        }
        if not failures:
            try:
                assert global_metadata is not None, "the coordinator has planned the metadata"
                results = [result for result in gathered if isinstance(result, list)]
                storage_writer.finish(global_metadata, results)
            except Exception as error:  # noqa: BLE001 - every rank must hear of it
                failures[dist_wrapper.coordinator_rank] = _wrap_exception(error)
    failures = dist_wrapper.broadcast_object(failures)
    if failures:
        raise CheckpointException("write", failures)


class _Planning:
    """One planning of a save."""

    def __init__(
        self,
        wrapper: _DistWrapper,
        writer: FileSystemWriterAsync,
        planner: SavePlanner,
        cache: CheckpointMetadataCache | None,
    ) -> None:
        self.planner = planner
        self._wrapper = wrapper
        self._writer = writer
        self._cache = cache
        self._is_decentral = getattr(
            planner, "can_run_decentralized_global_plan", False
        ) and getattr(writer, "can_run_decentralized_global_plan", False)

    def plan(self, state: Mapping[str, Any]) -> tuple[SavePlan, Metadata | None]:
        """The rank's part of the global plan; and the metadata, on the coordinator."""
        local: SavePlan | None = None
        error: Exception | None = None
        try:
            local = self._local_plan(state)
        except Exception as failed:  # noqa: BLE001 - the other ranks wait for this one
            error = failed
        is_same, is_loaded = self._compare(local, error)
        assert local is not None, "all ranks have a local plan"
        cache, metadata = self._cache, None
        if cache is not None and is_same and cache.cached_central_plan is not None:
            central, metadata = cache.cached_central_plan, cache.cached_global_metadata
        elif cache is not None and is_loaded and self._is_decentral:
            central, metadata = self._own_part(local), cache.cached_global_metadata
        elif self._is_decentral:
            metadata = self._gathered(local)
            central = self._own_part(local)
        else:
            central, metadata = self._scattered(local)
        if cache is not None:
            cache.set_cache_metadata(central, local, is_loaded)
            cache.validated_cache_reuse = is_same
            cache.cached_global_metadata = metadata
        # The end of the save writes the places of values into it.
        return central, copy.copy(metadata) if self._wrapper.is_coordinator else None

    def _local_plan(self, state: Mapping[str, Any]) -> SavePlan:
        is_coordinator = self._wrapper.is_coordinator
        self.planner.set_up_planner(dict(state), is_coordinator=is_coordinator)
        self._writer.set_up_storage_writer(is_coordinator)
        return self._writer.prepare_local_plan(self.planner.create_local_plan())

    def _compare(self, local: SavePlan | None, error: Exception | None) -> tuple[bool, bool]:
        """Whether all ranks have the plan of the last save, or of the loaded checkpoint."""
        cache, wrapper = self._cache, self._wrapper
        group = GroupWrapper(wrapper.group)
        rank, size = wrapper.get_rank(), wrapper.get_world_size()
        differs = cache is None or not cache.has_plan_of(local)
        is_new = cache is None or not cache.has_loaded_plan_of(local, rank, size)
        has_failed, differs_anywhere, is_new_anywhere = group.highest(
            [error is not None, differs, is_new]
        )
        if has_failed:
            texts = group.all_gather_object(None if error is None else f"{error!r}")
            raise CheckpointException(
                "plan",
                {
                    rank: _wrap_exception(error if error and rank == wrapper.get_rank()
                                          else RuntimeError(text))
                    for rank, text in enumerate(texts)
                    if text
                },
            ) from error  # fmt: skip
        return not differs_anywhere, not is_new_anywhere

    def _own_part(self, local: SavePlan) -> SavePlan:
        planner: Any = self.planner
        part: SavePlan = planner.create_decentralized_global_plan(local)
        return self._writer.prepare_decentralized_global_plan(part)

    def _gathered(self, local: SavePlan) -> Metadata | None:
        plans = self._wrapper.gather_object(local)
        if plans is None:
            return None
        _, metadata = self.planner.create_global_plan(plans)
        metadata.all_local_plans = plans  # type: ignore[attr-defined]
        return metadata

    def _scattered(self, local: SavePlan) -> tuple[SavePlan, Metadata | None]:
        planned: list[Metadata] = []

        def globally(plans: list[SavePlan]) -> list[SavePlan]:
            merged, metadata = self.planner.create_global_plan(plans)
            metadata.all_local_plans = plans  # type: ignore[attr-defined]
            planned.append(metadata)
            return list(self._writer.prepare_global_plan(merged))

        central: SavePlan = self._wrapper.reduce_scatter("plan", lambda: local, globally)
        return central, planned[0] if planned else None
