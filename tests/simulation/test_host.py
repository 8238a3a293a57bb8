"""The simulated step's host by itself: what it reads, which microbatches it runs, where offloaded activations go."""

import pytest
import torch
import torch.nn.functional as F

import fullframe as ff
from fullframe.simulation.clock.roofline import StepClock
from fullframe.simulation.devices.table import device_named
from fullframe.simulation.host import GROWS, ClockRoad
from fullframe.techniques.offload import LEAST_BYTES, LEAVING_BYTES, Offload
from tests.simulation.test_simulate import PLAIN, Network, recipe

MAP_BYTES = 4 * 8 * 960 * 1600 * 4  # of Network's 8 channels


def test_offloaded_activations_are_gone_until_backward() -> None:
    large = recipe(sample=lambda: {"image": torch.zeros(3, 960, 1600)})
    kept, sent = (ff.simulate(large, ff.Strategy(offload=offload), without=PLAIN) for offload in (False, True))
    assert MAP_BYTES > LEAST_BYTES and 4 * MAP_BYTES > LEAVING_BYTES, "more than may wait on the device"
    assert sent.bytes["activation"] < kept.bytes["activation"] - MAP_BYTES
    assert kept.seconds["offload"] == 0 < sent.seconds["offload"]
    assert sent.step_seconds > kept.step_seconds


def test_what_is_sent_is_fetched_once_and_one_ahead() -> None:
    clock = StepClock(device_named("A100-80GB"))
    offload = Offload(ClockRoad(clock), least_bytes=0)
    with torch._subclasses.FakeTensorMode():
        x = torch.randn(100, 200, requires_grad=True)
        with offload.saving():
            y = x
            for _ in range(3):
                y = F.gelu(y * 2)
        assert len(offload._parked) == 3, "the argument of each gelu"
        y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert not offload._parked
    transfers = 2 * 3  # there and back
    seconds = transfers * x.nbytes / (clock.device.host_bytes_per_second * clock.efficiency.host)
    assert clock.offload(0).done == pytest.approx(seconds, rel=1e-6)


def test_a_cpu_offloads_nothing() -> None:
    kept, sent = (ff.simulate(recipe(), ff.Strategy(offload=offload), "cpu") for offload in (False, True))
    assert kept.bytes == sent.bytes


class Queue(Network):
    """Keeps its last maps, of at most so many samples, in a buffer or in a list."""

    def __init__(self, most: int, in_list: bool) -> None:
        super().__init__()
        self.most, self.maps = most, []
        self.register_buffer("queue", None if in_list else torch.zeros(0, 8, 24, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.queue is None:
            self.maps = [*self.maps, y.detach()][-self.most // len(y) :]
        else:
            self.queue = torch.cat([self.queue, y.detach()])[-self.most :]
        return y


class MoreLater(Network):
    """Makes more maps of its result from its second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = super().forward(x)
        return y if self.calls < 2 else y.sin().cos().sin().cos()


def test_a_second_step_that_does_more_is_run_where_a_number_on_a_module_tells() -> None:
    first, more = (ff.simulate(recipe(model=m), ff.Strategy(), "cpu").peak_bytes for m in (Network, MoreLater))
    assert more > first + 8 * 24 * 40 * 4


@pytest.mark.parametrize("in_list", [False, True])
def test_what_modules_keep_is_followed_until_it_grows_no_more(in_list: bool) -> None:
    def kept(most: int) -> tuple[int, tuple[str, ...]]:
        found = ff.simulate(recipe(model=lambda: Queue(most, in_list)), ff.Strategy(), "cpu")
        return found.bytes["parameter"], found.notes

    samples = 8 * 24 * 40 * 4
    (few, of_few), (some, of_some), (many, of_many) = kept(4), kept(12), kept(400)
    times = 1 if in_list else 3  # with that of the step before, and the copy that a step keeps of buffers
    assert some - few == times * 8 * samples and of_few == of_some == ()
    assert many > some and of_many == (GROWS,)
