"""Horovod's public API asked of every rank: `fullframe horovodrun -np 2 python tests/horovod/conformance.py`.

Written from Horovod's documentation. Every rank knows what all ranks give, so it works out by itself, in plain torch,
what must come. Prints one JSON object: what went wrong, by case, "" where nothing did. With `by-gloo` the ranks ask
each other as those of several machines do.
"""

import json
import linecache
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fullframe.horovod import collectives

CASES: dict[str, Callable[[], None]] = {}
hvd: Any = None

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *WHOLE, torch.bool)


def case(*values: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function once for each combination of the lists given."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for chosen in product(*values):
            words = "-".join(str(v).removeprefix("torch.") for v in chosen)
            name = f"{function.__name__}[{words}]" if words else function.__name__
            assert name not in CASES
            CASES[name] = lambda chosen=chosen: function(*chosen)
        return function

    return register


def ranks() -> range:
    return range(hvd.size())


def of_rank(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """What a rank gives: small numbers, whose sums every dtype holds exactly."""
    numbers = torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(17 * rank + len(shape)))
    return numbers > 4 if dtype == torch.bool else numbers.to(dtype)


def shape_of(dims: int) -> tuple[int, ...]:
    return (4, 3, 2)[:dims]


def summed(tensors: list[Tensor]) -> Tensor:
    whole = tensors[0].clone()
    for tensor in tensors[1:]:
        whole += tensor
    return whole


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype, f"{found.dtype}, expected {expected.dtype}"
    assert found.shape == expected.shape, f"{tuple(found.shape)}, expected {tuple(expected.shape)}"
    near = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6}.get(expected.dtype, 1e-12)
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any], said: str = ""
) -> None:
    try:
        call()
    except kind as error:
        assert said in str(error), f"'{error}' does not say '{said}'"
        return
    raise AssertionError(f"nothing was raised; expected {kind}")


# Allreduce


@case(DTYPES, (1, 2, 3))
def allreduce_sum(dtype: torch.dtype, dims: int) -> None:
    given = [of_rank(rank, dtype, shape_of(dims)) for rank in ranks()]
    mine = given[hvd.rank()].clone()
    same(hvd.allreduce(mine, op=hvd.Sum), summed(given))
    same(mine, given[hvd.rank()])  # it is left as it was


@case((*FLOATS, *WHOLE), (1, 2, 3))
def allreduce_average(dtype: torch.dtype, dims: int) -> None:
    given = [of_rank(rank, dtype, shape_of(dims)) for rank in ranks()]
    total = summed([tensor.double() for tensor in given]) / hvd.size()
    same(hvd.allreduce(given[hvd.rank()]), (total if dtype in FLOATS else total.trunc()).to(dtype))


@case(("Min", "Max", "Product"), (*FLOATS, torch.uint8, torch.int32, torch.int64))
def allreduce_other(op: str, dtype: torch.dtype) -> None:
    given = torch.stack([of_rank(rank, dtype, shape_of(2)) for rank in ranks()])
    expected = {"Min": lambda x: x.amin(0), "Max": lambda x: x.amax(0), "Product": lambda x: x.double().prod(0)}[op]
    same(hvd.allreduce(given[hvd.rank()], op=getattr(hvd, op)), expected(given).to(dtype))


@case(("allreduce_", "allreduce_async_"), (torch.float32, torch.int64), (1, 2, 3))
def allreduce_in_place(function: str, dtype: torch.dtype, dims: int) -> None:
    given = [of_rank(rank, dtype, shape_of(dims)) for rank in ranks()]
    mine = given[hvd.rank()].clone()
    result = getattr(hvd, function)(mine, op=hvd.Sum)
    result = hvd.synchronize(result) if isinstance(result, int) else result
    assert result is mine
    same(mine, summed(given))


@case((torch.float32, torch.float64))
def allreduce_in_place_of_what_is_not_contiguous(dtype: torch.dtype) -> None:
    given = [of_rank(rank, dtype, (4, 3)) for rank in ranks()]
    mine = given[hvd.rank()].clone()
    hvd.allreduce_(mine.t(), op=hvd.Sum)
    same(mine, summed(given))


