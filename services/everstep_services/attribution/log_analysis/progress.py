"""How far a training came, by the last lines of each file that count steps."""

from collections.abc import Mapping, Sequence

from everstep_services.attribution.log_analysis import clocks
from everstep_services.attribution.log_analysis.attempts import whose
from everstep_services.attribution.log_analysis.origins import Origin, of_line

_STEPS_ON = 3


class LastSteps:
    """The last steps of all files."""

    def __init__(self) -> None:
        self.clocks = clocks.Clocks()
        self.survived: dict[int, int] = {}
        """The last line of each file that did not end the training: three steps came after it."""

    def add(
        self, file: Origin, lines: Sequence[tuple[int, str]], year: int
    ) -> tuple[Mapping[Origin, Sequence[tuple[int, int]]], int]:
        """Take the last lines of a file that count steps.

        Times that several clocks print for one step show the offsets of the clocks. Returns lines
        and numbers of the steps of each origin, and the year that is known then.
        """
        firsts: dict[int, int] = {}
        steps: dict[Origin, list[tuple[int, int]]] = {}
        of_origin: dict[Origin, list[int]] = {}
        for number, line in lines:
            origin, text = of_line(line, file)
            year = clocks.year_of(line) or year
            step, at = clocks.step_of(text), clocks.seconds(line, year)
            of_origin.setdefault(origin, []).append(number)
            if step is not None:
                steps.setdefault(whose(origin), []).append((number, step))
                firsts.setdefault(step, number)
                if at is not None:
                    self.clocks.observe(origin.clock, step, at)
        counted = [*of_origin.values(), list(firsts.values())]
        self.survived[file.file] = max(
            (numbers[-_STEPS_ON] for numbers in counted if len(numbers) >= _STEPS_ON), default=0
        )
        return steps, year
