"""What a rank's end is called, and whether it may be the cause."""

import pytest

from everstep.incident_causes import SECONDARY
from everstep.messages import ErrorRecord
from everstep_services.agent.core.exit import RankExit, exit_sentence


def raised(name: str, text: str, place: str = "train.py:88 in step") -> RankExit:
    return RankExit(code=1, error=ErrorRecord(name=name, text=text, place=place))


@pytest.mark.parametrize(
    ("ending", "how", "text"),
    [
        (RankExit(code=0), "done", "exited with 0"),
        (RankExit(code=3), "error", "exited with 3"),
        (RankExit(signal="SIGKILL"), "signal", "was ended by SIGKILL"),
        (
            RankExit(signal="SIGSEGV", core_dumped=True),
            "signal",
            "was ended by SIGSEGV, core dumped",
        ),
        (RankExit(), "unknown", "ended without a known exit code or signal"),
        (
            RankExit(signal="SIGKILL", memory="rank"),
            "out_of_memory",
            "was killed by the kernel: out of memory",
        ),
        (
            RankExit(signal="SIGKILL", memory="host"),
            "signal",
            "was ended by SIGKILL; the kernel killed for memory on this host meanwhile",
        ),
        (RankExit(signal="SIGKILL", memory="rank").forgiven(), "done", "exited with 0"),
        (
            raised("ValueError", "bad shape\nmore"),
            "error",
            "exited with 1: ValueError: bad shape at train.py:88 in step",
        ),
    ],
)
def test_an_end_has_a_name_and_a_sentence(ending: RankExit, how: str, text: str) -> None:
    assert (ending.how, ending.text) == (how, text)


@pytest.mark.parametrize(
    "ending",
    [
        raised("RuntimeError", "[.../gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
        raised("RuntimeError", "Connection reset by peer"),
        raised("torch.distributed.DistBackendError", "NCCL error in: ..."),
        raised("torch.distributed.DistNetworkError", "The client socket has timed out"),
        raised("BrokenPipeError", "[Errno 32] Broken pipe"),
        raised("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete"),
        RankExit(signal="SIGABRT"),
    ],
)
def test_what_follows_from_a_lost_peer_is_no_cause(ending: RankExit) -> None:
    """Errors of a connection or a timeout are secondary (A4.5); the rank is not accused."""
    assert ending.is_secondary
    assert exit_sentence(3, ending, 4).startswith("rank 3, perhaps because of another rank, ")
    assert ending.fingerprint.startswith(SECONDARY)


@pytest.mark.parametrize(
    "ending",
    [
        RankExit(signal="SIGKILL"),
        RankExit(signal="SIGSEGV"),
        RankExit(code=1),
        raised("ModuleNotFoundError", "No module named 'flash_attn'"),
        raised("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        raised("AssertionError", "loss is nan at step 7"),
        raised("RuntimeError", "[.../gloo/transport/tcp/pair.cc:466] op.preamble.length <= 4"),
    ],
)
def test_what_a_rank_did_by_itself_may_be_the_cause(ending: RankExit) -> None:
    assert not ending.is_secondary
    assert not ending.fingerprint.startswith(SECONDARY)


def test_the_same_bug_has_the_same_fingerprint_whatever_its_accidents() -> None:
    one = raised("RuntimeError", "bad value 0x7f3a at step 17 in /scratch/a1/data.bin")
    two = raised("RuntimeError", "bad value 0x99 at step 203 in /scratch/b22/data.bin")
    other = raised("RuntimeError", "bad value 0x99 at step 203", place="train.py:90 in step")
    assert one.fingerprint == two.fingerprint
    assert one.fingerprint != other.fingerprint


def test_an_end_that_is_forgiven_is_good() -> None:
    assert RankExit(signal="SIGKILL").forgiven().is_good


@pytest.mark.parametrize(
    ("ending", "is_of_code"),
    [
        (raised("ModuleNotFoundError", "No module named 'flash_attn'"), True),
        (raised("SyntaxError", "invalid syntax"), True),
        (raised("NameError", "name 'x' is not defined"), True),
        (RankExit(code=2, error=ErrorRecord(name="SystemExit", text="2")), True),
        (
            RankExit(
                code=1, error=ErrorRecord(name="SystemExit", text="python: No module named a")
            ),
            True,
        ),
        (RankExit(code=1, error=ErrorRecord(name="SystemExit", text="1")), False),
        (raised("FileNotFoundError", "[Errno 2] No such file"), False),
        (raised("OSError", "[Errno 116] Stale file handle"), False),
        (raised("ValueError", "bad shape"), False),
        (raised("mylib.TypeError", "of a library's own"), False),
        (RankExit(code=2), False),
        (RankExit(signal="SIGSEGV"), False),
    ],
)
def test_an_exception_may_say_that_the_program_is_wrong(ending: RankExit, is_of_code: bool) -> None:
    """Errors of imports, syntax and flags are distinguished from those that may pass (A4.1)."""
    assert ending.is_of_code == is_of_code


@pytest.mark.parametrize(
    ("code", "asks", "heard", "text"),
    [
        (16, "move", "move", "exited with 16: it asks to compute its result again on another node"),
        (17, "stop", "stop", "exited with 17: its result is wrong, and it asks to stop the job"),
        (16, "", "", "exited with 16: SystemExit: 16"),
        (1, "move", "", "exited with 1: SystemExit: 1"),  # an exit handler has failed
        (18, "dance", "", "exited with 18: SystemExit: 18"),
    ],
)
def test_a_code_asks_for_something_where_the_rank_means_it(
    code: int, asks: str, heard: str, text: str
) -> None:
    ending = RankExit(code=code, error=ErrorRecord(name="SystemExit", text=f"{code}", asks=asks))
    assert (ending.asks, ending.text) == (heard, text)
