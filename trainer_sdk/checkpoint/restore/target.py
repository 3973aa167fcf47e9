"""The live state that a checkpoint is loaded into: tensors by key, as torch flattens them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from trainer_sdk.checkpoint.flat_state import FlatState, StatePiece, plain, read_form
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.optimizer_state import (
    Form,
    give_state,
    is_blank,
    keys_in,
    leaves,
    load_state,
    state_like,
)

LiveState = MutableMapping[str, Any]
_NAMED = 3


class Target:
    """The state that a rank gives to `restore`: tensors, nested dicts, objects with `state_dict`.

    An optimizer has no state before its first step, so it gets a state of zeros to load into; if
    `is_form_known`, in the form that `begin_with` tells, and every value of it is loaded.
    Optional values count only if they are among the `saved` keys, if these are known. Keys are
    plain, or spelled as in the checkpoint: of a compiled module, older releases saved others.
    """

    def __init__(
        self,
        state: LiveState,
        saved: Collection[str] = (),
        *,
        is_strict: bool = True,
        is_form_known: bool = False,
    ) -> None:
        self._state = state
        self.is_strict = is_strict
        """Whether live and saved state must have the same keys."""
        self._is_form_known = is_form_known
        self._made = {name: part for name, part in state.items() if is_blank(part)}
        self._open = {
            name: optimizer
            for name, optimizer in self._made.items()
            if is_form_known or not give_state(optimizer)
        }
        """Optimizers whose state gets the form that the checkpoint has."""
        self._optional = [f"{name}.state." for name in self._made]
        self._optional += [
            f"{name}." for name, part in state.items() if _has_flag(part, "may_be_absent")
        ]
        self._of_one_world = [
            f"{name}." for name, part in state.items() if _has_flag(part, "of_one_world")
        ]
        self._dicts = {
            name: part.state_dict() if isinstance(part, Stateful) else part
            for name, part in state.items()
        }
        self._saved = saved
        self._loaded: set[str] = set()
        self._kept: set[str] = set()
        self._slots: dict[str, tuple[Any, Any]] = {}
        self._spelling = _spelling(saved)
        self._find_slots()
        self.of_all: frozenset[str] = frozenset(map(plain, self._slots))
        """The plain keys of all ranks' states."""

    def _find_slots(self) -> None:
        self._slots.clear()
        for path, holder, name in leaves(self._dicts):
            key = self._spelling.get(plain(path), plain(path))
            if key in self._slots:
                raise ValueError(f"two values of the state are called {key}: rename one")
            if isinstance(holder[name], torch.Tensor) and holder[name].is_meta:
                raise ValueError(
                    f"{key} is on the meta device, without memory to load into: call the model's "
                    "to_empty(device=…) before, and make its optimizer then"
                )
            self._slots[key] = (holder, name)

    @property
    def is_open(self) -> bool:
        """Whether the form of a part is unknown until a checkpoint is chosen."""
        return bool(self._open)

    def begin_with(self, saved: Mapping[str, Form | None]) -> None:
        """Begin with a checkpoint: open parts get its form, and no key is kept.

        `saved` has the form of each tensor, and None for another value.
        """
        self._kept.clear()
        for name, optimizer in self._open.items():
            inside = f"{name}.state."
            own = {
                key.removeprefix(inside): form
                for key, form in saved.items()
                if key.startswith(inside)
            }
            self._dicts[name]["state"] = state_like(optimizer, own, is_zero=not self._is_form_known)
        spelling = _spelling(saved)
        if self._open or spelling != self._spelling:
            self._spelling = spelling
            self._find_slots()

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """By the name of the part."""
        return {name: part for name, part in self._state.items() if isinstance(part, Optimizer)}

    @property
    def values(self) -> dict[str, Any]:
        """All values, by key."""
        return {key: holder[name] for key, (holder, name) in self._slots.items()}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors, which are filled in place."""
        return {key: value for key, value in self.values.items() if isinstance(value, torch.Tensor)}

    def tensors_of(self, name: str) -> Iterator[torch.Tensor]:
        """The tensors of one part."""
        inside = f"{name}."
        return (tensor for key, tensor in self.tensors.items() if key.startswith(inside))

    @property
    def pieces(self) -> tuple[StatePiece, ...]:
        """The form of its tensors, as ranks send it to each other."""
        tensors = {
            key: tensor
            for key, tensor in self.tensors.items()
            if not self._saved or key in self._saved or not self.is_optional(key)
        }
        return read_form(FlatState(tensors, dict.fromkeys(tensors, ()))).pieces

    def is_optional(self, key: str) -> bool:
        """Whether a checkpoint may lack this key."""
        return key.startswith(tuple(self._optional))

    def is_of_rank(self, key: str) -> bool:
        """Whether each rank that saved has its own value, as for random numbers."""
        return key.startswith((*self._optional, *self._of_one_world))

    def is_of_one_world(self, key: str) -> bool:
        """Whether each rank has its own value, which fits only the same number of ranks."""
        return key.startswith(tuple(self._of_one_world))

    def why_unfit(self, values: Mapping[str, object]) -> str:
        """Why an object of the state cannot continue from these values; empty if all can."""
        for name, part in self._state.items():
            if hasattr(part, "why_unfit"):
                inside = f"{name}."
                own = {
                    key.removeprefix(inside): value
                    for key, value in values.items()
                    if key.startswith(inside)
                }
                why = part.why_unfit(own)
                if why:
                    return f"{name}: {why}"
        return ""

    def put(self, key: str, value: object) -> None:
        """Replace a value that is not a tensor."""
        holder, name = self._slots[key]
        holder[name] = value
        self.loaded(key)

    def loaded(self, key: str) -> None:
        """Note that this key has its saved value."""
        self._loaded.add(key)

    def keep(self, keys: Collection[str]) -> None:
        """Leave these keys as they are."""
        self._kept |= set(keys)

    @property
    def kept(self) -> tuple[str, ...]:
        """The keys that stay as they are."""
        return tuple(sorted(self._kept))

    def is_kept(self, key: str) -> bool:
        """Whether this key stays as it is."""
        return key in self._kept

    def finish(self) -> None:
        """Pass the loaded state to its objects."""
        self._prune()
        for name, part in self._state.items():
            if self._is_kept_whole(name):
                if name in self._made:
                    self._made[name].state.clear()
            elif isinstance(part, Stateful):
                if not _is_filled(part, self._dicts[name]):
                    with _as_made(self.tensors_of(name)):
                        load_state(part, self._dicts[name])
            else:
                self._state[name] = self._dicts[name]

    def _is_kept_whole(self, name: str) -> bool:
        """Whether no value of this part was loaded, although it has values."""
        inside = f"{name}."
        own = [key for key in self._slots if key == name or key.startswith(inside)]
        return bool(self._kept) and bool(own) and self._loaded.isdisjoint(own)

    def _prune(self) -> None:
        """Remove states that were not saved: of parameters that never had a gradient."""
        for name in self._made.keys() - self._open.keys():
            states = self._dicts[name]["state"]
            for number in list(states):
                if not self._loaded.issuperset(keys_in(states[number], f"{name}.state.{number}")):
                    del states[number]

    def partly_in(self, saved: AbstractSet[str]) -> list[str]:
        """The keys of states made to load into that are not saved, though others of them are."""
        own: dict[str, list[str]] = {}
        for name in self._made.keys() - self._open.keys():
            for number, values in self._dicts[name]["state"].items():
                inside = f"{name}.state.{number}"
                own[inside] = keys_in(values, inside)
        return [
            key
            for keys in own.values()
            if not saved.isdisjoint(keys)
            for key in keys
            if key not in saved
        ]

    def undo(self) -> None:
        """Remove the optimizer states that were made to load into."""
        for optimizer in self._made.values():
            optimizer.state.clear()


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy into a tensor of the training, even if it was made in inference mode."""
    with _as_made([tensor]):
        tensor.copy_(values)


