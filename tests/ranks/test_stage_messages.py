"""Tensors and objects from rank to rank along an axis."""

from typing import Any

import pytest
import torch

import fullframe as ff
from fullframe.ranks.mesh import stage_axis
from fullframe.ranks.stage_messages import (
    Form,
    flags_of_any,
    from_one,
    objects_of_all,
    receive,
    receive_object,
    receive_some,
    send,
    send_object,
    send_some,
    summed_at,
    telling_others,
)
from tests.rank_group import RankFailure, rank_group

CPU = torch.device("cpu")


def there_and_back() -> None:
    """Each message is sent and received on one line of the program, as ranks that run one program do."""
    axis = stage_axis(ff.init_mesh(stages=2))
    me, other = axis.coordinate, 1 - axis.coordinate
    large = torch.arange(3.0 * 5 * 40 * 300).view(3, 5, 40, 300).to(memory_format=torch.channels_last)  # by gloo
    volume = torch.arange(240.0).view(2, 3, 4, 2, 5).to(memory_format=torch.channels_last_3d)
    tensors = [large, volume, torch.tensor(True), torch.ones(2, 0), torch.tensor([1 + 2j])]
    forms = [Form.of(tensor) for tensor in tensors]
    word: Any = send_object(axis, 1, {"from": me}, "word") if me == 0 else receive_object(axis, 0, "word")
    came: Any = send(axis, 1, tensors, "state") if me == 0 else receive(axis, 0, forms, "state", CPU)
    if me == 0:
        word.wait(), came.wait()
    else:
        assert word == {"from": 0}
        for a, b in zip(came, tensors, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()
    some = [None, large, None]
    back: Any = send_some(axis, 1, some, "some") if me == 0 else receive_some(axis, 0, [forms[0]] * 3, "some", CPU)
    if me == 0:
        [flight.wait() for flight in back]
    else:
        assert back[0] is None and torch.equal(back[1], large) and back[2] is None
    assert objects_of_all(axis, "x" * (me + 1)) == ["x", "xx"]
    assert flags_of_any(axis, [me == 1, False, True]) == [True, False, True]
    (mine,) = from_one(axis, 1, [torch.full((2,), float(me))], [Form.of(torch.ones(2))], CPU)
    assert torch.equal(mine, torch.ones(2))
    (total,) = summed_at(axis, 1, [torch.full((2,), me + 1.0)])
    assert total[0] == (3 if other == 0 else 1)


def test_there_and_back() -> None:
    rank_group(2).run(there_and_back)


def failing() -> None:
    axis = stage_axis(ff.init_mesh(stages=2))
    with telling_others():
        pass  # nothing to tell
    with telling_others():
        if axis.coordinate == 0:
            raise ff.FullframeError("only here")
        receive_object(axis, 0, "word")


def test_an_error_reaches_who_waits() -> None:
    with pytest.raises(RankFailure) as raised:
        rank_group(2).run(failing)
    assert all("only here" in message for _, _, message, _ in raised.value.errors)
