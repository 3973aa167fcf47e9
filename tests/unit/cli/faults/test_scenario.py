"""Scenarios: read, refused in one line, and settled in the same way by the same seed."""

from pathlib import Path

import pytest

from everstep_services.cli.__main__ import main
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.faults.scenario import RankMap, planned, read_scenario, settled

HERE = RankMap("llama", {"a": range(4), "b": range(4, 8)})
SCENARIO = """
seed = 7

[[faults]]
fault = "kill"
after_s = 60

[[faults]]
fault = "slow"
rank = "random"
amount = 50
for_s = 5

[[faults]]
fault = "cut_off"
node = "b"
after_s = 3
"""


def scenario(folder: Path, text: str) -> Path:
    path = folder / "faults.toml"
    path.write_text(text)
    return path


def test_faults_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    seed, faults = read_scenario(scenario(tmp_path, SCENARIO))
    assert seed == 7
    assert [one.wish.fault.name for one in faults] == ["slow", "cut_off", "kill"]


def test_a_seed_picks_the_same_places_again_and_another_one_others(tmp_path: Path) -> None:
    _, faults = read_scenario(scenario(tmp_path, SCENARIO * 1))
    many = faults * 10
    first, again, other = ([place for _, place in settled(many, HERE, seed)] for seed in (7, 7, 8))
    assert first == again != other
    assert {place.rank for place in first} <= {None, *range(8)}
    assert all(place.rank is None or place.rank in HERE.nodes[place.node] for place in first)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("faults = 3", "has no [[faults]]"),
        ("seeds = 3", "has seeds"),
        ('seed = "x"\n[[faults]]\nfault="kill"', "seed is 'x': give a whole number"),
        ("[[faults]]\nrank=1", "fault 1: it needs a `fault`"),
        ('[[faults]]\nfault="kill"\nwhen=3', "fault 1: there is no field 'when'"),
        ('[[faults]]\nfault="kill"\nafter_s="x"', "fault 1: after_s cannot be 'x'"),
        ('[[faults]]\nfault="kil"', "fault 1: there is no fault 'kil'; did you mean kill?"),
        ("[[", "cannot be read as TOML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(CliError) as error:
        read_scenario(scenario(tmp_path, text))
    assert said in str(error.value)
    assert error.value.code == Exit.USAGE


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fault": "kill", "rank": "8"}, "llama has no rank 8: it has 0 to 7"),
        ({"fault": "cut_off", "node": "c"}, "llama has no node c: it runs on a, b"),
        ({"fault": "kill", "rank": "x"}, "'x' is not a rank"),
        ({"fault": "kill", "node": "a"}, "kill happens to a rank: name it by --rank"),
        ({"fault": "cut_off", "rank": "1"}, "cut_off happens to an agent: name its --node"),
    ],
)
def test_places_that_are_not_there_are_refused(fields: dict[str, str], said: str) -> None:
    with pytest.raises(CliError) as error:
        settled([planned(fields)], HERE, 1)
    assert str(error.value).startswith(said)


def test_the_list_names_each_fault_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inject", "--list", "-o", "name"]) == Exit.OK
    names = capsys.readouterr().out.split()
    assert len(names) == len(set(names)) > 20


def test_what_is_wanted_must_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inject", "--job", "llama"]) == Exit.USAGE
    assert main(["inject", "kill"]) == Exit.USAGE
    assert "name the job with --job ID" in capsys.readouterr().err
