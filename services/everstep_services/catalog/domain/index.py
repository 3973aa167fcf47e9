"""The index of a job: its checkpoints, and who holds its states in memory."""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from everstep.messages import CheckpointsDocument, Fact, Holding, KnownCheckpoint

_CHECKPOINTS_MOST = 1000
"""The document must fit into one message. Beyond this, the oldest unpinned ones are dropped."""
_IN_MEMORY_MOST = 2

Key = tuple[str, str, int]
"""Tier, path and step."""
Change = Callable[[KnownCheckpoint], KnownCheckpoint]


class Index:
    """One job. A caller that changes it writes its document, or drops both."""

    def __init__(self, job: str, document: CheckpointsDocument) -> None:
        self.job = job
        self.known: dict[Key, KnownCheckpoint] = {
            _key(checkpoint): checkpoint for checkpoint in document.checkpoints
        }
        self.holdings: dict[tuple[int, str, int], Holding] = {
            (holding.slot, holding.holder, holding.part): holding for holding in document.holdings
        }
        self.roots = set(document.roots)
        self.round, self.slots = document.round, document.slots
        self.world_size = document.world_size
        self.restored_step = document.restored_step
        self.unjudged = {result.case: result for result in document.unjudged}
        self.degraded_at = document.degraded_at
        self.survivable_losses = document.survivable_losses
        self.facts: list[Fact] = []
        """The facts that were decided since the index was made."""

    def document(self, stream: str, sequence: int, outbox: tuple[str, ...]) -> CheckpointsDocument:
        """The document to write, with its position in the stream of facts."""
        return CheckpointsDocument(
            checkpoints=tuple(sorted(self.known.values(), key=_order)),
            holdings=tuple(sorted(self.holdings.values(), key=_place)),
            roots=tuple(sorted(self.roots)),
            round=self.round,
            slots=self.slots,
            world_size=self.world_size,
            restored_step=self.restored_step,
            unjudged=tuple(self.unjudged.values()),
            degraded_at=self.degraded_at,
            survivable_losses=self.survivable_losses,
            stream=stream,
            sequence=sequence,
            outbox=outbox,
        )

    @property
    def is_blank(self) -> bool:
        """The catalog knows no checkpoint of the job."""
        return not (self.known or self.holdings or self.roots)

    @property
    def uses_replicas(self) -> bool:
        """The state of a slot is, or was, on more than one node."""
        holders: dict[int, str] = {}
        return any(
            holders.setdefault(holding.slot, holding.holder) != holding.holder
            for holding in self.holdings.values()
        )

    def of_step(self, step: int, tier: str, path: str = "") -> list[KnownCheckpoint]:
        """The checkpoints of a step in a tier; only that at `path`, if it is given."""
        return [
            checkpoint
            for checkpoint in self.known.values()
            if (checkpoint.step, checkpoint.tier) == (step, tier)
            and (not path or checkpoint.path == path)
        ]

    def put(self, checkpoint: KnownCheckpoint) -> None:
        """Keep the state of a checkpoint."""
        self.known[_key(checkpoint)] = checkpoint
        if checkpoint.tier == "global" and "/" in checkpoint.path:
            self.roots.add(checkpoint.path.rpartition("/")[0])
        self._forget_oldest(checkpoint.tier)

    def change(self, step: int, tier: str, path: str, how: Change) -> None:
        """Apply `how` to each checkpoint of a step and tier; only to that at `path`, if given."""
        for checkpoint in self.of_step(step, tier, path):
            self.known[_key(checkpoint)] = how(checkpoint)

    def suspect(self) -> None:
        """Mark the checkpoints that were saved since an unjudged result began to show."""
        for key, checkpoint in self.known.items():
            since = (it for it in self.unjudged.values() if it.moved_at <= checkpoint.step)
            why = next((it.reason for it in since), "")
            if checkpoint.suspected_for != why:
                self.known[key] = replace(checkpoint, suspected_for=why)

    def drop(self, checkpoint: KnownCheckpoint) -> None:
        """Forget a checkpoint."""
        self.known.pop(_key(checkpoint), None)

    def hold(self, holding: Holding) -> None:
        """Note that a node holds a state."""
        self.holdings[(holding.slot, holding.holder, holding.part)] = holding

    def let_go(self, which: Callable[[Holding], bool]) -> list[Holding]:
        """Forget the holdings for which `which` is true, and return them."""
        gone = [key for key, holding in self.holdings.items() if which(holding)]
        return [self.holdings.pop(key) for key in gone]

    def _forget_oldest(self, tier: str) -> None:
        most = _CHECKPOINTS_MOST if tier == "global" else _IN_MEMORY_MOST
        of_tier = sorted(
            (checkpoint for checkpoint in self.known.values() if checkpoint.tier == tier),
            key=_order,
        )
        loose = [checkpoint for checkpoint in of_tier if not checkpoint.pinned_by]
        for checkpoint in loose[: max(len(of_tier) - most, 0)]:
            self.drop(checkpoint)


def newest_first(checkpoints: Iterable[KnownCheckpoint]) -> list[KnownCheckpoint]:
    """The checkpoints in the order in which people want to see them."""
    return sorted(checkpoints, key=_order, reverse=True)


def not_committed(checkpoint: KnownCheckpoint) -> str:
    """Why a checkpoint is not the one that was committed; empty if it is."""
    if checkpoint.is_as_committed:
        return ""
    return (
        f"the manifest of {checkpoint.path} is not the one that was committed: its xxh3-128 is "
        f"{checkpoint.manifest_hash}, and {checkpoint.committed_hash} was committed"
    )


def _key(checkpoint: KnownCheckpoint) -> Key:
    return checkpoint.tier, checkpoint.path, checkpoint.step


def _order(checkpoint: KnownCheckpoint) -> tuple[int, str, str]:
    return checkpoint.step, checkpoint.tier, checkpoint.path


def _place(holding: Holding) -> tuple[int, str, int]:
    return holding.slot, holding.holder, holding.part