def _as_made(tensors: Iterable[torch.Tensor]) -> Any:
    """The mode in which these tensors may be changed: torch has a rule for inference tensors."""
    return torch.inference_mode(any(tensor.is_inference() for tensor in tensors))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank has."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _is_filled(part: object, values: Any) -> bool:
    """Whether the tensors of a module were loaded in place, and it has no hooks to call.

    Then `load_state_dict` would only copy each parameter onto itself, as slowly as a load.
    """
    if not isinstance(part, Module):
        return False
    if type(part).load_state_dict is not Module.load_state_dict:
        return False
    for inner in part.modules():
        if inner._load_state_dict_pre_hooks or inner._load_state_dict_post_hooks:  # noqa: SLF001 - torch has no public way to know
            return False
    own = {local(tensor).data_ptr() for tensor in (*part.parameters(), *part.buffers())}
    return all(
        isinstance(value, torch.Tensor) and local(value).data_ptr() in own
        for value in values.values()
    )


def _spelling(saved: Collection[str]) -> dict[str, str]:
    """Saved keys that are not plain, by the plain ones."""
    return {own: key for key in saved if (own := plain(key)) != key and own not in saved}


def _has_flag(part: object, name: str) -> bool:
    return bool(getattr(part, name, False))


def check_fit(
    target: Target, wanted: Mapping[str, Form], saved: Mapping[str, Form], others: Collection[str]
) -> tuple[str, ...]:
    """Check that the live state matches the saved one; returns the saved keys without a place.

    `others` are the keys of saved values that are not tensors. Strict: `UnfitError` if a live value
    is not saved in the same form, or if no rank has a place for a saved tensor. Not strict: live
    values without a match are kept as they are.
    """
    lacking = _lacking(target, wanted, saved, others)
    unlike = [key for key, form in wanted.items() if key in saved and saved[key] != form]
    left_over = [key for key in saved if plain(key) not in target.of_all and key not in wanted]
    unread = [
        key for key in others if plain(key) not in target.of_all and not target.is_of_rank(key)
    ]
    if target.is_strict:
        _refuse(target, "lacks", lacking)
        _refuse(target, "has, and the state to load into lacks,", left_over)
        for key in unlike:
            raise UnfitError(f"{key} is {_words(saved[key])} there, and {_words(wanted[key])} here")
        return tuple(sorted(unread))
    if len(lacking) + len(unlike) == len(target.values):
        raise UnfitError("it has no value of the state to load into")
    target.keep((*lacking, *unlike))
    _keep_optimizers(target, {*lacking, *unlike, *left_over})
    return tuple(sorted((*left_over, *unread)))


