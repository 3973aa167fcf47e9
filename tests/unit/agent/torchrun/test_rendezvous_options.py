"""The options of `--rdzv-conf`."""

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from everstep_services.agent.torchrun.rendezvous import create_handler, restart_limit


@pytest.mark.parametrize("given", ["abc", "0", "-1", "nan", "inf"])
def test_a_wrong_option_is_refused_and_one_that_is_not_used_is_named(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = RendezvousParameters(
        "everstep", "", "llama", 1, 1, join_timeout=given, foo="1", timeout=900
    )
    with pytest.raises(ValueError, match=rf"^--rdzv-conf join_timeout={given}: write seconds"):
        create_handler(parameters)
    assert capsys.readouterr().err == (
        "everstep: --rdzv-conf foo: not used here; there is join_timeout and node_id\n"
    )


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("/usr/bin/torchrun --max-restarts=10 train.py --max-restarts=3", 10),
        ("torch/distributed/run.py train.py", 0),
        ("/venv/torch/distributed/launch.py --max-restarts=4 train.py", 4),
        ("/home/ann/run.py --max-restarts=4", None),
        ("/usr/bin/accelerate launch --max_restarts 7 train.py", None),
        ("/usr/bin/torchrun --max-restarts=many train.py", None),
    ],
)
def test_the_limit_of_restarts_is_that_of_torchruns_command_line(
    command: str, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program's command line is not read as that of torchrun."""
    monkeypatch.setattr("sys.argv", command.split())
    assert restart_limit() == limit