@case(("allgather", "broadcast"), (torch.float32, torch.int64))
def moved_of_a_column_with_one_row(function: str, dtype: torch.dtype) -> None:  # to torch it has no gaps
    given = [of_rank(rank, dtype, (1, 3)) for rank in ranks()]
    found = getattr(hvd, function)(given[hvd.rank()][:, 1], *([0] if function == "broadcast" else []))
    same(found, torch.cat(given)[:, 1] if function == "allgather" else given[0][:, 1])


@case((torch.float32, torch.float64, torch.int32), ("pre", "post"))
def allreduce_scaled(dtype: torch.dtype, which: str) -> None:
    given = [of_rank(rank, dtype, shape_of(2)) for rank in ranks()]
    factors = {"prescale_factor": 0.5} if which == "pre" else {"postscale_factor": 2.5}
    found = hvd.allreduce(given[hvd.rank()], op=hvd.Sum, **factors)
    if which == "pre":
        expected = summed([(tensor.double() * 0.5).to(dtype) for tensor in given])
    else:
        expected = (summed(given).double() * 2.5).to(dtype)
    same(found, expected)


@case((True, False))
def allreduce_by_the_old_average(average: bool) -> None:
    given = [of_rank(rank, torch.float32, (3,)) for rank in ranks()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = hvd.allreduce(given[hvd.rank()], average=average)
    (warning,) = (warning for warning in said if "replaced with `op`" in str(warning.message))
    assert "hvd.allreduce(" in linecache.getline(warning.filename, warning.lineno)  # the line of the program
    same(found, summed(given) / (hvd.size() if average else 1))


@case((torch.float32, torch.float64, torch.int32))
def allreduce_compressed(dtype: torch.dtype) -> None:
    given = [of_rank(rank, dtype, shape_of(2)) for rank in ranks()]
    found = hvd.allreduce(given[hvd.rank()], op=hvd.Sum, compression=hvd.Compression.fp16)
    same(found, summed(given))


@case((torch.float32, torch.float64), ("Sum", "Average"), (1, 2, 3))
def allreduce_gradient(dtype: torch.dtype, op: str, dims: int) -> None:
    mine = of_rank(hvd.rank(), dtype, shape_of(dims)).requires_grad_()
    weights = [of_rank(rank + 100, dtype, shape_of(dims)) for rank in ranks()]
    hvd.allreduce(mine, op=getattr(hvd, op)).backward(weights[hvd.rank()])
    same(mine.grad, summed(weights) / (hvd.size() if op == "Average" else 1))


@case()
def allreduce_of_many_at_once_is_fused_and_right() -> None:
    given = [[of_rank(rank + 31 * i, torch.float32, (i + 1,)) for i in range(40)] for rank in ranks()]
    handles = [hvd.allreduce_async(tensor, op=hvd.Sum) for tensor in given[hvd.rank()]]
    for i, handle in enumerate(handles):
        same(hvd.synchronize(handle), summed([tensors[i] for tensors in given]))


@case((torch.float32, torch.float64))
def allreduce_of_nothing(dtype: torch.dtype) -> None:
    same(hvd.allreduce(torch.zeros(0, 3, dtype=dtype)), torch.zeros(0, 3, dtype=dtype))
    same(hvd.allreduce(torch.tensor(2.0, dtype=dtype), op=hvd.Sum), torch.tensor(2.0 * hvd.size(), dtype=dtype))


@case(("grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"))
def grouped(function: str) -> None:
    dtypes = (torch.float32, torch.float64, torch.float32, torch.int32)
    given = [[of_rank(rank, dtype, shape_of(i % 3 + 1)) for i, dtype in enumerate(dtypes)] for rank in ranks()]
    mine = [tensor.clone() for tensor in given[hvd.rank()]]
    found = getattr(hvd, function)(mine, op=hvd.Sum)
    found = hvd.synchronize(found) if isinstance(found, int) else found
    for i, tensor in enumerate(found):
        assert (tensor is mine[i]) == function.endswith("_")
        same(tensor, summed([tensors[i] for tensors in given]))


@case(("Sum", "Average"))
def grouped_allreduce_gradient(op: str) -> None:
    mine = [of_rank(hvd.rank(), torch.float64, shape_of(dims)).requires_grad_() for dims in (1, 2)]
    found = hvd.grouped_allreduce(mine, op=getattr(hvd, op))
    sum((tensor * (hvd.rank() + 1)).sum() for tensor in found).backward()
    expected = sum(rank + 1 for rank in ranks()) / (hvd.size() if op == "Average" else 1)
    for tensor in mine:
        same(tensor.grad, torch.full_like(tensor, expected))


# Adasum


@case((torch.float16, torch.float32, torch.float64), ("equal", "orthogonal", "any"))
def adasum(dtype: torch.dtype, which: str) -> None:
    given = [of_rank(0 if which == "equal" else rank, dtype, (6,)) + 1 for rank in ranks()]
    if which == "orthogonal":
        given = [torch.eye(6, dtype=dtype)[rank] * (rank + 1) for rank in ranks()]
    if hvd.size() & (hvd.size() - 1):
        return raises(NotImplementedError, lambda: hvd.allreduce(given[hvd.rank()], op=hvd.Adasum), "power of 2")
    level = [tensor.double() for tensor in given]
    while len(level) > 1:
        level = [
            (1 - a.dot(b) / (2 * a.dot(a))) * a + (1 - a.dot(b) / (2 * b.dot(b))) * b
            for a, b in zip(level[::2], level[1::2], strict=True)
        ]
    same(hvd.allreduce(given[hvd.rank()], op=hvd.Adasum), level[0].to(dtype))


# Allgather


@case(DTYPES, (1, 2, 3))
def allgather(dtype: torch.dtype, dims: int) -> None:
    given = [of_rank(rank, dtype, shape_of(dims)) for rank in ranks()]
    same(hvd.allgather(given[hvd.rank()]), torch.cat(given))


@case(DTYPES, (1, 2))
def allgather_of_unequally_many_rows(dtype: torch.dtype, dims: int) -> None:
    given = [of_rank(rank, dtype, (2 * rank, 3)[:dims]) for rank in ranks()]  # rank 0 has none
    same(hvd.allgather(given[hvd.rank()]), torch.cat(given))


@case((1, 2, 3))
def allgather_async(dims: int) -> None:
    given = [of_rank(rank, torch.float32, shape_of(dims)) for rank in ranks()]
    same(hvd.synchronize(hvd.allgather_async(given[hvd.rank()], name="some")), torch.cat(given))


@case((1, 2, 3))
def allgather_gradient(dims: int) -> None:
    shape = (hvd.rank() + 1, *shape_of(dims)[1:])
    mine = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    whole = hvd.allgather(mine)
    whole.backward(torch.full_like(whole, float(hvd.rank() + 1)))
    same(mine.grad, torch.full_like(mine, sum(rank + 1 for rank in ranks()) / hvd.size()))


@case(("grouped_allgather", "grouped_allgather_async"))
def grouped_gather(function: str) -> None:
    given = [[of_rank(rank, dtype, (rank + 1, 2)) for dtype in (torch.float32, torch.int64)] for rank in ranks()]
    found = getattr(hvd, function)(given[hvd.rank()])
    found = hvd.synchronize(found) if isinstance(found, int) else found
    for i, tensor in enumerate(found):
        same(tensor, torch.cat([tensors[i] for tensors in given]))


# Broadcast


@case(DTYPES, (1, 2, 3))
def broadcast(dtype: torch.dtype, dims: int) -> None:
    given = [of_rank(rank, dtype, shape_of(dims)) for rank in ranks()]
    root = dims % hvd.size()
    mine = given[hvd.rank()].clone()
    same(hvd.broadcast(mine, root), given[root])
    same(mine, given[hvd.rank()])


@case(("broadcast_", "broadcast_async_", "broadcast_async"), (1, 2))
def broadcast_other(function: str, dims: int) -> None:
    given = [of_rank(rank, torch.float32, shape_of(dims)) for rank in ranks()]
    mine = given[hvd.rank()].clone()
    found = getattr(hvd, function)(mine, 1, name="b")
    found = hvd.synchronize(found) if isinstance(found, int) else found
    same(found, given[1])
    assert (found is mine) == function.endswith("_")


@case((1, 2, 3))
def broadcast_gradient(dims: int) -> None:
    mine = torch.ones(shape_of(dims), dtype=torch.float64, requires_grad=True)
    hvd.broadcast(mine, 1).backward(torch.full_like(mine, float(hvd.rank() + 1)))
    mean = sum(rank + 1 for rank in ranks()) / hvd.size()
    same(mine.grad, torch.full_like(mine, mean if hvd.rank() == 1 else 0.0))


# Alltoall


@case(DTYPES, (1, 2, 3))
def alltoall(dtype: torch.dtype, dims: int) -> None:
    shape = (2 * hvd.size(), *shape_of(dims)[1:])
    given = [of_rank(rank, dtype, shape) for rank in ranks()]
    here = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
    same(hvd.alltoall(given[hvd.rank()]), torch.cat([tensor[here] for tensor in given]))


@case((torch.float32, torch.int64, torch.bool), (1, 2), ("list", "tensor"))
def alltoall_with_splits(dtype: torch.dtype, dims: int, kind: str) -> None:
    splits = list(ranks())  # rank 0 gets nothing
    given = [of_rank(rank, dtype, (sum(splits), 3)[:dims]) for rank in ranks()]
    asked = torch.tensor(splits, dtype=torch.int32) if kind == "tensor" else splits
    found, received = hvd.alltoall(given[hvd.rank()], splits=asked)
    first = sum(splits[: hvd.rank()])
    same(found, torch.cat([tensor[first : first + hvd.rank()] for tensor in given]))
    assert received.tolist() == [hvd.rank()] * hvd.size()


@case((1, 2))
def alltoall_gradient(dims: int) -> None:
    rows = hvd.size() * (hvd.rank() + 1)  # unequally many to each
    mine = torch.ones((rows, 3)[:dims], dtype=torch.float64, requires_grad=True)
    found, _ = hvd.alltoall(mine, splits=[hvd.rank() + 1] * hvd.size())
    found.backward(torch.full_like(found, float(hvd.rank() + 1)))
    expected = torch.arange(1.0, hvd.size() + 1, dtype=torch.float64).repeat_interleave(hvd.rank() + 1)
    same(mine.grad, expected if dims == 1 else expected[:, None].expand(-1, 3))


@case(("async",))
def alltoall_by_handle(_: str) -> None:
    mine = torch.arange(hvd.size())
    same(hvd.synchronize(hvd.alltoall_async(mine)), torch.full((hvd.size(),), hvd.rank()))
    found, received = hvd.synchronize(hvd.alltoall_async(mine, splits=[1] * hvd.size()))
    same(found, torch.full((hvd.size(),), hvd.rank()))
    assert received.tolist() == [1] * hvd.size()


# Reducescatter


@case((*FLOATS, *WHOLE), ("Sum", "Average"))
def reducescatter(dtype: torch.dtype, op: str) -> None:
    given = [of_rank(rank, dtype, (5, 2)) for rank in ranks()]  # 5 rows: the first ranks have one more
    whole = summed([tensor.double() for tensor in given]) / (hvd.size() if op == "Average" else 1)
    whole = (whole if dtype in FLOATS else whole.trunc()).to(dtype)
    same(hvd.reducescatter(given[hvd.rank()], op=getattr(hvd, op)), whole.tensor_split(hvd.size())[hvd.rank()])


@case((1, 3), ("pre", "post"))
def reducescatter_scaled(dims: int, which: str) -> None:
    given = [of_rank(rank, torch.float64, (hvd.size(), 3, 2)[:dims]) for rank in ranks()]
    factors = {"prescale_factor": 0.5} if which == "pre" else {"postscale_factor": 0.5}
    expected = (summed(given) * 0.5).tensor_split(hvd.size())[hvd.rank()]
    same(hvd.reducescatter(given[hvd.rank()], op=hvd.Sum, **factors), expected)


@case(("Sum", "Average"), (1, 2, 3))
def reducescatter_gradient(op: str, dims: int) -> None:
    mine = torch.ones((hvd.size(), 3, 2)[:dims], dtype=torch.float64, requires_grad=True)
    found = hvd.reducescatter(mine, op=getattr(hvd, op))
    found.backward(torch.full_like(found, float(hvd.rank() + 1)))
    expected = torch.arange(1.0, hvd.size() + 1, dtype=torch.float64) * (hvd.size() if op == "Sum" else 1)
    same(mine.grad, expected.view(-1, *[1] * (dims - 1)).expand(mine.shape))


@case(("reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async"))
def reducescatter_other(function: str) -> None:
    given = [[of_rank(rank + i, torch.float32, (4, 2)) for i in range(2)] for rank in ranks()]
    group = "grouped" in function
    found = getattr(hvd, function)(given[hvd.rank()] if group else given[hvd.rank()][0], op=hvd.Sum)
    found = hvd.synchronize(found) if isinstance(found, int) else found
    for i, tensor in enumerate(found if group else [found]):
        same(tensor, summed([tensors[i] for tensors in given]).tensor_split(hvd.size())[hvd.rank()])


# Sparse


@case(("Sum", "Average"), (1, 2))
def sparse(op: str, dims: int) -> None:
    kept = [(torch.arange(6) % (rank + 2) == 0).view(-1, *[1] * (dims - 1)) for rank in ranks()]
    given = [of_rank(rank, torch.float64, (6, 3)[:dims]) * kept[rank] for rank in ranks()]
    wait = hvd.sparse_allreduce_async(given[hvd.rank()].to_sparse(), "sparse", getattr(hvd, op))
    found = hvd.synchronize(wait)
    assert found.is_sparse
    same(found.to_dense(), summed(given) / (hvd.size() if op == "Average" else 1))


# Names, orders, handles


@case()
def orders_may_differ() -> None:
    order = list(range(12))
    order = order[hvd.rank() :] + order[: hvd.rank()]
    handles = {i: hvd.allreduce_async(torch.full((i + 1,), float(i)), name=f"t{i}", op=hvd.Sum) for i in order}
    mixed = {
        i: hvd.broadcast_async(torch.full((2,), hvd.rank()), root_rank=i % hvd.size(), name=f"b{i}") for i in order
    }
    for i in reversed(order):
        same(hvd.synchronize(handles[i]), torch.full((i + 1,), float(i * hvd.size())))
        same(hvd.synchronize(mixed[i]), torch.full((2,), i % hvd.size()))


@case()
def the_same_small_one_again_and_again() -> None:
    for step in range(8):  # from the third on it is expected, and done at once
        same(hvd.allreduce(torch.full((3,), float(step + hvd.rank())), op=hvd.Sum),
             torch.full((3,), float(sum(step + rank for rank in ranks()))))  # fmt: skip


@case()
def another_than_expected() -> None:
    for _ in range(6):
        hvd.allreduce(torch.ones(5), name="usual")
    same(hvd.allreduce(torch.ones(7), name="other", op=hvd.Sum), torch.full((7,), float(hvd.size())))
    order = ["usual", "second"] if hvd.rank() else ["second", "usual"]
    handles = {name: hvd.allreduce_async(torch.ones(5), name=name) for name in order}
    for handle in handles.values():
        same(hvd.synchronize(handle), torch.ones(5))


@case()
def in_inference_mode_and_out_of_it() -> None:
    """What one mode has made or left behind must not stand in the other's way; threads have modes of their own."""
    expected = torch.full((3,), summed([torch.tensor(float(rank)) for rank in ranks()]) / hvd.size())
    for number in range(3):
        with torch.inference_mode(number != 1):
            for _ in range(5):  # expected from the third on
                same(hvd.allreduce(torch.full((3,), float(hvd.rank())), name="metric"), expected)
            mine = [torch.full((3,), float(hvd.rank())) for _ in range(5)]
            handles = [hvd.allreduce_async_(mine[0]), hvd.broadcast_async_(mine[1], 1)]
            same(hvd.grouped_allreduce(mine[2:4])[1], expected)
            hvd.synchronize(hvd.grouped_allreduce_async_(mine[2:4]))
            for handle in handles:
                hvd.synchronize(handle)
            same(mine[0], expected)
            same(mine[1], torch.ones(3))
            same(mine[3], expected)
    before = hvd.allreduce_async(torch.full((3,), float(hvd.rank())), name="trained with")
    with torch.inference_mode():
        hvd.barrier()
    (hvd.synchronize(before) * torch.ones(3, requires_grad=True)).sum().backward()


@case(("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"))
def a_name_twice(function: str) -> None:
    begin = getattr(hvd, f"{function}_async")
    more = {"root_rank": 0} if function == "broadcast" else {}
    hvd.barrier()
    if hvd.rank() == 0:  # the others are not there yet, so the first is not done
        handle = begin(torch.ones(2 * hvd.size()), name="twice", **more)
        raises((RuntimeError, ValueError), lambda: begin(torch.ones(2 * hvd.size()), name="twice", **more), "same name")
        hvd.broadcast(torch.ones(1), 0, name="go")
    else:
        hvd.broadcast(torch.ones(1), 0, name="go")
        handle = begin(torch.ones(2 * hvd.size()), name="twice", **more)
    hvd.synchronize(handle)


@case()
def polling() -> None:
    handle = hvd.allreduce_async(torch.ones(100))
    while not hvd.poll(handle):
        pass
    same(hvd.synchronize(handle), torch.ones(100))
    raises(ValueError, lambda: hvd.synchronize(handle), "not created or has been cleared")
    raises(ValueError, lambda: hvd.poll(12345678), "not created or has been cleared")


# What does not fit


def _rank(value: Any, other: Any) -> Any:
    return value if hvd.rank() == 0 else other


@case(("allreduce", "grouped_allreduce", "broadcast", "allgather", "alltoall", "reducescatter"), ("dims", "sizes"))
def shapes_do_not_fit(function: str, what: str) -> None:
    shape = (2 * hvd.size(), 4 if what == "dims" else 3)
    mine = torch.ones(_rank((2 * hvd.size(), 4), shape if what == "sizes" else (2 * hvd.size(), 4, 1)))
    given = [mine] if "grouped" in function else mine
    more = {"root_rank": 0} if function == "broadcast" else {}
    raises(hvd.HorovodInternalError, lambda: getattr(hvd, function)(given, **more), "mismatched")


@case(("allreduce", "grouped_allreduce", "broadcast", "allgather", "alltoall", "reducescatter"))
def dtypes_do_not_fit(function: str) -> None:
    mine = torch.ones(2 * hvd.size(), dtype=_rank(torch.float32, torch.int32))
    given = [mine] if "grouped" in function else mine
    more = {"root_rank": 0} if function == "broadcast" else {}
    raises(hvd.HorovodInternalError, lambda: getattr(hvd, function)(given, **more), "mismatched data types")


@case()
def ops_do_not_fit() -> None:
    mine = torch.ones(4)
    raises(hvd.HorovodInternalError, lambda: hvd.allreduce(mine, op=_rank(hvd.Sum, hvd.Max)), "reduction operations")


@case(("prescale_factor", "postscale_factor"))
def factors_do_not_fit(which: str) -> None:
    call = lambda: hvd.allreduce(torch.ones(4), **{which: _rank(1.0, 2.0)})  # noqa: E731
    raises(hvd.HorovodInternalError, call, f"mismatched {which.removesuffix('_factor')} factors")


@case()
def roots_do_not_fit() -> None:
    raises(hvd.HorovodInternalError, lambda: hvd.broadcast(torch.ones(4), _rank(0, 1)), "root ranks")


@case(("named", "unnamed"))
def operations_do_not_fit(which: str) -> None:
    name = "crossed" if which == "named" else None

    def call() -> None:
        _rank(hvd.allreduce, hvd.allgather)(torch.ones(4), name=name)

    raises(hvd.HorovodInternalError, call, "mismatched operations")


@case()
def groups_of_different_length_do_not_fit() -> None:
    call = lambda: hvd.grouped_allreduce([torch.ones(2)] * _rank(2, 3))  # noqa: E731
    raises(hvd.HorovodInternalError, call, "number of tensors")


@case(("op", "dim", "root", "splits", "count", "split sizes", "sparse", "bool", "rows", "scatter"))
def what_one_rank_can_tell(which: str) -> None:
    ones = torch.ones(hvd.size() * 2)
    calls: dict[str, Callable[[], Any]] = {
        "op": lambda: hvd.allreduce(ones, average=True, op=hvd.Sum),
        "dim": lambda: hvd.allgather(torch.tensor(1.0)),
        "root": lambda: hvd.broadcast(ones, hvd.size()),
        "splits": lambda: hvd.alltoall(ones, splits=[1] * (hvd.size() + 1)),
        "count": lambda: hvd.alltoall(ones, splits=[1] * hvd.size()),
        "split sizes": lambda: hvd.alltoall(ones, splits=torch.ones(hvd.size())),
        "sparse": lambda: hvd.allreduce(ones.to_sparse()),
        "bool": lambda: hvd.allreduce(ones > 0),
        "rows": lambda: hvd.alltoall(torch.ones(hvd.size() + 1)),
        "scatter": lambda: hvd.reducescatter(ones, op=hvd.Max),
    }
    raises(ValueError, calls[which])


# Join, barrier, process sets, objects


@case((1, 2, 3))
def join_with_uneven_data(dims: int) -> None:
    mine = of_rank(hvd.rank(), torch.float64, shape_of(dims))
    for step in range(hvd.rank() + 1):  # rank 0 has one batch, the last rank the most
        there = [of_rank(rank, torch.float64, shape_of(dims)) for rank in ranks() if rank >= step]
        same(hvd.allreduce(mine, name=f"step{step}"), summed(there) / hvd.size())
        rows = hvd.allgather(torch.full((1,), hvd.rank()))
        assert rows.tolist() == [rank for rank in ranks() if rank >= step]
    assert hvd.join() == hvd.size() - 1
    same(hvd.allreduce(mine), summed([of_rank(rank, torch.float64, shape_of(dims)) for rank in ranks()]) / hvd.size())


@case(("broadcast", "Max"))
def what_cannot_be_joined(which: str) -> None:
    if hvd.rank() > 0:
        call = {
            "broadcast": lambda: hvd.broadcast(torch.ones(2), 0, name="b"),
            "Max": lambda: hvd.allreduce(torch.ones(2), op=hvd.Max, name="m"),
        }[which]
        raises(hvd.HorovodInternalError, call, "joined")
    hvd.join()


@case()
def barrier() -> None:
    for _ in range(3):
        hvd.barrier()


@case(("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "grouped_allreduce", "object", "barrier"))
def in_a_process_set(function: str) -> None:
    last = hvd.size() - 1
    members = [0, last] if last > 1 else [last]
    chosen = hvd.add_process_set(members[::-1])
    try:
        assert chosen.ranks == members and chosen.size() == len(members)
        assert hvd.get_process_set_ids_and_ranks()[chosen.process_set_id] == chosen.ranks
        if not chosen.included():
            assert chosen.rank() == -1
            return raises(ValueError, lambda: hvd.allreduce(torch.ones(2), process_set=chosen), "only its ranks")
        count, here = len(members), chosen.rank()
        both = [of_rank(rank, torch.float64, (2 * count, 2)) for rank in members]
        mine, mean = both[here], summed(both) / count
        if function == "object":
            assert hvd.allgather_object(hvd.rank(), process_set=chosen) == members
            assert hvd.broadcast_object(hvd.rank(), last, process_set=chosen) == last
        elif function == "barrier":
            hvd.barrier(process_set=chosen)
        elif function == "broadcast":
            same(hvd.broadcast(mine, last, process_set=chosen), both[-1])  # the root is a rank of the job
        elif function == "grouped_allreduce":
            same(hvd.grouped_allreduce([mine], process_set=chosen)[0], mean)
        else:
            expected = {
                "allreduce": mean,
                "allgather": torch.cat(both),
                "alltoall": torch.cat([tensor[2 * here : 2 * here + 2] for tensor in both]),
                "reducescatter": mean[2 * here : 2 * here + 2],
            }
            same(getattr(hvd, function)(mine, process_set=chosen), expected[function])
    finally:
        assert hvd.remove_process_set(chosen)
        assert chosen.process_set_id is None


@case()
def process_sets_that_cannot_be() -> None:
    raises(ValueError, lambda: hvd.add_process_set([0, hvd.size()]), "ranks of 0 to")
    raises(ValueError, lambda: hvd.add_process_set(list(ranks())), "exists already")
    raises(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0])), "not initialized")
    assert not hvd.remove_process_set(hvd.ProcessSet([0]))
    assert not hvd.remove_process_set(hvd.global_process_set)
    raises(hvd.HorovodInternalError, lambda: hvd.add_process_set([0] if hvd.rank() == 0 else [1]), "different")
    assert hvd.global_process_set.process_set_id == 0 and hvd.global_process_set.ranks == list(ranks())