def _lacking(
    target: Target, wanted: Mapping[str, Form], saved: Mapping[str, Form], others: Collection[str]
) -> list[str]:
    plain = target.values.keys() - target.tensors.keys()
    lacking = [key for key in wanted if key not in saved and not target.is_optional(key)]
    lacking += [key for key in plain if key not in others and not target.is_optional(key)]
    lacking += target.partly_in(saved.keys() | set(others))
    for key in lacking:
        if target.is_of_one_world(key):
            raise UnfitError(
                f"{key.partition('.')[0]} has a place for each rank, and was saved by another "
                "number of ranks: restore with that number, use PositionedSampler, or leave it "
                "out of the state to begin the data again"
            )
    return lacking


def _keep_optimizers(target: Target, differing: Collection[str]) -> None:
    """Keep an optimizer whole if a value of it differs: it numbers its parameters."""
    for name in target.optimizers:
        inside = f"{name}."
        if any(key.startswith(inside) for key in differing):
            target.keep([key for key in target.values if key.startswith(inside)])


def check_parameters(target: Target, values: Mapping[str, object]) -> None:
    """Keep optimizers that have another number of parameters than was saved."""
    if target.is_strict:
        return
    present = target.values
    for name in target.optimizers:
        inside = f"{name}.param_groups."
        for key, value in values.items():
            if key.startswith(inside) and key.endswith(".params") and value != present[key]:
                _keep_optimizers(target, [key])


def check_values(target: Target, values: Mapping[str, object]) -> None:
    """`UnfitError` if an object of the live state cannot continue from these values."""
    why = target.why_unfit({key: value for key, value in values.items() if not target.is_kept(key)})
    if why:
        raise UnfitError(why)


def _refuse(target: Target, difference: str, keys: list[str]) -> None:
    if not keys:
        return
    parts = {key.partition(".")[0] for key in keys}
    filled = {key.partition(".")[0] for key in target.values.keys() - set(keys)}
    kept = sorted(parts - filled) if difference == "lacks" else []
    rest = f"leaves {' and '.join(kept)} as made, and loads" if kept else "loads"
    raise UnfitError(f"it {difference} {named(keys)} (strict=False {rest} the rest)")


def named(keys: Collection[str]) -> str:
    """The first of these keys, and how many more there are."""
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return f"{', '.join(sorted(keys)[:_NAMED])}{more}"


def _words(form: Form) -> str:
    dtype, shape = form
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
