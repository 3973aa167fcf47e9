"""How many steps a round makes again, from its first step: the same for all who report it."""

FIRST_STEP = "has made its first step"
"""In the reason of an incident: its training is back, and shows steps."""


def steps_again(first: int | None, reached: int | None) -> int | None:
    """The steps that are made again; None if that is not known.

    `first`: the number of the round's first step, None if the script does not number its steps;
    `reached`: the step that the training had reached before, None for none.
    """
    if first is None:
        return None
    return 0 if reached is None else max(reached - first + 1, 0)


def healed_in_words(healed: str, again: int | None) -> str:
    """What became of the ranks that went on, and of those that were replaced, and the cost."""
    lost = "" if again is None else f", {again} {'step' if again == 1 else 'steps'} lost"
    return f"{healed}{lost}"


def steps_again_in_words(round: int, first: int | None, reached: int | None) -> str:
    """The steps that are made again, and the remedy if the script does not resume."""
    again = steps_again(first, reached)
    if not again or first is None:
        return ""
    steps = "1 step is" if again == 1 else f"{again} steps are"
    if first > 1:
        return f"round {round} went on from step {first - 1}: {steps} made again"
    return (
        f"round {round} began at step 0, with nothing restored: {steps} made again. If there was a "
        f"checkpoint, restore it at the start: docs/guides/checkpoints.md"
    )
