"""Collectives of GPU tensors that another thread does, by another stream than that of who asks."""

from typing import Any

import pytest
import torch

from fullframe.horovod.request import Request
from fullframe.horovod.submission import Submission

GPU = torch.device("cuda", 1)


class Stream:
    """Notes what it waits for."""

    def __init__(self, name: str, noted: list[Any]):
        self._name, self._noted = name, noted

    def __repr__(self) -> str:
        return self._name

    def record_event(self) -> str:
        return f"after {self}"

    def wait_event(self, event: str) -> None:
        self._noted.append((self, event))


class OnGpu:
    """A tensor that notes the streams by which it is used."""

    is_cuda, device = True, GPU

    def __init__(self, name: str, noted: list[Any]):
        self._name, self._noted = name, noted

    def record_stream(self, stream: Stream) -> None:
        self._noted.append((self._name, stream))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_memory_is_not_given_out_again_before_all_streams_are_through(
    same: bool, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the caller frees, and what was made by the thread's stream and is freed by the caller."""
    noted: list[Any] = []
    asks = Stream("asks", noted)
    does = asks if same else Stream("does", noted)
    now: list[Any] = [asks]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0] if device == GPU else None)
    given: Any = OnGpu("given", noted)
    made: Any = given if in_place else OnGpu("made", noted)
    counts = torch.zeros(2)
    request = Request("alltoall", "x", ((3,),), ("float32",), "cuda")
    submission = Submission(request, 0, [given], [given] if in_place else None)
    now[0] = does
    submission.begin()
    submission.finish((made, counts))
    now[0] = asks
    assert submission.outcome() == (made, counts)
    begun = [(does, "after asks"), ("given", does), *[("given", does)] * in_place]
    ended = [(asks, "after does"), ("given" if in_place else "made", asks)]
    assert noted == ([] if same else [*begun, *ended])
