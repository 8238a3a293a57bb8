"""What is sent to host memory and brought back. On this CPU both ways are real copies; no stream is involved."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.techniques import offload as offload_module
from fullframe.techniques.offload import DeviceRoad, Offload
from fullframe.techniques.recompute import Recomputation
from tests.collector import tensors_for_the_collector
from tests.rank_group import rank_group
from tests.techniques.test_recompute import assert_same, steps
from tests.training import blocks

CPU = torch.device("cpu")


class Watched(Offload):
    """An offload that notes what it was handed."""

    def __init__(self, least_bytes: int = 0):
        road = DeviceRoad(CPU)
        super().__init__(road, least_bytes)
        self.sent: list[int] = []
        self.fetched = 0
        self.all: weakref.WeakSet[Any] = weakref.WeakSet()  # also those whose address another storage has by now
        send, fetch = road.send, road.fetch

        def sending(storage: torch.UntypedStorage) -> Tensor:
            self.sent.append(storage.nbytes())
            return send(storage)

        def fetching(host: Tensor) -> Any:
            self.fetched += 1
            return fetch(host)

        road.send, road.fetch = sending, fetching  # type: ignore[method-assign]

    def _pack(self, tensor: Tensor) -> Any:
        packed = super()._pack(tensor)
        if isinstance(packed, offload_module._View):
            self.all.add(packed.parked)
        return packed


def gradients(offload: Offload | None, again: bool = False) -> dict[str, Tensor]:
    model = blocks.network(spectral=True)
    if again:
        Recomputation(model, ff.Strategy(recompute="blocks"))
    if offload is None:
        total, _ = blocks.loss(model, blocks.batch())
    else:
        with offload.saving():
            total, _ = blocks.loss(model, blocks.batch())
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_the_same_to_the_last_bit() -> None:
    expected = gradients(None)
    for least_bytes in (0, 10_000):
        offload = Watched(least_bytes)
        assert_same(gradients(offload), expected)
        assert offload.sent and min(offload.sent) >= least_bytes
        assert len(offload.sent) <= offload.fetched <= 1.1 * len(offload.sent)  # a few are used at two distant times


def test_with_recompute_the_blocks_inputs_go_and_nothing_within() -> None:
    expected = gradients(None)
    whole, again = Watched(), Watched()
    gradients(whole)
    assert_same(gradients(again, again=True), expected)
    x = torch.zeros(blocks.SAMPLES, 6, 7, 11, dtype=torch.float64)  # what goes into a block
    assert whole.sent.count(x.nbytes) == 18
    assert again.sent.count(x.nbytes) == 6, "four blocks' inputs, the stem's batch norm's, the head's"


def saved(forward: Callable[[], Tensor], offload: Offload) -> Tensor:
    with offload.saving():
        return forward()


def test_a_storage_goes_once_however_many_nodes_save_it() -> None:
    x = torch.randn(50, 20, dtype=torch.float64, requires_grad=True)
    offload = Watched()

    def forward() -> Tensor:
        y = x * 1
        left, right = y[:, :10], y.t()[10:]
        return (left.sin().sum() + (right * right).sum() + y.exp().sum()) * 1

    out = saved(forward, offload)
    assert offload.sent.count(x.nbytes) == 2, "y and exp(y)"
    out.backward()
    expected = torch.cat([x[:, :10].cos(), 2 * x[:, 10:]], 1) + x.exp()
    torch.testing.assert_close(x.grad, expected.detach(), rtol=1e-14, atol=1e-14)


def test_a_storage_that_was_written_to_goes_again() -> None:
    x = torch.randn(40, dtype=torch.float64, requires_grad=True)

    def forward() -> Tensor:
        y = x.detach().clone()
        first = (x * y).sum()
        y.mul_(3)
        return first + (x * y).sum()

    saved(forward, Watched()).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 4 * x.detach())


def test_parameters_and_small_tensors_stay() -> None:
    layer = nn.Linear(64, 64)
    x = torch.randn(8, 64)
    offload = Watched(least_bytes=x.nbytes)
    saved(lambda: layer(x).sum(), offload).backward()
    assert offload.sent == [x.nbytes]


def test_the_original_is_let_go_and_the_copy_after_backward() -> None:
    x = torch.randn(1000, requires_grad=True)
    offload = Watched()
    made: list[weakref.ref[torch.UntypedStorage]] = []

    def forward() -> Tensor:
        y = x * 2
        made.append(weakref.ref(y.untyped_storage()))
        return y.square().sum()

    out = saved(forward, offload)
    gc.collect()
    assert made[0]() is None
    assert len(offload._parked) == 1
    out.backward()
    gc.collect()
    assert len(offload._parked) == 0


def test_two_are_fetched_ahead_and_no_more() -> None:
    x = torch.randn(100, requires_grad=True)
    offload = Watched()

    def forward() -> Tensor:
        y = x
        for _ in range(5):
            y = (y * 2).square()
        return y.sum()

    out = saved(forward, offload)
    ahead: list[int] = []
    original = offload_module._Parked.take

    def taking(parked: Any) -> Any:
        storage = original(parked)
        ahead.append(sum(other._ahead is not None for other in offload.all))
        return storage

    offload_module._Parked.take = taking  # type: ignore[method-assign]
    try:
        out.backward()
    finally:
        offload_module._Parked.take = original  # type: ignore[method-assign]
    assert ahead == [2, 2, 2, 1, 0]
    assert offload.fetched == 5


def test_a_second_backward_finds_everything_again() -> None:
    x = torch.randn(100, requires_grad=True, dtype=torch.float64)
    out = saved(lambda: (x * 2).exp().sum(), Watched())
    out.backward(retain_graph=True)
    out.backward()
    torch.testing.assert_close(x.grad, 4 * (2 * x).exp().detach())


@pytest.mark.parametrize("least_bytes", [0, 1 << 20], ids=["sent away", "kept"])
@pytest.mark.parametrize("written", ["result", "weight"])
def test_what_is_written_to_before_backward_is_an_error_as_in_torch(written: str, least_bytes: int) -> None:
    x, weight = torch.randn(8, 8, requires_grad=True), nn.Parameter(torch.randn(8, 8))

    def forward() -> Tensor:
        y = torch.exp(x @ weight)
        total = y.sum() * 1
        with torch.no_grad():
            (y if written == "result" else weight).add_(1)
        return total

    offload = Watched(least_bytes)
    offload._road.at_once = False  # as on a GPU, where the copy may come after the write
    for loss in (forward(), saved(forward, offload)):
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()


def test_what_stays_is_freed_without_the_garbage_collector() -> None:
    def forward() -> None:
        x = torch.randn(8, 8, requires_grad=True)
        saved(lambda: x.exp().sum(), Watched(least_bytes=1 << 20)).backward()

    assert tensors_for_the_collector(forward) == 0


class Event:
    """Of a copy that is under way."""

    waited = False

    def synchronize(self) -> None:
        self.waited = True


def test_a_forward_pass_does_not_hold_what_one_that_was_given_up_sent() -> None:
    road, event = DeviceRoad(CPU), Event()
    road._leaving.append((event, torch.zeros(5)))  # type: ignore[arg-type]
    with Offload(road).saving():
        assert event.waited and not road._leaving


def with_offload(strategy: ff.Strategy) -> tuple[Any, Any]:
    """As on a GPU, for split tensors among others."""
    from fullframe.training import host as host_module

    expected, offload = steps(strategy), Watched()
    host_module.saving_to_host = lambda device: offload.saving  # type: ignore[attr-defined,assignment]
    try:
        found = steps(replace(strategy, offload=True))
    finally:
        host_module.saving_to_host = offload_module.saving_to_host  # type: ignore[attr-defined]
    assert offload.sent
    return found, expected


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_split_ranks(recompute: Any) -> None:
    strategy = ff.Strategy(width=2, microbatches=2, recompute=recompute)
    for found, expected in rank_group(2).run(with_offload, strategy):
        assert_same(found, expected)


def test_on_a_cpu_it_does_nothing_and_says_so() -> None:
    expected = steps(ff.Strategy())
    with pytest.warns(UserWarning, match="offload does nothing on a CPU"):
        found = steps(ff.Strategy(offload=True))
    assert_same(found, expected)


def test_copies_wait_for_the_device_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another GPU may be the current one, as where a model was sent to `cuda:1` and nobody said `set_device`."""
    second, noted = torch.device("cuda", 1), list[Any]()

    class Copying:
        def wait_stream(self, other: Any) -> None:
            noted.append(("copies wait", other))

        def record_event(self) -> str:
            return "copied"

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    class Computing(NamedTuple):
        device: torch.device | None = None

        def wait_event(self, event: Any) -> None:
            noted.append(("computing waits", self))

    road = DeviceRoad(CPU)
    road._device, road._stream = second, Copying()  # type: ignore[assignment]
    monkeypatch.setattr(torch.accelerator, "current_stream", Computing)
    assert road._copy(torch.ones(3), torch.zeros(3)) == "copied"
    road.wait("copied")  # type: ignore[arg-type]
    assert noted == [("copies wait", Computing(second)), ("computing waits", Computing(second))]


class Own(Tensor):
    pass


def test_tensors_that_their_bytes_alone_do_not_tell_are_not_taken() -> None:
    x = torch.ones(2, 2, dtype=torch.complex64)
    with torch.inference_mode():
        inferred = torch.ones(2)
    assert DeviceRoad(CPU).takes(x)
    for other in (x.conj(), x.conj().imag, inferred, x.as_subclass(Own), x.to_sparse(), x.to("meta")):
        assert not DeviceRoad(CPU).takes(other)