@case(("a number", "nothing", "nested", "large"))
def objects(which: str) -> None:
    values = {"a number": 3, "nothing": None, "nested": {"a": [1, {"b": torch.ones(2)}]}, "large": "x" * 100_000}
    found = hvd.broadcast_object(values[which] if hvd.rank() == 1 else "not this", root_rank=1)
    assert str(found) == str(values[which])
    assert hvd.broadcast_object_fn(root_rank=1)(hvd.rank()) == 1
    gathered = hvd.allgather_object((hvd.rank(), values[which]))
    assert [rank for rank, _ in gathered] == list(ranks()) and str(gathered[-1][1]) == str(values[which])


@case(("broadcast_object", "allgather_object"))
def objects_that_cannot_be_pickled(which: str) -> None:
    mine = _rank(lambda: None, "x")
    raises(hvd.HorovodInternalError, lambda: getattr(hvd, which)(mine), "an object of class function cannot be sent")
    assert hvd.allgather_object(hvd.rank()) == list(ranks())


@case()
def the_default_device_is_not_asked() -> None:
    """Of what lies on the host; a script may have called `torch.set_default_device("cuda")`."""
    given = [of_rank(rank, torch.float32, (4, 3)) for rank in ranks()]
    mine, model = given[hvd.rank()].clone().requires_grad_(), torch.nn.Linear(3, 2)
    with torch.device("meta"):
        sums = [hvd.allreduce(mine.detach(), op=hvd.Sum) for _ in range(4)]  # the last ones are expected
        gathered = hvd.allgather(mine)
        gathered.square().sum().backward()
        whose = hvd.broadcast_object(hvd.rank(), root_rank=1)
        _, received = hvd.alltoall(mine[: hvd.size()], [1] * hvd.size())
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        model(mine.detach()).sum().backward()
        optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for found in sums:
        same(found, summed(given))
    same(mine.grad, 2 * given[hvd.rank()])
    same(gathered, torch.cat(given))
    same(received, torch.ones(hvd.size(), dtype=torch.int32))
    assert whose == 1


