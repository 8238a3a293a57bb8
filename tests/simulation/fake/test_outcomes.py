"""Remembered outcomes of ops on fake tensors are FakeTensorMode's own."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullframe.simulation.fake.outcomes import Outcomes

aten = torch.ops.aten


class Remembering(TorchDispatchMode):
    def __init__(self, outcomes: Outcomes):
        super().__init__()
        self.outcomes = outcomes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.outcomes(func, args, kwargs or {})


def facts(out: Any) -> list[Any]:
    return [
        (t.shape, t.stride(), t.dtype, t.storage_offset(), t.device) if isinstance(t, Tensor) else t
        for t in tree_leaves(out)
    ]


PROGRAMS = {
    "a new tensor": lambda x: x.exp() + 1,
    "strides": lambda x: (x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)).relu(),
    "several": lambda x: x.max(1),
    "a view": lambda x: [x.view(-1), x[:, 1], *x.split(1, 1), x.expand(4, *x.shape)],
    "in place": lambda x: x.clone().add_(1).relu_(),
    "no gradient": lambda x: aten.convolution_backward(
        x, x, x.new_empty(3, 3, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False]
    ),
    "another dtype": lambda x: [x.bfloat16(), x > 0, x.argmax(1)],
    "of a list": lambda x: torch._foreach_add([x, x * 2], 1),
    "a copy of part": lambda x: torch.cat([x, x], 2)[:, :, 1:].contiguous(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_outcomes_are_those_of_fake_tensors_also_the_second_time(name: str) -> None:
    fake = FakeTensorMode()
    with fake:
        x = torch.empty(2, 3, 4, 5)
        expected = facts(PROGRAMS[name](x))
        outcomes = Outcomes(fake)
        with Remembering(outcomes):
            for _ in range(3):
                out = PROGRAMS[name](x)
                assert facts(out) == expected
                assert all(type(t) is FakeTensor for t in tree_leaves(out) if isinstance(t, Tensor))


def test_views_share_memory_and_new_tensors_do_not() -> None:
    fake = FakeTensorMode()
    with fake, Remembering(Outcomes(fake)):
        x = torch.empty(2, 3)
        for _ in range(2):
            view, new = x.view(3, 2), x + 1
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert new.untyped_storage()._cdata != x.untyped_storage()._cdata
            assert x.add_(1) is x


def test_a_number_that_is_known_is_read() -> None:
    fake = FakeTensorMode()
    with fake:
        outcomes = Outcomes(fake)
        with Remembering(outcomes):
            assert torch.tensor(3.5).item() == 3.5
            outcomes.updating = True
            assert (torch.empty(()) * 2).item() == 1.0  # a norm, by which an update is scaled


def test_what_a_loss_reads_is_taken_to_be_1_also_where_it_is_compared() -> None:
    fake = FakeTensorMode()
    with fake:
        outcomes = Outcomes(fake)
        with Remembering(outcomes):
            number = torch.empty(3, 4).sum()
            with pytest.raises(DataDependentOutputException):
                number.item()
            assert not outcomes.notes
            outcomes.in_loss = lambda: True
            assert (number.item(), number.long().item()) == (1.0, 1)
            assert number > 0
            assert number != 0
            assert not number.isnan().any()
            assert torch.equal(torch.empty(3), torch.empty(3)) and torch.allclose(torch.empty(3), torch.empty(3))
            assert not torch.equal(torch.empty(3), torch.empty(4))
            assert not max(torch.tensor(0.5), number) < torch.tensor(0.7)
            assert len(outcomes.notes) == 1
            with pytest.raises(DataDependentOutputException):  # a truth about many numbers
                bool((torch.empty(3) > 0).any())


class Into(Remembering):
    """Whether each op that writes at places gave what it was given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func._opname in ("scatter", "scatter_add", "index_put"):
            self.outcomes.notes.add(f"{func._opname} {out is args[0]}")
        return out


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda x: x.gather(1, torch.zeros(2, 1, dtype=torch.int64)), "scatter_add True"),
        (lambda x: x.max(1).values, "scatter True"),
        (lambda x: x.topk(2, 1).values, "scatter True"),
        (lambda x: x[torch.zeros(5, dtype=torch.int64)], "index_put True"),
        (lambda x: x.scatter_add(1, torch.zeros(2, 3, dtype=torch.int64), x), "scatter_add False"),
    ],
)
def test_derivatives_write_into_their_own_zeros(program: Any, expected: str) -> None:
    """As they do for plain tensors; of others torch's C++ makes new ones."""
    outcomes = Outcomes(fake := FakeTensorMode())
    with fake, Into(outcomes):
        program(torch.empty(2, 3, requires_grad=True)).sum().backward()
    assert outcomes.notes == {expected}


def _norm_backward(x: Tensor, mask: list[bool]) -> Any:
    c = x.new_ones(3)
    return aten.native_batch_norm_backward(x, x, c, c, c, None, None, False, 1e-5, mask)


def _group_norm_backward(x: Tensor, mask: list[bool]) -> Any:
    rows = x.new_ones(2, 3)
    return aten.native_group_norm_backward(x, x, rows, rows, x.new_ones(3), 2, 3, 20, 3, mask)


def _layer_norm_backward(x: Tensor, mask: list[bool]) -> Any:
    c, rows = x.new_ones(5), x.new_ones(2, 3, 4, 1)
    return aten.native_layer_norm_backward(x, x, [5], rows, rows, c, c, mask)


@pytest.mark.parametrize("backward", [_norm_backward, _group_norm_backward, _layer_norm_backward])
@pytest.mark.parametrize("mask", [(True, False, False), (False, True, True)], ids=str)
def test_what_a_mask_leaves_out_is_not_made(backward: Any, mask: tuple[bool, ...]) -> None:
    real = backward(torch.ones(2, 3, 4, 5), list(mask))
    with FakeTensorMode() as fake, Remembering(Outcomes(fake)):
        for _ in range(2):
            out = backward(torch.empty(2, 3, 4, 5), list(mask))
            assert [t is None for t in out] == [t is None for t in real]
            assert [None if t is None else t.shape for t in out] == [None if t is None else t.shape for t in real]


@pytest.mark.parametrize("spatial", [2, 3])
def test_a_grid_of_another_dtype_is_refused_as_by_torch(spatial: int) -> None:
    fake, sizes = FakeTensorMode(), (4, 5, 6)[:spatial]

    def sample(dtype: torch.dtype) -> Tensor:
        grid = torch.zeros(1, *sizes, spatial, dtype=dtype)
        return torch.nn.functional.grid_sample(torch.ones(1, 2, *sizes), grid, align_corners=False)

    with pytest.raises(RuntimeError):
        sample(torch.float64)
    with fake, Remembering(Outcomes(fake)):
        assert sample(torch.float32).shape == (1, 2, *sizes)
        with pytest.raises(RuntimeError, match=r"one dtype, not torch.float32 and torch.float64"):
            sample(torch.float64)
