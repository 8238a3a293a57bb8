"""The shell: global shape outside, local part inside, the whole on request."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from fullframe.spatial.rules import catalog  # noqa: F401  which fills RULES
from fullframe.spatial.rules.registry import RULES, rule
from tests.exactness import mesh
from tests.rank_group import rank_group


def _image(height: int = 7, width: int = 9) -> Tensor:
    return torch.arange(2.0 * height * width).view(2, height, width).double()


def _shell() -> tuple[tuple[int, ...], tuple[int, ...], str, bool]:
    x = ff.shard(_image(), mesh(2, 2))
    return tuple(x.shape), tuple(x.local.shape), repr(x), torch.equal(x.full(), _image())


def test_shape_is_global_and_local_is_this_ranks() -> None:
    answers = rank_group(4).run(_shell)
    assert [local for _, local, _, _ in answers] == [(2, 4, 5), (2, 4, 4), (2, 3, 5), (2, 3, 4)]
    for shape, _, text, same in answers:
        assert shape == (2, 7, 9)
        assert text == (
            "SpatialTensor(shape=(2, 7, 9), dtype=torch.float64, "
            "cut at [dim 1 over height at (0, 4, 7); dim 2 over width at (0, 5, 9)])"
        )
        assert same


def _facts() -> list[bool]:
    x = ff.shard(_image().requires_grad_(), mesh(1, 2))
    y = x * 2
    return [
        x.requires_grad,
        y.requires_grad,
        not x.detach().requires_grad,
        x.dtype == torch.float64,
        x.size(-1) == 9,
        x.numel() == 126,
        len(x) == 2,
        x.dim() == x.ndim == 3,
        x.float().dtype == torch.float32,
        type(x.to(torch.float32)) is ff.SpatialTensor,
        torch.equal(copy.deepcopy(x.detach()).local, x.local.detach()),
        x.device_mesh is mesh(1, 2),
    ]


def _copies() -> list[Tensor]:
    """Of a tensor, of one that is computed and of one that requires a gradient: what is written to, and gradients."""
    answers = []
    for of in (ff.shard(_image(), mesh(1, 2)), _image()):
        shallow = copy.copy(of)
        shallow.add_(1)
        leaf = of.clone().requires_grad_()
        copies = [copy.copy(leaf), copy.copy(leaf * 3), copy.deepcopy(leaf)]
        sum(((i + 2) * x.square()).sum() for i, x in enumerate(copies)).backward()
        assert leaf.grad is None
        assert [x.is_leaf for x in copies] == [True] * 3
        answers += [torch.stack([ff.full(x) for x in (of, shallow, *(c.grad for c in copies))])]
    return answers


def test_a_copy_shares_the_memory_and_not_the_graph() -> None:
    for split, whole in rank_group(2).run(_copies):
        torch.testing.assert_close(split, whole)


def test_facts_of_the_whole_tensor() -> None:
    for facts in rank_group(2).run(_facts):
        assert all(facts), facts


def _gradient_of_full() -> float:
    """d/dx of sum(w * x) is w; each rank's copy of x holds a part of it, their mean is the gradient."""
    x = _image().requires_grad_()
    weights = torch.linspace(0, 1, x.numel(), dtype=torch.float64).view_as(x)
    (ff.shard(x, mesh(2, 2)).full() * weights).sum().backward()
    assert x.grad is not None
    torch.distributed.all_reduce(x.grad)
    return float((x.grad / 4 - weights).abs().max())


def test_full_is_differentiable() -> None:
    assert max(rank_group(4).run(_gradient_of_full)) < 1e-15


class Tagged(Tensor):
    """A class of its own for images, with a method of torch's that takes less, as MONAI's has."""

    def new_empty(self, size: tuple[int, ...]) -> Tensor:  # type: ignore[override]
        return torch.empty(size).as_subclass(Tagged)


