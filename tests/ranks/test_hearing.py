"""An error of another rank ends the wait for what that rank never sends, where messages bring no heads."""

from typing import Any

import torch
import torch.distributed as dist

from fullframe.errors import DivergenceError
from fullframe.ranks import hearing
from fullframe.ranks.channel import announce, channel_of
from fullframe.ranks.hearing import arrived
from fullframe.ranks.mesh import forget_meshes
from tests.rank_group import rank_group


class Event:
    """In the stream of a device behind a message that comes with the third question, or never."""

    def __init__(self, device: torch.device):
        self.asked = 0

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self.asked += 1
        return comes and self.asked == 3


comes = True


def waits_for_what_never_comes() -> str:
    """Rank 1 meets an error."""
    global comes
    channel = channel_of(dist.group.WORLD)  # type: ignore[arg-type]
    channel.device = torch.device("cpu")
    kept: Any = torch.Event, hearing._LATE_SECONDS, hearing._LOOK_SECONDS
    torch.Event, hearing._LATE_SECONDS, hearing._LOOK_SECONDS = Event, 0.2, 0.02  # type: ignore[assignment,misc]
    sent = torch.ones(1)
    try:
        if dist.get_rank() == 1:
            announce(ValueError("mine"), at="there")
            return "raised"
        comes = True
        assert arrived(sent, channel) is sent
        comes = False
        arrived(sent, channel)
    except DivergenceError as error:
        return str(error)
    finally:
        torch.Event, hearing._LATE_SECONDS, hearing._LOOK_SECONDS = kept  # type: ignore[misc]
        channel.device = None
        dist.barrier()
        forget_meshes()
    return "nothing"


def test_who_waits_hears_of_another_rank_s_error() -> None:
    for _ in range(2):  # as those before are forgotten
        heard, raised = rank_group(2).run(waits_for_what_never_comes, timeout_seconds=30)
        assert raised == "raised"
        assert heard.startswith("rank 1 raised ValueError: mine (at there); rank 0 did not, and is at: ranks/test_hear")
