"""DistributedOptimizer on 2 ranks against one process with the whole batch, in float64; and its misuse."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
import fullframe.horovod as hvd
from fullframe.errors import GradientError
from fullframe.horovod.membership import _Mine
from fullframe.horovod.rendezvous import Place
from tests.rank_group import RankFailure, rank_group

STEPS, BATCH = 3, 8


@contextlib.contextmanager
def initialized() -> Iterator[None]:
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()


class Model(nn.Module):
    """With a table whose gradient may be sparse, and a branch that is not always taken."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 4, sparse=sparse).double()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.other = nn.Linear(4, 3).double()

    def forward(self, x: Tensor, other: bool) -> Tensor:
        rows = self.table(x)
        return self.body(rows) + self.other(rows) if other else self.body(rows)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 7, (BATCH,), generator=generator), torch.randn(
        BATCH, 3, generator=generator, dtype=torch.float64
    )


def weights_of_one_process(kind: str, other: bool, options: dict[str, Any]) -> list[Tensor]:
    model = Model()
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    for step in range(STEPS):
        x, target = batch(step)
        optimizer.zero_grad()
        losses = (model(x, False) - target).square()
        if other:  # on the first rank's half only
            losses = torch.cat([(model(x[:4], True) - target[:4]).square(), losses[4:]])
        losses.mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(kind: str, other: bool, sparse: bool, options: dict[str, Any], distributed: dict[str, Any]) -> list[Tensor]:
    with initialized():
        model = Model(sparse)
        plain = getattr(torch.optim, kind)(model.parameters(), **options)
        distributed = {**distributed}
        if distributed.get("groups") == "lists":
            distributed["groups"] = [list(model.body.parameters()), list(model.other.parameters())]
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **distributed)
        assert isinstance(optimizer, type(plain))
        passes = distributed.get("backward_passes_per_step", 1)
        scale = hvd.size() if distributed.get("op") == hvd.Sum else 1
        for step in range(STEPS):
            x, target = (part.tensor_split(hvd.size())[hvd.rank()] for part in batch(step))
            optimizer.zero_grad()
            for some, wanted in zip(x.split(4 // passes), target.split(4 // passes), strict=True):
                loss = (model(some, other and hvd.rank() == 0) - wanted).square().mean()
                (loss / passes / scale).backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]


VARIANTS: dict[str, tuple[str, bool, bool, dict[str, Any], dict[str, Any]]] = {
    "SGD": ("SGD", False, False, {"lr": 0.1, "momentum": 0.9}, {}),
    "Adam": ("Adam", False, False, {"lr": 0.01}, {}),
    "sum": ("SGD", False, False, {"lr": 0.1}, {"op": hvd.Sum}),
    "two passes": ("SGD", False, False, {"lr": 0.1}, {"backward_passes_per_step": 2}),
    "predivided": ("SGD", False, False, {"lr": 0.1}, {"gradient_predivide_factor": 2.0}),
    "two groups": ("SGD", False, False, {"lr": 0.1}, {"groups": 2}),
    "groups": ("SGD", False, False, {"lr": 0.1}, {"groups": "lists"}),
    "unused on one rank": ("SGD", True, False, {"lr": 0.1}, {}),
    "sparse": ("SGD", False, True, {"lr": 0.1}, {}),
    "sparse as dense": ("Adam", False, True, {"lr": 0.01}, {"sparse_as_dense": True}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_numbers_are_those_of_one_process(name: str) -> None:
    kind, other, sparse, options, distributed = VARIANTS[name]
    expected = weights_of_one_process(kind, other, options)
    for found in rank_group(2).run(train, kind, other, sparse, options, distributed):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def doubled() -> list[Tensor]:
    """Gradients that are changed before `step`, which reduces them, as `other` has none; and have a graph."""
    with initialized():
        model = Model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(STEPS):
            x, target = (part.tensor_split(hvd.size())[hvd.rank()] for part in batch(step))
            optimizer.zero_grad()
            with warnings.catch_warnings(action="ignore"):  # torch's, of the graph that gradients keep
                (model(x, False) - target).square().mean().backward(create_graph=True)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.detach().mul_(2)
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]


def test_what_is_reduced_in_step_is_what_gradients_are_then() -> None:
    expected = weights_of_one_process("SGD", False, {"lr": 0.2})
    for found in rank_group(2).run(doubled):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_compressed_gradients_are_near() -> None:
    options, compressed = {"lr": 0.1}, {"compression": hvd.Compression.fp16}
    expected = weights_of_one_process("SGD", False, options)
    for found in rank_group(2).run(train, "SGD", False, False, options, compressed):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
        assert not all(map(torch.equal, found, expected))


def adasum_step() -> tuple[list[Tensor], list[list[Tensor]]]:
    """The weights after one step, and each rank's own update."""
    with initialized():
        model = Model()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=hvd.Adasum)
        x, target = (part.tensor_split(hvd.size())[hvd.rank()] for part in batch(0))
        (model(x, True) - target).square().mean().backward()
        own = [-0.1 * parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        with pytest.raises(AssertionError, match="not supported when using Adasum"), optimizer.skip_synchronize():
            pass
        changes = [p.detach() - start for p, start in zip(model.parameters(), before, strict=True)]
        return changes, hvd.allgather_object(own)


def test_adasum_reduces_the_updates() -> None:
    for changes, (first, second) in rank_group(2).run(adasum_step):
        for change, a, b in zip(changes, first, second, strict=True):
            dot = (a * b).sum()
            expected = (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b
            torch.testing.assert_close(change, expected, rtol=1e-9, atol=1e-12)


CLOSURES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "LBFGS": {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"},
}


def by_closures(alone: bool) -> list[list[Tensor]]:
    """The weights after steps whose losses and gradients a closure computes; of a closure without backward too."""
    with contextlib.nullcontext() if alone else initialized():
        found = []
        for kind, options in CLOSURES.items():
            model = Model()
            optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
            if not alone:
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            for step in range(STEPS):
                x, target = (part if alone else part.tensor_split(hvd.size())[hvd.rank()] for part in batch(step))

                def closure(model=model, optimizer=optimizer, x=x, target=target) -> Tensor:
                    optimizer.zero_grad()
                    loss = (model(x, True) - target).square().mean()
                    loss.backward()
                    return loss

                if kind == "SGD" and step == 1:
                    loss = closure()
                    optimizer.step(lambda loss=loss: loss)
                else:
                    optimizer.step(closure)
            found.append([parameter.detach() for parameter in model.parameters()])
        return found


def test_what_a_closure_computes_is_reduced() -> None:
    for found in rank_group(2).run(by_closures, False):
        torch.testing.assert_close(found, by_closures(True), rtol=1e-9, atol=1e-12)


def uneven() -> tuple[int, list[Tensor]]:
    """Rank 1 has two batches, rank 0 one; zeros stand in."""
    with initialized():
        model = Model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(hvd.rank() + 1):
            x, target = batch(step)
            optimizer.zero_grad()
            (model(x, False) - target).square().mean().backward()
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        return last, [parameter.detach() for parameter in model.parameters()]


def test_uneven_data_through_join() -> None:
    model = Model()
    for step in range(2):
        model.zero_grad()
        x, target = batch(step)
        ((model(x, False) - target).square().mean() * (1.0 if step == 0 else 0.5)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    for last, found in rank_group(2).run(uneven):
        assert last == 1
        torch.testing.assert_close(found, [parameter.detach() for parameter in model.parameters()])


def misuse(which: str) -> None:
    with initialized():
        model = Model()
        plain, named = torch.optim.SGD(model.parameters(), lr=0.1), list(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(plain, named)

        def backward() -> None:
            model(batch(0)[0], True).sum().backward()

        def twice() -> None:
            backward()
            backward()

        def early() -> None:
            backward()
            with optimizer.skip_synchronize():
                optimizer.step()

        def zero() -> None:
            backward()
            optimizer.zero_grad()

        calls: dict[str, tuple[type[Exception], Callable[[], Any], str]] = {
            "no tuples": (
                ValueError,
                lambda: hvd.DistributedOptimizer(plain, [p for _, p in named]),
                "sequence of tuples",
            ),
            "same names": (
                ValueError,
                lambda: hvd.DistributedOptimizer(plain, [("a", p) for _, p in named]),
                "duplicates: a",
            ),
            "without names": (ValueError, lambda: hvd.DistributedOptimizer(plain, named[1:]), "were not named"),
            "predivided sum": (
                ValueError,
                lambda: hvd.DistributedOptimizer(plain, named, op=hvd.Sum, gradient_predivide_factor=2.0),
                "not supported with op != Average",
            ),
            "maximum": (ValueError, lambda: hvd.DistributedOptimizer(plain, named, op=hvd.Max), "not Max"),
            "groups": (ValueError, lambda: hvd.DistributedOptimizer(plain, named, groups=-1), "non-negative"),
            "too many passes": (AssertionError, twice, "Increase backward_passes_per_step"),
            "stepped too early": (AssertionError, early, "before optimizer.synchronize"),
            "zero_grad too early": (AssertionError, zero, "prohibited as it can cause a race condition"),
        }
        kind, call, said = calls[which]
        with pytest.raises(kind, match=said):
            call()
        optimizer.synchronize()


@pytest.mark.parametrize("which", ["no tuples", "same names", "without names", "predivided sum", "maximum", "groups",
                                   "too many passes", "stepped too early", "zero_grad too early"])  # fmt: skip
def test_misuse_is_refused(which: str) -> None:
    rank_group(2).run(misuse, which)


class Doubled(hvd.Compression.none):  # type: ignore[misc]
    """Sends twice of it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor * 2, 2

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor / ctx


class Tenfold(Doubled):
    """Sends ten times of it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor * 10, 10


def apart(which: str) -> None:
    """Rank 0 reduces otherwise; every rank is told in the message by which they would be reduced."""
    with initialized():
        model, first = Model(), hvd.rank() == 0
        parameters, options = list(model.parameters()), {}
        if which == "order" and first:
            parameters[1], parameters[5] = parameters[5], parameters[1]
        if which == "op" and first:
            options["op"] = hvd.Sum
        if which == "backward_passes_per_step" and first:
            options[which] = 2
        if which == "compressor":
            options["compression"] = Doubled if first else Tenfold
        if which == "setting":
            options["compression"] = type("Half", (hvd.Compression.fp16,), {"ratio": 0.5 if first else 0.25})
        plain = torch.optim.SGD(parameters, lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
        for _ in range(2 if which == "backward_passes_per_step" and first else 1):
            model(batch(0)[0], True).sum().backward()
        said = {
            "order": "body.0.weight",
            "op": "op=Sum, another rank has op=Average",
            "compressor": "compression=Doubled, another rank has compression=Tenfold",
            "setting": "Half.ratio=0.5, another rank has Half.ratio=0.25",
        }.get(which, f"{which}=2")
        with pytest.raises(hvd.HorovodInternalError, match=said):
            optimizer.step()


@pytest.mark.parametrize("which", ["op", "backward_passes_per_step", "order", "compressor", "setting"])
def test_ranks_that_reduce_differently_are_told(which: str) -> None:
    rank_group(2).run(apart, which)


def adasum_apart(which: str) -> None:
    with initialized():
        one, other = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
        first, options = hvd.rank() == 0, {}
        if which == "compressor":
            options["compression"] = Doubled if first else Tenfold
        order = [other, one] if which == "order" and first else [one, other]
        named = [("one", one), ("other", other)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(order, lr=0.1), named, op=hvd.Adasum, **options)
        (one + 2 * other).sum().backward()
        said = {"order": r"other \(3,\), another rank has one \(3,\)", "compressor": "compression=Doubled, another"}
        with pytest.raises(hvd.HorovodInternalError, match=said[which]):
            optimizer.step()


@pytest.mark.parametrize("which", ["order", "compressor"])
def test_ranks_whose_adasum_differs_are_told(which: str) -> None:
    rank_group(2).run(adasum_apart, which)


def drifting(which: str, small: bool) -> None:
    """From its second step on rank 0 does otherwise; all hear of it before they apply another one."""
    with initialized():
        model = nn.Linear(3, 2) if small else Model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

        def step(leaves_out: bool) -> None:
            optimizer.zero_grad()
            (model(torch.ones(2, 3)) if small else model(batch(0)[0], True)).sum().backward()
            optimizer.synchronize()
            if not leaves_out:
                with optimizer.skip_synchronize():
                    optimizer.step()

        for _ in range(5):
            step(False)
        if which == "lr" and hvd.rank() == 0:
            optimizer.param_groups[0]["lr"] = 0.05
        if which == "all leave it out":
            step(True)
        elif which == "leaves it out":
            step(hvd.rank() == 0)
        elif which == "twice" and hvd.rank() == 0:
            with optimizer.skip_synchronize():
                optimizer.step()
        if which == "all leave it out":
            step(False)
        else:
            with pytest.raises(hvd.HorovodInternalError, match="another lr or another option, or has stepped more or"):
                step(False)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("which", ["lr", "leaves it out", "twice", "all leave it out"])
def test_ranks_that_step_differently_are_told(which: str, small: bool) -> None:
    rank_group(2).run(drifting, which, small)


def sparse_apart() -> None:
    with initialized():
        table = nn.Embedding(3, 2, sparse=True)
        op = hvd.Sum if hvd.rank() == 0 else hvd.Average
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), op=op)
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(hvd.HorovodInternalError, match="op=Sum, another rank has op=Average"):
            optimizer.step()


def test_ranks_that_reduce_sparse_gradients_differently_are_told() -> None:
    rank_group(2).run(sparse_apart)


def sparse_now_and_then() -> Tensor:
    """After a first step rank 1 looks nothing up."""
    with initialized():
        table = nn.Embedding.from_pretrained(torch.ones(3, 2), freeze=False, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        for step in range(2):
            optimizer.zero_grad()
            if hvd.rank() == 0 or step == 0:
                table(torch.tensor([step])).sum().backward()
            optimizer.step()
        return table.weight.detach()


def test_a_rank_without_a_sparse_gradient_adds_nothing_to_it() -> None:
    for found in rank_group(2).run(sparse_now_and_then):
        assert found.tolist() == [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]


def trained_later(way: str, wraps: bool) -> list[Tensor]:
    """The table is frozen in the first step; then it is one of the optimizer's parameters, or becomes one."""
    model = Model()
    model.table.requires_grad_(False)
    at_once = [p for p in model.parameters() if way == "unfrozen" or p.requires_grad]
    optimizer = torch.optim.SGD(at_once, lr=0.1, momentum=0.9)
    if wraps:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(STEPS):
        if step == 1:
            model.table.requires_grad_(True)
            if way == "added":
                optimizer.add_param_group({"params": list(model.table.parameters()), "lr": 0.2})
        x, target = (part.tensor_split(hvd.size())[hvd.rank()] if wraps else part for part in batch(step))
        optimizer.zero_grad()
        (model(x, False) - target).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained_later_on_ranks(way: str) -> list[Tensor]:
    with initialized():
        return trained_later(way, wraps=True)


@pytest.mark.parametrize("way", ["unfrozen", "added"])
def test_what_is_trained_later_is_reduced_too(way: str) -> None:
    expected = trained_later(way, wraps=False)
    for found in rank_group(2).run(trained_later_on_ranks, way):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


class Growing:
    """In place of an elastic launcher's: this rank is alone at first, then one of two."""

    epoch = 0

    def meet(self) -> Place:
        self.epoch += 1
        return Place(0, 1, 0, 1) if self.epoch == 1 else Place(dist.get_rank(), 2, dist.get_rank(), 2)

    def connected(self) -> dist.Store:
        return dist.HashStore() if self.epoch == 1 else dist.distributed_c10d._get_default_store()

    def check(self) -> None:
        pass


def grown() -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Mine, "membership", Growing())
        model = Model()
        with initialized():
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        with initialized():
            for step in range(STEPS):
                x, target = (part.tensor_split(2)[hvd.rank()] for part in batch(step))
                optimizer.zero_grad()
                (model(x, False) - target).square().mean().backward()
                optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_an_optimizer_of_a_worker_that_began_alone_reduces_with_those_that_come() -> None:
    expected = weights_of_one_process("SGD", False, {"lr": 0.1})
    for found in rank_group(2).run(grown):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def clipped() -> list[Tensor]:
    with initialized():
        model = Model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        x, target = (part.tensor_split(hvd.size())[hvd.rank()] for part in batch(0))
        (model(x, False) - target).square().mean().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with warnings.catch_warnings(), optimizer.skip_synchronize():
            warnings.simplefilter("error")
            optimizer.step()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
            optimizer.step()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_can_be_clipped_between_synchronize_and_step() -> None:
    for grads in rank_group(2).run(clipped):
        assert sum(grad.square().sum() for grad in grads).sqrt() < 0.0101  # type: ignore[union-attr]


def beside_the_split() -> None:
    mesh = ff.init_mesh(width=2)
    with initialized():
        model = nn.Conv2d(3, 4, 3, padding=1)
        split = ff.parallelize(model, mesh)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        x = torch.ones(1, 3, 8, 8)
        with pytest.raises(GradientError, match=r"ff\.parallelize averages the gradient of 'weight'|'bias'"):
            split(ff.shard(x, mesh)).sum().backward()
        del optimizer


def test_gradients_that_the_split_averages_are_refused() -> None:
    with contextlib.suppress(RankFailure):  # what the broken backward pass leaves behind is DDP's
        rank_group(2).run(beside_the_split)
        return
    rank_group(2).close()
    rank_group(2).run(beside_the_split)