def _of_a_class() -> list[str]:
    torch.manual_seed(0)
    kernel, image = torch.randn(2, 2, 3, 3).double(), _image()
    tagged = image.clone().as_subclass(Tagged).requires_grad_()
    x = ff.shard(tagged, mesh(1, 2))
    part = ff.from_local(image[..., :4].clone().as_subclass(Tagged), mesh(1, 2))
    end, expected = F.conv2d(x, kernel, padding=1), F.conv2d(image, kernel, padding=1)
    beside = image[:1].as_subclass(Tagged) * x
    torch.testing.assert_close(end.full(), expected)  # type: ignore[attr-defined]
    assert torch.equal(beside.full(), image * image[:1])  # type: ignore[attr-defined]
    end.sum().backward()
    assert tagged.grad is not None and tagged.grad[:, 3, 4 if x.local.shape[-1] == 5 else 6].all()
    return [type(t).__name__ for t in (x.local, x.full(), part.local, end.local, beside.local)]  # type: ignore[attr-defined]


def test_a_class_that_adds_to_torch_s_functions_is_left_outside() -> None:
    assert rank_group(2).run(_of_a_class) == [["Tensor"] * 5] * 2


def _one_process() -> list[bool]:
    x = ff.shard(_image()[None].repeat(1, 2, 1, 1), ff.init_mesh())
    weight = torch.ones(3, 4, 3, 3, dtype=torch.float64)
    y = F.conv2d(x, weight, padding=1)
    return [isinstance(y, ff.SpatialTensor), torch.equal(y.full(), F.conv2d(x.full(), weight, padding=1))]


def test_one_rank_runs_the_same_program() -> None:
    assert rank_group(1).run(_one_process) == [[True, True]]


def _drawn() -> tuple[Tensor, Tensor, float, Tensor]:
    torch.manual_seed(5)
    x = ff.shard(torch.ones(1, 4, 64, 64), mesh(1, 2))
    dropped = F.dropout(x, 0.25)
    channels = F.dropout2d(x, 0.5)
    return dropped.local, channels.local.amax((2, 3)), float(dropped.mean()), torch.rand(3)


def test_dropout_differs_between_shards_and_agrees_on_whole_values() -> None:
    (left, kept, mean, after), (right, kept_there, mean_there, after_there) = rank_group(2).run(_drawn)
    assert not torch.equal(left, right)
    assert {round(v, 4) for v in left.unique().tolist()} == {0.0, round(1 / 0.75, 4)}
    assert mean == mean_there
    assert math.isclose(mean, 1, abs_tol=0.05)
    assert torch.equal(kept, kept_there)
    assert torch.equal(after, after_there)  # the default generators stay together


def _states() -> Tensor:
    torch.manual_seed(torch.distributed.get_rank())
    ff.parallelize(torch.nn.Conv2d(1, 1, 1), mesh(1, 2))
    return torch.rand(2)


def test_parallelize_brings_random_states_together() -> None:
    first, second = rank_group(2).run(_states)
    assert torch.equal(first, second)


def test_a_second_rule_is_an_error() -> None:
    function = next(iter(RULES))
    with pytest.raises(ValueError, match="has a rule already"):
        rule(function)(lambda func, x: x)


def _own_rule() -> float:
    def swirl(x: Tensor) -> Tensor:
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(swirl, (x,), x)  # type: ignore[no-any-return]
        return x.sin() * 2

    @rule(swirl)
    def _(func: object, x: ff.SpatialTensor) -> Tensor:
        return torch.sin(x) * 2

    x = ff.shard(_image(), mesh(1, 2))
    return float((swirl(x).full() - swirl(_image())).abs().max())  # type: ignore[attr-defined]


def test_a_user_can_add_a_rule() -> None:
    assert rank_group(2).run(_own_rule) == [0.0, 0.0]


def _buffers() -> list[Tensor]:
    torch.manual_seed(0)
    model = ff.parallelize(torch.nn.BatchNorm2d(3).double(), ff.init_mesh(width=2))
    x = torch.randn(4, 3, 6, 7, dtype=torch.float64)
    model(ff.shard(x[torch.distributed.get_rank() // 2 :: 2], ff.init_mesh(width=2)))
    return [b.clone() for b in model.buffers()]


def test_running_statistics_are_equal_within_a_replica() -> None:
    answers = rank_group(4).run(_buffers)
    for first, second in (answers[:2], answers[2:]):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