@case(("state_dict", "named_parameters", "parameters"))
def parameters(which: str) -> None:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    hvd.broadcast_parameters(getattr(model, which)(), root_rank=1)
    torch.manual_seed(1)
    same(model[0].weight, torch.nn.Linear(3, 2).weight)
    raises(ValueError, lambda: hvd.broadcast_parameters(3, root_rank=0), "invalid params")


@case(("SGD", "Adam", "AdamW", "RMSprop", "Adagrad"), ("all", "root alone"))
def optimizer_state(kind: str, has_state: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1 * (hvd.rank() + 1), **options)
    if has_state == "all" or hvd.rank() == 0:
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(1, 3)).sum() * (hvd.rank() + 1)).backward()
            optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert states[0]["state"] and str(states[0]) == str(states[-1]) == str(optimizer.state_dict())


@case()
def broadcast_optimizer_state_keeps_dtypes() -> None:
    """Of a master copy in fp32, which `load_state_dict` would cast to the parameter's dtype."""
    model = torch.nn.Linear(3, 2, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if hvd.rank() == 0:
        optimizer.state[model.weight]["master"] = model.weight.detach().float() + 1e-6
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    masters = hvd.allgather_object(optimizer.state[model.weight]["master"])
    assert all(master.dtype == torch.float32 and torch.equal(master, masters[0]) for master in masters)


@case()
def questions() -> None:
    assert hvd.is_initialized() and 0 <= hvd.rank() < hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not (hvd.mpi_built() or hvd.mpi_enabled() or hvd.ddl_built() or hvd.ccl_built() or hvd.rocm_built())
    assert hvd.nccl_built() >= 0 and hvd.cuda_built() in (True, False)
    raises(ValueError, hvd.mpi_threads_supported, "not enabled")
    lbfgs = torch.optim.LBFGS([torch.ones(1, requires_grad=True)])
    raises(ValueError, lambda: hvd.broadcast_optimizer_state(lbfgs, 0), "LBFGS")


def main() -> None:
    global hvd
    import horovod.torch

    hvd = horovod.torch
    torch.set_num_threads(1)
    raises(ValueError, hvd.rank, "has not been initialized; use hvd.init()")
    if "by-gloo" in sys.argv:
        collectives.board_between = lambda *_: None
    hvd.init(process_sets="dynamic")
    found = dict(results([word for word in sys.argv[1:] if word != "by-gloo"]))
    everyone = hvd.allgather_object(found)
    if hvd.rank() == 0:
        print(json.dumps({name: "".join(part[name] for part in everyone) for name in found}))
    hvd.shutdown()
    assert not hvd.is_initialized()


def results(only: list[str]) -> Iterator[tuple[str, str]]:
    for name, run in CASES.items():
        if only and not any(part in name for part in only):
            continue
        print(name, file=sys.stderr)  # which one hangs
        try:
            run()
            yield name, ""
        except Exception:
            yield name, f"rank {hvd.rank()}: {traceback.format_exc()}"
        hvd.barrier()


if __name__ == "__main__":
    main()
