"""Ranks agree on a state to load: a state that all ranks have, and that each has verified.

All ranks run this at the same time, and make each call to the group together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from everstep.hashing import hash_of
from trainer_sdk.checkpoint.commits import committed_step
from trainer_sdk.checkpoint.events import Reporter
from trainer_sdk.checkpoint.flat_state import StatePiece, plain
from trainer_sdk.checkpoint.manifest import Identity, step_name, step_of
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.restore.choice import (
    GLOBAL,
    MEMORY,
    JobPast,
    RejectedState,
    RestoreChoice,
    Sight,
    StateOffer,
    StateOffers,
    choose,
    missing,
)
from trainer_sdk.checkpoint.restore.discovery import (
    Forms,
    RestoreContext,
    VerifiedImages,
    lost_images,
    published_steps,
    see_images,
    see_published,
    wait_for_agent,
)
from trainer_sdk.checkpoint.restore.errors import CorruptError, UnfitError
from trainer_sdk.checkpoint.restore.quarantine import quarantine_corrupt
from trainer_sdk.checkpoint.restore.stored_image import StoredImage
from trainer_sdk.checkpoint.restore.stored_shards import StoredShards
from trainer_sdk.checkpoint.restore.target import Target
from trainer_sdk.checkpoint.save.plan import layout_of
from trainer_sdk.checkpoint.storage import StorageError
from trainer_sdk.checkpoint.storage.checkpoints import owner_of

StateSource = StoredImage | StoredShards
_PAGE = 8
"""The number of steps of the global tier that are read together."""

_NAMED = 8


class _Unfit(msgspec.Struct, frozen=True):
    offer: StateOffer
    reason: str
    is_corrupt: bool


@dataclass(eq=False, repr=False)
class Agreement:
    """A rank's part in the agreement."""

    _context: RestoreContext
    _group: RankGroup
    _reporter: Reporter
    _step: int | None
    _early: VerifiedImages | None
    _before: int | None = None

    def __post_init__(self) -> None:
        self._names: list[str] = []
        self._steps: set[int] = set()
        self._forms: dict[Identity, Forms] = {}
        """The forms in this rank's images."""
        self._sources: dict[StateOffer, StateSource] = {}
        self.passed: list[RejectedState] = []
        """Rejected states, in the order of discovery; the same on all ranks."""
        self.failed_at: set[int] = set()
        """Steps whose loss was not finite after other loads."""
        self.last_round = 0
        """The latest round that has saved a state which any rank has seen."""
        self.unsure = ""
        """Why other nodes may have states in memory that cannot be fetched."""
        self.past = JobPast()
        """The past of the job, when the newest checkpoint was saved."""

    @property
    def keys(self) -> frozenset[str]:
        """The keys in this rank's images."""
        return frozenset(key for forms in self._forms.values() for key in forms)

    def look(self) -> StateOffers:
        """All offers of all ranks."""
        sights = self._group.gather(self._own_sight(), Sight)
        for sight in sights:
            rounds = (
                each.round for each in (*(of.identity for of in sight.offers), *sight.suspect)
            )
            self.last_round = max(self.last_round, *rounds, 0)
            # Ranks of the same node report the same losses of its memory.
            self.passed += [each for each in sight.passed if each not in self.passed]
            self.failed_at |= set(sight.failed_at)
            self.past = max(self.past, sight.past)
            self.unsure = self.unsure or sight.unsure
        self.passed += _vanished(sights)
        return StateOffers.of(sights, self._step, self._before)

    def newest(self, field: StateOffers) -> RestoreChoice | None:
        """The newest state that every rank seems to have; its data are not read."""
        return self._chosen(field)[1]

    def _chosen(self, field: StateOffers) -> tuple[StateOffers, RestoreChoice | None]:
        choice = choose(field)
        while choice is None and (older := self._older()):
            field = field.with_published(older)
            choice = choose(field)
        return field, choice

    def agree(self, field: StateOffers, target: Target) -> RestoreChoice | None:
        """The newest state that all ranks have verified and that fits the live state; else None."""
        target.of_all = self._keys_of_all(target)
        field = self._of_this_layout(field, target)
        return self.agree_by(field, lambda source: source.fit(target))

    def agree_by(
        self, field: StateOffers, check: Callable[[StateSource], None]
    ) -> RestoreChoice | None:
        """The newest state that all ranks have verified and that passes `check` on each."""
        while True:
            field, choice = self._chosen(field)
            rejected_steps = {rejected.step for rejected in self.passed}
            self.passed += [
                rejected
                for rejected in missing(field, choice)
                if rejected.step not in rejected_steps
            ]
            if choice is None:
                return None
            verdicts = self._group.gather(self._judge(choice, check), tuple[_Unfit, ...])
            unfit = [
                (rank, unfit_offer) for rank, each in enumerate(verdicts) for unfit_offer in each
            ]
            if not unfit:
                return choice
            self._pass_over(unfit)
            field = field.without([(rank, unfit_offer.offer) for rank, unfit_offer in unfit])

    def newer(self, step: int) -> list[int]:
        """The later steps that this rank has seen."""
        return sorted(later for later in self._steps if later > step)

    def others(self) -> str:
        """The steps that this rank has seen, in words."""
        newest = sorted(self._steps, reverse=True)[:_NAMED]
        return f"there are {', '.join(map(str, newest))}" if newest else "there are no others"

    def source(self, offer: StateOffer) -> StateSource:
        """The verified state of an offer; in the global tier each rank verifies its share."""
        source = self._sources.get(offer)
        if source is not None:
            return source
        if offer.tier != GLOBAL:
            return self._sources.setdefault(offer, self._image(offer))
        assert self._context.storage is not None
        shards = StoredShards(self._context.storage, offer.place, offer.identity)
        shards.verify(self._group.rank, self._group.size)
        return self._sources.setdefault(offer, shards)

    def _image(self, offer: StateOffer) -> StoredImage:
        image = None if self._early is None else self._early.image(offer)
        if image is None:
            image = StoredImage(offer.place, offer.identity)
            image.verify()
        return image

    def _pass_over(self, unfit: Sequence[tuple[int, _Unfit]]) -> None:
        """Reject these offers; a damaged file is reported once, by the first rank that found it."""
        reported = set()
        for rank, unfit_offer in sorted(unfit, key=lambda each: not each[1].is_corrupt):
            if unfit_offer.offer in reported:
                continue
            identity, tier, path = unfit_offer.offer.identity, unfit_offer.offer.tier, ""
            is_corrupt = unfit_offer.is_corrupt and tier == GLOBAL
            if tier == GLOBAL:
                reported.add(unfit_offer.offer)
                path = self._path(unfit_offer.offer.place)
            if is_corrupt and rank == self._group.rank:
                self._quarantine(unfit_offer.offer.place, identity, unfit_offer.reason)
            self.passed.append(
                RejectedState(
                    step=identity.step,
                    tier=tier,
                    rank=rank,
                    reason=unfit_offer.reason,
                    path=path,
                    is_corrupt=is_corrupt,
                )
            )

    def _quarantine(self, name: str, identity: Identity | None, reason: str) -> None:
        assert self._context.storage is not None
        quarantine_corrupt(
            self._context.storage, name, identity, reason, self._group.rank, self._reporter
        )

    def _path(self, name: str) -> str:
        assert self._context.storage is not None
        return f"{self._context.storage.url}/{name}"

    def close(self) -> None:
        """Close all files."""
        if self._early is not None:
            self._early.close()
        for source in self._sources.values():
            source.close()

    def _own_sight(self) -> Sight:
        late = wait_for_agent(self._context)
        try:
            sight, self._forms = see_images(self._context)
        except Exception as error:  # noqa: BLE001 - the other ranks must receive any error
            sight = Sight().with_passed(0, MEMORY, self._group.rank, _text_of(error))
        self._steps |= {offer.identity.step for offer in sight.offers}
        if not sight.offers:
            sight = sight.with_more(lost_images(self._context))
        storage = self._context.storage
        committed = None if storage is None else committed_step(storage.url)
        return sight.with_more(Sight(unsure=late, committed=committed)).with_more(self._published())

    def _published(self) -> Sight:
        """The sight of rank 0, for all ranks: thousands of listings would load the storage."""
        if self._context.storage is None or self._group.rank:
            return Sight()
        try:
            names = published_steps(self._context.storage)
            is_vacant = not names and owner_of(self._context.storage) is None
        except Exception as error:  # noqa: BLE001 - as above
            return Sight().with_passed(0, GLOBAL, 0, _text_of(error))
        self._steps |= {step for name in names if (step := step_of(name)) is not None}
        self._names = [name for name in names if self._may_have(step_of(name) or 0)]
        return self._next_page().with_more(Sight(is_vacant=is_vacant))

    def _may_have(self, step: int) -> bool:
        return self._step in (None, step) and (self._before is None or step < self._before)

    def _next_page(self) -> Sight:
        page, self._names = self._names[:_PAGE], self._names[_PAGE:]
        if self._context.storage is None or not page:
            return Sight()
        try:
            seen = see_published(self._context.storage, self._context.job, page)
        except Exception as error:  # noqa: BLE001 - as above
            return Sight().with_passed(step_of(page[0]) or 0, GLOBAL, 0, _text_of(error))
        for rejected in seen.passed:
            if rejected.is_corrupt:
                self._quarantine(step_name(rejected.step), None, rejected.reason)
        return seen

    def _older(self) -> tuple[StateOffer, ...]:
        """The next older offers of the global tier; none if all were read."""
        while True:
            page = self._group.follow(self._next_page(), Sight)
            self.passed += page.passed
            if page.offers or not page.passed:
                return page.offers

    def _keys_of_all(self, target: Target) -> frozenset[str]:
        """The keys of all ranks' states; ranks send their keys only if the hashes differ."""
        own = sorted(map(plain, target.values))
        hashes = self._group.gather(hash_of(msgspec.json.encode(own)), str)
        if len(set(hashes)) == 1:
            return frozenset(own)
        return frozenset(key for each in self._group.gather(own, list[str]) for key in each)

    def _of_this_layout(self, field: StateOffers, target: Target) -> StateOffers:
        """The offers without images of other layouts: an image is a rank's whole state."""
        if not any(field.images):
            return field
        if not any(self._group.gather(target.is_open, bool)):
            told = self._group.gather(target.pieces, tuple[StatePiece, ...])
            field, passed = field.of_layout(layout_of(told))
            self.passed += passed
            return field
        for identity in list(field.newest_first()):
            target.begin_with(self._forms.get(identity, {}))
            told = self._group.gather(target.pieces, tuple[StatePiece, ...])
            if layout_of(told) != identity.layout:
                field, passed = field.without_images_of(identity)
                self.passed += passed
        return field

    def _judge(
        self, choice: RestoreChoice, check: Callable[[StateSource], None]
    ) -> tuple[_Unfit, ...]:
        own = choice.offers[self._group.rank]
        unfit = []
        for offer in dict.fromkeys((own, *choice.published)):
            try:
                source = self.source(offer)
                if offer == own:
                    check(source)
            except Exception as error:  # noqa: BLE001 - as above
                unfit.append(_Unfit(offer, _text_of(error), isinstance(error, CorruptError)))
        return tuple(unfit)


def _vanished(sights: Sequence[Sight]) -> list[RejectedState]:
    """The checkpoint that was committed in the global tier, where nothing is any more."""
    steps = [sight.committed for sight in sights if sight.committed is not None]
    if not steps or not any(sight.is_vacant for sight in sights):
        return []
    reason = "it was committed there before, and now nothing is there: was it unmounted or emptied?"
    return [RejectedState(step=max(steps), tier=GLOBAL, reason=reason)]


def _text_of(error: Exception) -> str:
    """The text of an error, with its class unless it is an error of ours."""
    if isinstance(error, (UnfitError, StorageError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
