"""Arguments cut into microbatches and their gradients joined."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import ShapeError, StrategyError
from fullframe.techniques.stages.arguments import Arguments, Begun, Kept, Leaf, State
from tests.rank_group import RankFailure, rank_group


def test_microbatches_and_back() -> None:
    state, weight, scale = {"a": torch.arange(12.0).view(4, 3)}, torch.ones(4, 2), torch.ones(())
    given = Arguments(state, (weight, scale, "mode"), 2, must_cut=True)
    parts = given.microbatch(1)
    assert torch.equal(parts[0], state["a"][2:]) and parts[1].shape == (2, 2) and parts[2].shape == ()
    assert given.inputs(parts, parts[1:]) == (parts[1], parts[2], "mode")
    first, second = ([torch.full((2, 3), n), None, torch.full((), n)] for n in (1.0, 2.0))
    joined = given.joined([first, second])
    assert torch.equal(joined[0], torch.tensor([1.0, 1, 2, 2])[:, None].expand(4, 3))
    assert joined[1] is None and joined[2] == 3.0
    assert torch.equal(given.joined([[None] * 3, second])[0][:2], torch.zeros(2, 3))


def test_microbatches_want_gradients_as_the_whole_does() -> None:
    """A call cuts them without grad mode, in which a view of a leaf that is a view of plain numbers wants none."""
    state, measured = torch.ones(12).view(4, 3).requires_grad_(), torch.ones(12).view(4, 3)
    with torch.no_grad():
        for number in range(2):
            parts = Arguments(state, (measured, torch.arange(4)), 2, must_cut=True).microbatch(number)
            assert [part.requires_grad for part in parts] == [True, False, False]
    begun = Begun(parts[:1], parts[1:], keeps=True, came=False)
    assert [leaf.requires_grad for leaf in begun.leaves] == [True, False, False]
    assert [leaf.requires_grad for leaf in Begun(parts[1:2], parts[1:], True, came=True).leaves] == [True, False, False]


@pytest.mark.parametrize(
    ("state", "inputs", "words"),
    [
        (torch.ones(4, 3), (torch.ones(5, 3),), "need one common first dim"),
        (torch.ones(()), (), "need one common first dim"),
        (torch.ones(3, 3), (), "3 samples cannot be cut into 2 equal microbatches"),
    ],
)
def test_what_cannot_be_cut(state: torch.Tensor, inputs: tuple[torch.Tensor, ...], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        Arguments(state, inputs, 2, must_cut=True)
    assert Arguments(state, inputs, 2, must_cut=False).microbatches == 1


def test_a_state_of_tensors_alone() -> None:
    with pytest.raises(ShapeError, match="must be of tensors alone, and holds 3"):
        Arguments((torch.ones(2), 3), (), 1, must_cut=True)


def test_what_is_known_of_a_state_can_be_sent() -> None:
    image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    known = State.of({"x": image, "y": [torch.ones(2, dtype=torch.int64)]})
    again = pickle.loads(pickle.dumps(known))
    assert again == known and again.forms[0].memory_format == torch.channels_last
    assert again.leaves[0].times(3).form.shape == (6, 3, 4, 5)
    assert again.dressed([image, image], None).keys() == {"x", "y"}


def split_leaves() -> None:
    mesh = ff.init_mesh(width=2)
    image = ff.shard(torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last), mesh)
    leaf = Leaf.of(image)
    assert leaf.times(1).dressed(image.local, image.spec.spatial).stride() == image.stride()
    assert leaf.times(2).facts[0] == (2, 2, 3, 4)  # type: ignore[index]
    with pytest.raises(ShapeError, match="what a mask has picked of a split tensor cannot go to another stage"):
        Leaf.of(image[image > 3])
    with pytest.raises(
        ShapeError, match=r"one common first dim of the state .* which is not split; got \(4, 2, 3, 1\)"
    ):
        Arguments(image.transpose(0, 3), (), 2, must_cut=True)


def test_what_is_known_of_split_tensors() -> None:
    rank_group(2).run(split_leaves)


def test_a_state_from_another_stage_may_be_written_to() -> None:
    came, measured = torch.ones(3), torch.full((3,), 2.0, requires_grad=True)
    begun = Begun([came], [measured], keeps=True, came=True)
    (state,), (own,) = begun.state, begun.inputs
    state.mul_(own).mul_(3)
    begun.require_as_given(1, returns_all=False)
    assert [g.tolist() for g in torch.autograd.grad(state.sum(), begun.leaves)] == [[6.0] * 3, [3.0] * 3]
    with pytest.raises(StrategyError, match=r"a part on stage 1 writes to its state or its inputs .*shape \(3,\)"):
        begun.require_as_given(1, returns_all=True)


@pytest.mark.parametrize("keeps", [False, True])
def test_arguments_are_not_written_to(keeps: bool) -> None:
    for number in range(2):
        begun = Begun([torch.ones(3)], [torch.ones(2)], keeps, came=bool(number))
        begun.require_as_given(number, returns_all=False)
        (begun.inputs if number else begun.state)[0].add_(1)
        with pytest.raises(StrategyError, match="write state = state \\+ step"):
            begun.require_as_given(number, returns_all=False)


def test_a_hook_that_would_miss_the_loss_on_its_state() -> None:
    begun = Begun([torch.ones(3)], [], keeps=True, came=True)
    begun.state[0].register_hook(lambda gradient: gradient.clamp(0, 1))
    begun.require_as_given(1, returns_all=False)
    with pytest.raises(StrategyError, match="a part on stage 1 puts a hook on the state that it gets"):
        begun.require_as_given(1, returns_all=True)
    first = Begun([torch.ones(3, requires_grad=True)], [], keeps=True, came=False)
    first.state[0].register_hook(lambda gradient: gradient.clamp(0, 1))
    first.require_as_given(0, returns_all=True)  # what came from no other stage


class Writing(nn.Module):
    """Writes to what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu = nn.Linear(3, 3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.relu(x))


def written(first: bool) -> float:
    torch.manual_seed(1)
    blocks = nn.ModuleList([*([] if first else [nn.Linear(3, 3)]), Writing(), Writing()]).double()
    mesh = ff.init_mesh(stages=len(blocks))
    run = ff.unroll(blocks, len(blocks), placement="stages", mesh=mesh)
    loop, x = copy.deepcopy(blocks), torch.randn(2, 3, dtype=torch.float64)
    ff.parallelize(run, mesh)(x).sum().backward()
    for block in loop:
        x = block(x)
    x.sum().backward()
    pairs = zip(blocks.parameters(), loop.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)  # type: ignore[operator]


def test_layers_in_place() -> None:
    with pytest.raises(RankFailure, match="a part on stage 0 writes to its state"):
        rank_group(2).run(written, True)
    assert max(rank_group(3).run(written, False)) < 1e-12


def test_a_returned_state_of_frozen_blocks_takes_no_gradient() -> None:
    frozen, trained = torch.ones(4, 2), torch.ones(4, 2, requires_grad=True) * 2
    outs, seeds = Kept([], [], [[frozen], [trained]]).seeded([[torch.ones(8, 2)], [torch.ones(8, 2)]], 1, 2)
    assert len(outs) == 1 and outs[0] is trained and [seed.shape for seed in seeds] == [(4, 2)]
