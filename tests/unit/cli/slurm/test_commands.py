"""Wrong words for `everstep slurm` and `everstep kubernetes`: one line, and no node is drained.

Acceptance: A12.3.
"""

from pathlib import Path

import pytest
from click.testing import CliRunner

from everstep_services.cli.__main__ import main
from everstep_services.cli.group import everstep


@pytest.mark.parametrize("program", ["prolog", "epilog"])
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--witin", "20", "host"), "--witin"),
        (("--within", "soon"), "'soon' is not a valid float"),
        (("--within", "-5"), "-5.0 is not in the range"),
        (("--within",), "'--within' requires an argument"),
    ],
)
def test_a_typing_error_in_slurm_conf_drains_no_node(
    program: str, words: tuple[str, ...], text: str
) -> None:
    """Slurm drains a node for every code but 0: such a line would drain the whole cluster."""
    done = CliRunner().invoke(everstep, ["slurm", program, *words])
    assert done.exit_code == 0
    assert f"everstep {program}: this node was not checked: " in done.output
    assert text in done.output


_JOB = ("kubernetes", "job", "--job", "llama", "--image", "x", "--write", "{}/x.yaml")
_SBATCH = ("slurm", "sbatch", "--job", "llama")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (_JOB, "--write {}/x.yaml"),
        ((*_SBATCH, "--folder", "{folder}", "--write", "{}/x.sh"), "--write {}/x.sh"),
        ((*_SBATCH, "--folder", "{file}/below"), "--folder {file}/below"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    names = {"folder": str(tmp_path / "folder"), "file": str(tmp_path / "file")}
    missing = str(tmp_path / "missing")
    arguments = [word.format(missing, **names) for word in words]
    assert main([*arguments, "--", "train.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"everstep: {option.format(missing, **names)}: ")
    assert error.endswith("; name a place that exists and that you may write\n")
    assert error.count("\n") == 1
