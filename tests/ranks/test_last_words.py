"""An error that one rank alone meets is told to the ranks that wait for it."""

import io
import sys

import torch
import torch.distributed as dist

from fullframe.errors import DivergenceError, ShapeError
from fullframe.ranks.last_words import with_last_words
from fullframe.ranks.mesh import forget_meshes, init_mesh
from fullframe.spatial.shard import shard
from tests.rank_group import rank_group


def fails(number: int) -> None:
    if dist.get_rank() == 1:
        raise (ValueError("mine"), ShapeError("ours"))[number]


def told_where_it_is_caught(number: int) -> str:
    """Rank 1 meets an error in what is like `fit`; rank 0 waits for its rows."""
    x = shard(torch.ones(1, 1, 4, 4), init_mesh(width=2))
    try:
        with with_last_words(even_ours=bool(number)):
            fails(number)
        x.full()
    except (ValueError, ShapeError, DivergenceError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
        forget_meshes()
    return "nothing"


def test_who_waits_learns_of_an_error_of_one_rank() -> None:
    for number, said in enumerate(("ValueError: mine", "ShapeError: ours")):
        waits, raised = rank_group(2).run(told_where_it_is_caught, number)
        assert raised == said
        assert waits.startswith(f"DivergenceError: rank 1 raised {said} (at ranks/test_last_words.py:")
        assert "; rank 0 did not, and is at: rows" in waits


def last_words(error: Exception) -> tuple[str, str]:
    """As Python says them on rank 1, where nobody has caught the error; and what rank 0 meets, which waits for it."""
    x = shard(torch.ones(1, 1, 4, 4), init_mesh(width=2))
    sys.stderr, kept = io.StringIO(), sys.stderr
    try:
        if dist.get_rank() == 1:
            raise error
        x.full()
    except Exception as found:
        sys.excepthook(type(found), found, found.__traceback__)
        return str(found), sys.stderr.getvalue()
    finally:
        sys.stderr = kept
        dist.barrier()
        forget_meshes()
    return "", ""


def test_what_ends_a_process_is_told_too() -> None:
    (waits, _), (_, printed) = rank_group(2).run(last_words, OSError("mine"))
    assert waits.startswith("rank 1 raised OSError: mine (at ranks/test_last_words.py:")
    assert "OSError: mine" in printed


def lost_words() -> str:
    init_mesh()
    sys.stderr, kept = io.StringIO(), sys.stderr
    error = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    try:
        sys.excepthook(RuntimeError, error, None)
        return sys.stderr.getvalue()
    finally:
        sys.stderr = kept


def test_a_lost_rank_is_put_in_words_beside_those_of_torch() -> None:
    for rank, printed in enumerate(rank_group(2).run(lost_words)):
        assert "Connection closed by peer" in printed
        assert f"fullframe: rank {rank} waited for the others" in printed
