"""Every sample once in an epoch, however many ranks read it, and when these change in its middle."""

from fullframe.horovod import init, shutdown
from fullframe.horovod.elastic import ElasticSampler
from tests.rank_group import rank_group


def read(batches: int, batch_size: int) -> list[list[int]]:
    """What this rank reads, in the first batches of the epoch, and in what remains after it was put back."""
    init()
    sampler = ElasticSampler(range(20), seed=3)  # type: ignore[arg-type]
    sampler.set_epoch(2)
    order = list(sampler)
    first = []
    for batch in range(batches):
        assert sampler.get_indices(batch, batch_size) == order[batch * batch_size : (batch + 1) * batch_size]
        first += sampler.get_indices(batch, batch_size)
        sampler.record_batch(batch, batch_size)
    again = ElasticSampler(range(20), seed=3)  # type: ignore[arg-type]
    again.load_state_dict(sampler.state_dict())
    shutdown()
    return [order, first, list(again)]


def test_the_ranks_read_everything_once() -> None:
    for ranks in (1, 2):
        orders = [order for order, _, _ in rank_group(ranks).run(read, 0, 1)]
        assert sorted(i for order in orders for i in order) == list(range(20))
        assert orders[0] != sorted(orders[0])


def test_what_was_recorded_is_left_out() -> None:
    for order, first, rest in rank_group(1).run(read, 3, 4):
        assert first == order[:12]
        assert sorted(first + rest) == list(range(20))


def test_a_remainder_is_filled_up() -> None:
    lengths = {len(rest) for _, _, rest in rank_group(2).run(read, 1, 3)}
    assert lengths == {9}  # each rank knows only of its own 3: 17 are left, 18 are read
