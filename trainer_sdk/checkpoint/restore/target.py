"""The live state that a checkpoint is loaded into: tensors by key, as torch flattens them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from trainer_sdk.checkpoint.flat_state import Flat, Piece, read_form
from trainer_sdk.checkpoint.restore.optimizers import Form, give_state, is_blank, state_like

State = MutableMapping[str, Any]


class Target:
    """What every rank gives to `restore`: tensors, nested dicts, and objects with a `state_dict`.

    An optimizer has no state before its first step; it is given one, of zeros, to load into. What
    is optional counts as a part of it only if it is among the `saved` keys, where these are known.
    """

    def __init__(
        self, state: State, saved: Collection[str] = (), *, is_strict: bool = True
    ) -> None:
        self._state = state
        self.is_strict = is_strict
        """All of it must be among what was saved, and the other way round."""
        self._made = {name: one for name, one in state.items() if is_blank(one)}
        self._open = {name: one for name, one in self._made.items() if not give_state(one)}
        """Optimizers whose state is made as the checkpoint has it."""
        self._optional = [f"{name}.state." for name in self._made]
        self._optional += [f"{name}." for name, one in state.items() if _says(one, "may_be_absent")]
        self._of_one_world = [
            f"{name}." for name, one in state.items() if _says(one, "of_one_world")
        ]
        self._dicts = {
            name: one.state_dict() if isinstance(one, Stateful) else one
            for name, one in state.items()
        }
        self._saved = saved
        self._loaded: set[str] = set()
        self._kept: set[str] = set()
        self._slots: dict[str, tuple[Any, Any]] = {}
        self._find_slots()
        self.of_all: frozenset[str] = frozenset(self._slots)
        """The keys that the state of any rank has."""

    def _find_slots(self) -> None:
        self._slots.clear()
        for key, holder, name in _leaves(self._dicts):
            if key in self._slots:
                raise ValueError(f"two values of the state are called {key}: rename one")
            self._slots[key] = (holder, name)

    @property
    def is_open(self) -> bool:
        """The form of a part of it is known only once a checkpoint is."""
        return bool(self._open)

    def begin_with(self, saved: Mapping[str, Form | None]) -> None:
        """Begin with a checkpoint: what is open becomes as it was saved, and nothing is kept.

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
            self._dicts[name]["state"] = state_like(optimizer, own)
        if self._open:
            self._find_slots()

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """By the name of the part."""
        return {name: one for name, one in self._state.items() if isinstance(one, Optimizer)}

    @property
    def values(self) -> dict[str, Any]:
        """Every value by its key."""
        return {key: holder[name] for key, (holder, name) in self._slots.items()}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that are filled in place."""
        return {key: one for key, one in self.values.items() if isinstance(one, torch.Tensor)}

    def tensors_of(self, name: str) -> Iterator[torch.Tensor]:
        """Those of one of its parts."""
        inside = f"{name}."
        return (one for key, one in self.tensors.items() if key.startswith(inside))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The form of its tensors, as ranks tell each other."""
        tensors = {
            key: one
            for key, one in self.tensors.items()
            if not self._saved or key in self._saved or not self.is_optional(key)
        }
        return read_form(Flat(tensors, dict.fromkeys(tensors, ()))).pieces

    def is_optional(self, key: str) -> bool:
        """The training goes on without it, too."""
        return key.startswith(tuple(self._optional))

    def is_of_rank(self, key: str) -> bool:
        """A rank of the world that saved has it for itself, as its random numbers."""
        return key.startswith((*self._optional, *self._of_one_world))

    def is_of_one_world(self, key: str) -> bool:
        """Each rank has its own, which fits the same number of ranks only."""
        return key.startswith(tuple(self._of_one_world))

    def why_unfit(self, values: Mapping[str, object]) -> str:
        """Why one of its objects cannot go on from these values, if there is one that says so."""
        for name, one in self._state.items():
            if hasattr(one, "why_unfit"):
                inside = f"{name}."
                own = {
                    key.removeprefix(inside): value
                    for key, value in values.items()
                    if key.startswith(inside)
                }
                why = one.why_unfit(own)
                if why:
                    return f"{name}: {why}"
        return ""

    def put(self, key: str, value: object) -> None:
        """Replace a value that is no tensor."""
        holder, name = self._slots[key]
        holder[name] = value
        self.loaded(key)

    def loaded(self, key: str) -> None:
        """Note that it has its saved value now."""
        self._loaded.add(key)

    def keep(self, keys: Collection[str]) -> None:
        """Leave these as they are."""
        self._kept |= set(keys)

    @property
    def kept(self) -> tuple[str, ...]:
        """What stays as it is."""
        return tuple(sorted(self._kept))

    def is_kept(self, key: str) -> bool:
        """It stays as it is."""
        return key in self._kept

    def finish(self) -> None:
        """Hand the loaded state to the objects that it came from."""
        self._prune()
        for name, one in self._state.items():
            if self._is_kept_whole(name):
                if name in self._made:
                    self._made[name].state.clear()
            elif isinstance(one, Stateful):
                if not _is_filled(one, self._dicts[name]):
                    with _as_made(self.tensors_of(name)):
                        one.load_state_dict(self._dicts[name])
            else:
                self._state[name] = self._dicts[name]

    def _is_kept_whole(self, name: str) -> bool:
        """No value of this part was loaded, and there are some that could have been."""
        inside = f"{name}."
        own = [key for key in self._slots if key == name or key.startswith(inside)]
        return bool(self._kept) and bool(own) and self._loaded.isdisjoint(own)

    def _prune(self) -> None:
        """A parameter that never had a gradient had no state when it was saved, and has none."""
        for name in self._made.keys() - self._open.keys():
            states = self._dicts[name]["state"]
            for number, values in list(states.items()):
                if any(f"{name}.state.{number}.{one}" not in self._loaded for one in values):
                    del states[number]

    def undo(self) -> None:
        """Nothing is loaded: take back what was made to load into."""
        for optimizer in self._made.values():
            optimizer.state.clear()


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy into a tensor of the training, also into one that was made for inference alone."""
    with _as_made([tensor]):
        tensor.copy_(values)


def _as_made(tensors: Iterable[torch.Tensor]) -> Any:
    """The mode in which tensors may be changed; elsewhere torch refuses those for inference."""
    return torch.inference_mode(any(one.is_inference() for one in tensors))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank has."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _is_filled(one: object, values: Any) -> bool:
    """Its own tensors were loaded into, and nothing of it wants to know: all is done.

    A module would copy every parameter onto itself, which takes as long as loading it.
    """
    if not isinstance(one, Module):
        return False
    if type(one).load_state_dict is not Module.load_state_dict:
        return False
    for inner in one.modules():
        if inner._load_state_dict_pre_hooks or inner._load_state_dict_post_hooks:  # noqa: SLF001 - torch has no public way to know
            return False
    own = {local(tensor).data_ptr() for tensor in (*one.parameters(), *one.buffers())}
    return all(
        isinstance(value, torch.Tensor) and local(value).data_ptr() in own
        for value in values.values()
    )


def _says(one: object, name: str) -> bool:
    return bool(getattr(one, name, False))


def _leaves(holder: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each value with its key, where it is, and under which name; by torch's rules."""
    entries = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
    for name, value in entries:
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) or (isinstance(value, list) and not _is_whole(value)):
            yield from _leaves(value, key)
        else:
            yield key, holder, name


def _is_whole(values: list[Any]) -> bool:
    """Torch keeps a list as one value unless there are tensors or dicts somewhere in it."""
    return not any(
        isinstance(one, (torch.Tensor, Mapping)) or (isinstance(one, list) and not _is_whole(one))
        for one in values
    )
