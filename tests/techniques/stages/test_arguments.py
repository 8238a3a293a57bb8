"""Arguments cut into microbatches and their gradients joined."""

import pickle

import pytest
import torch

from fullframe.errors import ShapeError
from fullframe.techniques.stages.arguments import Arguments, State


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
