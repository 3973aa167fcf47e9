"""What only a GPU can show of numerics: its generator, values that arrive late, hashes there.

Each test tells what it would prove. One GPU is enough.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_sdk.checkpoint import Checkpointer
from trainer_sdk.numerics.elsewhere import _decoded, _encoded
from trainer_sdk.numerics.numerics import Numerics
from trainer_sdk.numerics.replay import OwnGradients, StepCall
from trainer_sdk.numerics.snapshot import RandomStates, Snapshot, TrainingParts
from trainer_sdk.numerics.values import LateMetrics, StepReader
from trainer_sdk.rank_session import session
from trainer_sdk.testing import Watch, watched
from trainer_sdk.wire import NumericsReported

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # older releases of torch ask for it

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def watch() -> Iterator[Watch]:
    with watched() as watching:
        yield watching


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 1)]
    return nn.Sequential(*layers).cuda()


def computed(module: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = module(batch).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def busy(seconds: float) -> None:
    """Give the GPU work for about this time."""
    torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]


def events(watch: Watch) -> list[tuple[str, int, str]]:
    reported = [message for message in watch.messages if isinstance(message, NumericsReported)]
    bodies = [(event.event, event.body) for event in reported]
    return [(name, body.get("step", 0), body.get("kind", "")) for name, body in bodies]


def test_a_step_computes_the_same_again() -> None:
    """Proves: the device's generator, BatchNorm's buffers and gradients are put back."""
    module = network()
    parts = TrainingParts({"model": module})
    parameters = list(parts.parameters())
    batch = torch.randn(16, 32, device="cuda")

    def step() -> list[Any]:
        loss = computed(module, batch) * torch.rand(1, device="cuda")
        tensors = [*module.buffers(), *(one.grad for one in parameters if one.grad is not None)]
        return [float(loss.detach()), *(tensor.tolist() for tensor in tensors)]

    before = Snapshot(parts, parameters, again=True)
    first = step()
    before.put_back()
    assert step() == first
    middle = Snapshot(parts, parameters)
    second = step()
    middle.put_back()
    assert step() == second


def test_hashes_of_gradients_are_read_from_the_device() -> None:
    """Proves: hooks run on the stream of backward, and what they keep is complete when read."""
    module = network().eval()
    own = OwnGradients(TrainingParts({"model": module}))
    batch = torch.randn(16, 32, device="cuda")
    read = []
    for _ in range(2):
        module.zero_grad()
        with own.recorded():
            busy(0.05)
            computed(module, batch)
        read.append(own.read())
    assert read[0] == read[1]
    hashes, norm = read[0]
    assert len(hashes) == 6
    assert norm == pytest.approx(
        float(
            nn.utils.get_total_norm(
                [one.grad for one in module.parameters() if one.grad is not None]
            )
        )
    )


def test_values_are_read_once_the_device_has_come_to_them() -> None:
    """Proves: no wait for the device; the pinned copy is the value; half precision, too."""
    for dtype in (torch.float32, torch.bfloat16):
        reader = StepReader(waits=False)
        busy(0.2)
        value = torch.full((1,), 1.5, device="cuda", dtype=dtype)
        assert reader.read(1, value, value * 2, None) == []
        value.fill_(7.0)
        torch.cuda.synchronize()
        (arrived,) = reader.arrived()
        assert (arrived.loss, arrived.grad_norm) == (1.5, 3.0)


def test_metrics_of_a_framework_are_shown_without_a_wait() -> None:
    """Proves: Lightning's metrics on a GPU are read once the device has come to them."""
    shown: dict[str, float] = {}
    metrics = LateMetrics(shown.__setitem__)
    busy(0.2)
    value = torch.full((), 1.5, device="cuda")
    metrics.show({"loss": value, "rate": 0.5})
    assert shown == {"rate": 0.5}
    torch.cuda.synchronize()
    metrics.show({})
    assert shown == {"rate": 0.5, "loss": 1.5}


def test_a_step_does_not_wait_for_the_device(watch: Watch) -> None:
    """Proves: `compute` and `accepts` never synchronise, also where replicas would be hashed."""
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    training = Numerics(
        session(), {"model": module, "optimizer": optimizer}, None, mode="validate_results"
    )
    batch = torch.randn(16, 32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            loss = training.compute(lambda values: computed(module, values), batch)
            assert training.accepts(loss=loss, grad_norm=loss * 2)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_late_value_is_reported_with_its_step(watch: Watch) -> None:
    """Proves: the decision on a step comes a step later, with the right number."""
    run = session()
    training = Numerics(run, {"model": network()}, None, mode="validate_results")
    for number in range(1, 6):
        training.accepts(loss=torch.full((), float("nan") if number == 3 else 1.0, device="cuda"))
        torch.cuda.synchronize()
        run.step()
    assert events(watch) == [("suspected", 3, "")]


def test_a_late_value_leads_to_a_roll_back(watch: Watch, tmp_path: Any) -> None:
    """Proves: the training goes back in place before the bad step, though it came to know late.

    The bad value arrives with its own step or with the next one, and is decided a step later.
    """
    run, module = session(), network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": module, "optimizer": optimizer}
    checkpointer = Checkpointer(tmp_path, every=1000)
    training = Numerics(run, state, range(100), unexpected="rollback", checkpointer=checkpointer)
    checkpointer.restore(state)
    steps = []
    for tries, _ in enumerate(training, 1):
        loss = computed(module, torch.randn(16, 32, device="cuda"))
        is_bad = tries == 5
        if training.accepts(loss=loss.detach() * (float("nan") if is_bad else 1.0)):
            optimizer.step()
            run.step()
            checkpointer.save(run.steps_made, state, wait=True)
            steps.append(run.steps_made)
        optimizer.zero_grad()
        if run.steps_made == 8:
            break
    checkpointer.close()
    assert steps in ([*range(1, 6), *range(5, 9)], [*range(1, 7), *range(5, 9)])


def test_a_script_that_waits_for_its_values_has_the_step_made_again(watch: Watch) -> None:
    """Proves: with `read="now"` a step is made again on a GPU, bit for bit."""
    module, faults = network(), [float("nan")]
    torch.use_deterministic_algorithms(mode=True)
    batches = [torch.randn(16, 32, device="cuda") for _ in range(4)]
    training = Numerics(session(), {"model": module}, batches, mode="validate_results", read="now")
    losses: list[float] = []
    tries = 0

    def compute(batch: Tensor) -> Tensor:
        is_bad = tries == 3 and faults
        return computed(module, batch * (faults.pop() if is_bad else 1.0))

    for batch in training:
        tries += 1
        loss = training.compute(compute, batch)
        if training.accepts(loss=loss):
            losses.append(float(loss.detach()))
        module.zero_grad()
    torch.use_deterministic_algorithms(mode=False)
    assert (tries, len(losses)) == (5, 4)
    assert ("judged", 3, "transient") in events(watch)


def test_a_batch_on_a_device_travels() -> None:
    """Proves: tensors of a GPU are on this rank's GPU again, with the device's generator."""
    batch = {"values": torch.arange(8, device="cuda"), "mask": torch.ones(2)}
    call = StepCall(lambda one: one, batch, RandomStates())
    sent = _encoded([call], Snapshot(TrainingParts({"model": network()}), []))
    ((received, states),), buffers = _decoded(sent, dict)
    assert received["values"].is_cuda
    assert not received["mask"].is_cuda
    assert states.cuda is not None
    assert torch.equal(states.cuda, torch.cuda.get_rng_state())
    assert all(buffer is not None and buffer.is_cuda for buffer in buffers)
