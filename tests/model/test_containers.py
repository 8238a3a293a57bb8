"""What forward writes to lists, dicts and dataclasses that it is given: of the whole model, and of sharded blocks."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_unflatten

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.model.containers import Contents, put_back, values_in, with_own_contexts
from tests.exactness import mesh
from tests.rank_group import RankFailure, rank_group


@dataclass
class State:
    last: Any = None
    parts: list[Any] = field(default_factory=list)


class Registered:
    """With a list beside its leaf."""

    def __init__(self, last: Any = None, parts: list[Any] | None = None):
        self.last, self.parts = last, [] if parts is None else parts


register_pytree_node(Registered, lambda one: ([one.last], one.parts), lambda last, parts: Registered(*last, parts))


def _append(seen: Any, y: Tensor) -> None:
    seen.append(y)


def _set(seen: Any, y: Tensor) -> None:
    seen[len(seen)] = y


def _move(seen: Any, y: Tensor) -> None:
    """The first one goes, and comes in again behind."""
    seen[len(seen)] = y
    seen[0] = seen.pop(0) * 2


def _insert(seen: Any, y: Tensor) -> None:
    seen.insert(0, (y, seen[0] if seen else None))


def _to_state(state: Any, y: Tensor) -> None:
    state.parts.append(state.last)
    state.last = y


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in values_in(value) if isinstance(each, Tensor)]


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], None]]] = {
    "list": (list, _append),
    "deque": (deque, _append),
    "pairs": (list, _insert),
    "dict": (dict, _set),
    "OrderedDict": (OrderedDict, _move),
    "defaultdict": (lambda: defaultdict(list), _set),
    "dataclass": (State, _to_state),
    "a class that torch's trees know": (Registered, _to_state),
}


class Block(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.write = write

    def forward(self, x: Tensor, *, seen: Any) -> Tensor:
        y = self.two(self.one(x).sin())
        self.write(seen[0], y)
        return x + y  # type: ignore[no-any-return]


class Net(nn.Module):
    """Its blocks write to what it is given, and it writes to that itself."""

    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(write) for _ in range(3))
        self.write = write

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        for block in self.blocks:
            x = block(x, seen=(given["seen"],))
        self.write(given["seen"], x.cos())
        given["count"] = given.pop("number") + 1
        return x


def _step(kind: str, on: Any = None, **options: Any) -> Any:
    make, write = KINDS[kind]
    torch.manual_seed(0)
    net = Net(write).double()
    x = torch.randn(1, 3, 5, 9, dtype=torch.float64)
    model = net
    if on is not None:
        model, x = ff.parallelize(net, on, **options), ff.shard(x, on)  # type: ignore[assignment]
    seen = make()
    given = {"number": 3, "seen": seen}
    out = model(x, given)
    assert given["seen"] is seen and given["count"] == 4 and "number" not in given
    found = _tensors(seen)
    assert len(found) >= 4
    loss = out.square().mean() + sum((n + 1) * each.sin().mean() for n, each in enumerate(found))
    loss.backward()
    gradients = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in net.parameters()]
    wholes = [getattr(each, "full", lambda each=each: each)() for each in found]
    return [loss.detach(), *(whole.detach() for whole in wholes), *gradients]


def _all_kinds(height: int, width: int, sharded: bool) -> None:
    for kind in KINDS.keys() - ({"defaultdict"} if sharded else set()):  # with tensors in it FSDP2 ends in an error
        found = _step(kind, mesh(height, width), shard_parameters=sharded)
        torch.testing.assert_close(found, _step(kind), rtol=1e-11, atol=1e-13, msg=lambda m, kind=kind: f"{kind}: {m}")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("height", "width"), [(1, 2), (2, 1)])
def test_what_forward_writes_to_what_it_is_given_is_one_process_s(height: int, width: int, sharded: bool) -> None:
    rank_group(2).run(_all_kinds, height, width, sharded)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor, one: list[Any], other: list[Any]) -> Tensor:
        one.append(x)
        return self.conv(x)  # type: ignore[no-any-return]


def _given_twice() -> None:
    seen: list[Any] = []
    ff.parallelize(Twice(), mesh(1, 2))(ff.shard(torch.ones(1, 3, 4, 6), mesh(1, 2)), seen, seen)


def test_a_list_that_is_given_twice_is_refused() -> None:
    with pytest.raises(RankFailure, match="writes to a list that it is given twice"):
        rank_group(2).run(_given_twice)


def test_what_was_given_stays_itself() -> None:
    inner, first = [1], object()
    given = {"a": [first, inner], "b": State(last=inner)}
    values = values_in(given)
    copy = {"a": [first, [1]], "b": State(last=[1])}
    contents = Contents(copy)
    assert contents.changed() == {}
    copy["a"].insert(0, copy["a"].pop())  # type: ignore[attr-defined]
    put_back(values, contents.changed())
    assert given["a"][0] is inner and given["a"][1] is first  # type: ignore[index]
    with pytest.raises(StrategyError, match="given twice"):
        put_back(values_in([inner, inner]), {1: [2]})


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)

    def forward(self, one: Registered) -> Tensor:
        y: Tensor = self.conv(one.last) * (1 + len(one.parts))
        one.parts.append(1)
        return y


def test_a_block_that_is_recomputed_writes_once() -> None:
    net, found, one = nn.Sequential(Counting()), [], Registered(torch.ones(1, 1, 2, 2))
    step = ff.TrainStep(
        net,
        lambda model, batch: model(one).mean(),
        torch.optim.SGD(net.parameters(), lr=0.0),
        ff.Strategy(recompute="blocks", recompute_modules=("0",)),
    )
    for _ in range(3):
        step({"x": torch.ones(1)})
        found.append((len(one.parts), float(net[0].conv.bias.grad)))  # type: ignore[union-attr, arg-type]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_containers_in_a_circle_are_walked_once() -> None:
    state = State()
    state.last = state
    assert values_in(state)[0] is state and len(values_in(state)) == 3


def test_the_order_of_keys_and_attributes_beside_the_fields_are_put_back() -> None:
    (given, target), (state, of_caller) = ({"a": 1, "b": 2} for _ in range(2)), (State(), State())
    contents = Contents([given, state])
    given["a"], state.more = given.pop("a"), 3  # type: ignore[attr-defined]
    put_back(values_in([target, of_caller]), contents.changed())
    assert [*target.items()] == [("b", 2), ("a", 1)] and vars(of_caller)["more"] == 3


@pytest.mark.parametrize("beside", [[1], {1}, {"a": 1}, deque([1], 2)])
def test_what_lies_beside_the_leaves_is_copied_as_it_is(beside: Any) -> None:
    leaves, tree = tree_flatten(Registered(torch.ones(1), beside))
    own = tree_unflatten(leaves, with_own_contexts(tree)).parts
    assert own == beside and own is not beside
    assert getattr(own, "maxlen", None) == getattr(beside, "maxlen", None)
