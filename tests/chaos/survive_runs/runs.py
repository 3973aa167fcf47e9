"""Runs drawn trainings under `everstep run`, and judges them by the same trainings undisturbed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.survive_runs.drawing import Case, Failure, Shape, drawn
from tests.e2e.cluster import Agent, Cluster
from tests.e2e.control_planes import Up
from tests.e2e.processes import below
from tests.waiting import until

_SCRIPT = str(Path(__file__).with_name("training.py"))
_WITHIN_S = 600.0
_OPTIONS = (
    "--max-restarts", "none", "--stop-grace", "1", "--limit", "hangs=2", "--limit", "outside=60",
)  # fmt: skip


@dataclass
class Row:
    """A failure, and what became of it."""

    case: Case
    number: int
    faults: list[str] = field(default_factory=list)
    """Of the whole training."""
    lost: int = 0
    """Steps that a rank had finished, and that were made again."""
    from_images: bool = False
    stopped: int = 0
    """Processes that are new without need."""
    happened: bool = True

    @property
    def failure(self) -> Failure:
        return self.case.failures[self.number]

    @property
    def is_single(self) -> bool:
        """Whether it came alone: not in the healing of another, and none in its own."""
        after = self.case.failures[self.number + 1 : self.number + 2]
        return all(each.point != "heal" for each in (self.failure, *after))

    def __str__(self) -> str:
        failure = self.failure
        notes = [f"{self.lost} lost"] if self.happened else ["has not happened"]
        notes += ["images"] if self.from_images else []
        notes += [f"{self.stopped} stopped"] if self.stopped else []
        return (
            f"{self.case.seed}.{self.number} {self.case.shape}, {self.case.nodes} nodes: "
            f"{failure.kind} of rank {failure.rank} in step {failure.step}, {failure.point} "
            f"{failure.healing}: {', '.join([*notes, *self.faults])}"
        )


@dataclass(frozen=True)
class Told:
    """What the ranks of a training have told."""

    begins: dict[int, dict[int, tuple[int, str, int]]]
    """By round and rank: the step, where its state comes from, and the process."""
    steps: list[list[tuple[int, int, tuple[str, str], int]]]
    """By rank: round, step, loss and hash of the state, and the process."""
    ends: list[list[str]]
    """By rank: the hashes of the last states."""

    @classmethod
    def of(cls, folder: Path, world: int) -> "Told":
        told = cls({}, [[] for _ in range(world)], [[] for _ in range(world)])
        for rank in range(world):
            file = folder / f"told-{rank}"
            for line in file.read_text().splitlines() if file.exists() else ():
                word, number, step, *rest = line.split()
                if word == "begin":
                    begin = (int(step), rest[0], int(rest[-1]))
                    told.begins.setdefault(int(number), {})[rank] = begin
                elif word == "step":
                    result = (rest[0], rest[1])
                    told.steps[rank].append((int(number), int(step), result, int(rest[-1])))
                else:
                    told.ends[rank].append(rest[0])
        return told

    def finished_by(self, number: int) -> int:
        """The newest step that any rank had finished by the end of a round."""
        steps = (step for rank in self.steps for round_, step, *_ in rank if round_ <= number)
        return max(steps, default=0)


def judged_runs(seeds: Iterable[int], up: Up, folder: Path) -> Iterator[Row]:
    """A row for each failure of each seed."""
    truths: dict[Shape, Told] = {}
    for seed in seeds:
        case = drawn(seed)
        if case.shape not in truths:
            place = folder / case.shape.replace(" ", "-")
            error = _carry_out(place, case.shape, case.world, up)
            assert not error, error
            truths[case.shape] = Told.of(place, case.world)
        place = folder / str(seed)
        error = _carry_out(place, str(seed), case.world, up, case)
        yield from _judged(case, place, truths[case.shape], error)


def _carry_out(place: Path, about: str, world: int, up: Up, case: Case | None = None) -> str:
    """Train; why it has not come to its good end."""
    place.mkdir(parents=True)
    cluster = Cluster(place, f"survive-{place.name}", up)
    nodes = 1 if case is None else case.nodes
    options = [*_OPTIONS, "--nproc-per-node", str(world // nodes)]
    if nodes > 1:
        options += ["--nnodes", str(nodes), "--spares", "1"]
    names = [f"node-{number}" for number in range(1, nodes + 1 + (nodes > 1))]
    try:
        agents = [cluster.run(*options, _SCRIPT, str(place), about, node=name) for name in names]
        lost = _lose_node(place, agents, case) if case and case.failures[0].of_node else None
        for agent in agents:
            if agent is not lost and (code := agent.wait(_WITHIN_S)):
                return f"{agent.node} has ended with {code}"
    except AssertionError as error:
        return str(error).partition("\n")[0]
    finally:
        cluster.close()
    return ""


def _lose_node(place: Path, agents: list[Agent], case: Case) -> Agent | None:
    """Kill the node of the rank that has told of its failure; None if the job ended before."""
    file = place / "failed-0"
    ended = until(
        lambda: file.exists() or any(agent.poll() is not None for agent in agents),
        "a node is to fail", within_s=_WITHIN_S,
    )  # fmt: skip
    if not (ended and file.exists()):
        return None
    process = int(until(file.read_text, "the rank is named").split()[1])
    for agent in agents:
        if process in {each.pid for each in below(agent.pid)}:
            if case.failures[0].kind == "node":
                agent.kill_node()
            else:
                agent.kill()
            return agent
    return None


def _judged(case: Case, place: Path, truth: Told, error: str) -> list[Row]:
    told = Told.of(place, case.world)
    faults = [error] if error else []
    for rank in range(case.world):
        expected = {step: result for _, step, result, _ in truth.steps[rank]}
        for number, step, result, _ in told.steps[rank]:
            if result != expected[step]:
                faults.append(f"rank {rank} is wrong in round {number} from step {step} on")
                break
        if not error and told.ends[rank][-1:] != truth.ends[rank][-1:]:
            faults.append(f"rank {rank} ends with another state")
    for number, begins in told.begins.items():
        if len({step for step, *_ in begins.values()}) > 1:
            faults.append(f"ranks began round {number} at several steps")
    return [_row(case, number, place, told, faults) for number in range(len(case.failures))]


def _row(case: Case, number: int, place: Path, told: Told, faults: list[str]) -> Row:
    row = Row(case, number, faults)
    rounds = {
        each: int(file.read_text().split()[0])
        for each in range(len(case.failures))
        if (file := place / f"failed-{each}").exists()
    }
    row.happened = number in rounds
    following = sorted(each for each in told.begins if row.happened and each > rounds[number])
    if not following:
        return row
    begins = told.begins[following[0]]
    row.lost = told.finished_by(following[0] - 1) - next(iter(begins.values()))[0]
    row.from_images = any(origin == "image" for _, origin, _ in begins.values())
    # What has failed since the round before that began on all ranks.
    before = max(each for each in told.begins if each < following[0])
    failed = {
        rank
        for each, in_round in rounds.items()
        if before <= in_round < following[0]
        for rank in _ranks_of(case, case.failures[each])
    }
    old = {process for each in told.begins if each < following[0]
           for *_, process in told.begins[each].values()}  # fmt: skip
    new = {rank for rank, (*_, process) in begins.items() if process not in old}
    row.stopped = len(new - failed)
    return row


def _ranks_of(case: Case, failure: Failure) -> Iterable[int]:
    if not failure.of_node:
        return (failure.rank,)
    share = case.world // case.nodes
    first = failure.rank // share * share
    return range(first, first + share)


def table(rows: list[Row]) -> str:
    """Failures by kind and shape; the last lines have those by point, and all."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if row.happened:
            single = "single" if row.is_single else "two at once"
            for name in (
                f"{row.failure.kind}, {row.case.shape}", f"= at {row.failure.point}",
                f"= {row.case.shape}", f"= {single}", "= all",
            ):  # fmt: skip
                by_name.setdefault(name, []).append(row)
    lines = ["| | failures | right | 0 steps lost | from images | more stopped | wrong |",
             "|---|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for name, each in sorted(by_name.items(), key=lambda item: (item[0][0] == "=", item[0])):
        counts = (
            len(each), sum(not row.faults for row in each), sum(row.lost <= 0 for row in each),
            sum(row.from_images for row in each), sum(row.stopped > 0 for row in each),
            sum(bool(row.faults) for row in each),
        )  # fmt: skip
        lines.append(f"| {name.removeprefix('= ')} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def too_far_back(row: Row) -> bool:
    """Whether more was lost than images explain."""
    return row.lost > (3 * row.case.saves_every if row.from_images else 1)
