"""How many bytes a program on split tensors sends."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from fullframe.ranks.channel import Channel


def bytes_of_messages(program: Callable[[], Any]) -> int:
    """The bytes of all messages that this rank posts while `program` runs; a message of all ranks is counted once."""
    found: list[int] = []
    head = Channel.head

    def counted(self: Channel, kind: str, at: str, like: Tensor, *rows: Any) -> bytes:
        found.append(like.numel() * like.element_size())
        return head(self, kind, at, like, *rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "head", counted)
        program()
    return sum(found)
