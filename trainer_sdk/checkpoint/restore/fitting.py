"""Whether what was saved fits into the live state, before anything of it is touched."""

from collections.abc import Collection, Mapping

from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.optimizers import Form
from trainer_sdk.checkpoint.restore.target import Target

_NAMED = 3


def check_fit(
    target: Target, wanted: Mapping[str, Form], saved: Mapping[str, Form], others: Collection[str]
) -> tuple[str, ...]:
    """Every value of the live state has its like among those saved, and no tensor is left over.

    A tensor that the state of another rank has is not left over. `others` are the saved values that
    are no tensors; those that no rank has a place for are returned. Where the state may differ,
    what has no like is kept as it is, and the tensors that are left over are returned, too.
    """
    lacking = _lacking(target, wanted, saved, others)
    unlike = [key for key, form in wanted.items() if key in saved and saved[key] != form]
    left_over = [one for one in saved if one not in target.of_all and one not in wanted]
    unread = [one for one in others if one not in target.of_all and not target.is_of_rank(one)]
    if target.is_strict:
        _refuse("lacks", lacking)
        _refuse("has, and the state to load into lacks,", left_over)
        for key in unlike:
            raise UnfitError(f"{key} is {_words(saved[key])} there, and {_words(wanted[key])} here")
        return tuple(sorted(unread))
    if len(lacking) + len(unlike) == len(target.values):
        raise UnfitError("it has nothing of what the state to load into has")
    target.keep((*lacking, *unlike))
    _keep_optimizers(target, {*lacking, *unlike, *left_over})
    return tuple(sorted((*left_over, *unread)))


def _lacking(
    target: Target, wanted: Mapping[str, Form], saved: Mapping[str, Form], others: Collection[str]
) -> list[str]:
    plain = target.values.keys() - target.tensors.keys()
    lacking = [one for one in wanted if one not in saved and not target.is_optional(one)]
    lacking += [one for one in plain if one not in others and not target.is_optional(one)]
    for key in lacking:
        if target.is_of_one_world(key):
            raise UnfitError(
                f"{key.partition('.')[0]} has a place for each rank, and was saved by another "
                "number of ranks: restore with that number, use PositionedSampler, or leave it "
                "out of the state to begin the data anew"
            )
    return lacking


def _keep_optimizers(target: Target, differing: Collection[str]) -> None:
    """One whose parameters are others is loaded whole or not at all: it knows them by number."""
    for name in target.optimizers:
        inside = f"{name}."
        if any(one.startswith(inside) for one in differing):
            target.keep([one for one in target.values if one.startswith(inside)])


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
    """Every object of the live state that can tell may go on from these."""
    why = target.why_unfit({key: one for key, one in values.items() if not target.is_kept(key)})
    if why:
        raise UnfitError(why)


def _refuse(what: str, keys: list[str]) -> None:
    if keys:
        raise UnfitError(f"it {what} {named(keys)} (strict=False loads the rest)")


def named(keys: Collection[str]) -> str:
    """The first of these keys, and how many more there are."""
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return f"{', '.join(sorted(keys)[:_NAMED])}{more}"


def _words(form: Form) -> str:
    dtype, shape = form
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
