"""The options of `--rdzv-conf`."""

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from everstep_services.agent.torchrun.rendezvous import create_handler


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
