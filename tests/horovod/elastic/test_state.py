"""State kept, put back and sent."""

import pytest
import torch

import fullframe.horovod as hvd
from fullframe.horovod.elastic import ElasticSampler, ObjectState, TorchState, run
from fullframe.horovod.membership import _Mine
from tests.rank_group import rank_group


def test_objects_go_back_to_the_last_commit() -> None:
    state = ObjectState(epoch=1, seen=[1])
    state.epoch, state.seen = 2, [1, 2]
    state.commit()
    state.seen.append(3)
    state.epoch = 5
    state.restore()
    assert (state.epoch, state.seen) == (2, [1, 2])
    state.seen.append(4)
    state.restore()
    assert state.seen == [1, 2]


def on_rank() -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    sampler = ElasticSampler(range(8), shuffle=False)  # type: ignore[arg-type]
    state = TorchState(model, optimizer, sampler=sampler, batch=hvd.rank())
    sampler.record_batch(0, 2)  # rank 0: 0 2, rank 1: 1 3
    state.sync()
    assert state.batch == 0 and optimizer.param_groups[0]["lr"] == 0.1
    assert sampler.processed_indices == {0, 1, 2, 3} and len(sampler) == 2
    weights = hvd.allgather_object(model.weight.tolist())
    assert weights[0] == weights[1]
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.batch = 3
    assert not torch.equal(model.weight, before)
    state.restore()
    assert torch.equal(model.weight, before) and state.batch == 0 and not optimizer.state_dict()["state"]
    called = []
    state.register_reset_callbacks([lambda: called.append(1)])
    state.on_reset()
    assert called == [1]
    hvd.shutdown()


def test_rank_0s_state_becomes_everybodys() -> None:
    rank_group(2).run(on_rank)


def scheduled() -> None:
    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = TorchState(model, optimizer, scheduler=scheduler)
    if hvd.rank() == 0:
        scheduler.step()
    state.sync()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25 and state.scheduler is scheduler
    state.restore()
    assert optimizer.param_groups[0]["lr"] == 0.5 and scheduler.last_epoch == 1 and state.scheduler is scheduler
    state.optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    state.optimizer.param_groups[0]["lr"] = 4.0
    state.restore()
    assert state.optimizer.param_groups[0]["lr"] == 3.0
    hvd.shutdown()


def test_a_scheduler_and_another_optimizer_are_kept_and_sent() -> None:
    rank_group(2).run(scheduled)


class Member:
    """In place of an elastic launcher's: hosts have just been added or removed."""

    def has_news(self) -> bool:
        return True


def hosts_change() -> None:
    hvd.init()
    sampler = ElasticSampler(range(8), shuffle=False)  # type: ignore[arg-type]
    state, order = TorchState(sampler=sampler), list(sampler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Mine, "membership", Member())
        sampler.record_batch(0, 2)
        with pytest.raises(hvd.HostsUpdatedInterrupt):
            state.commit()
        assert sampler.processed_indices == {0, 1, 2, 3} and list(sampler) == order
        sampler.record_batch(2, 1)
        with pytest.raises(hvd.HostsUpdatedInterrupt):
            state.check_host_updates()
        assert sampler.processed_indices == {0, 1, 2, 3, 4, 5}
        state.restore()
        assert sampler.processed_indices == {0, 1, 2, 3}, "what all had processed at the commit"
    sampler.set_epoch(1)
    assert not sampler.processed_indices and sorted(order) == sorted(sampler)
    hvd.shutdown()


def test_what_a_rank_that_leaves_has_processed_is_known_to_the_others() -> None:
    rank_group(2).run(hosts_change)


def test_the_state_is_sent_also_where_hosts_were_only_removed() -> None:
    class Counting(ObjectState):
        syncs = 0

        def sync(self) -> None:
            self.syncs += 1

    def changes_once(state: Counting) -> int:
        if state.syncs == 1:
            raise hvd.HostsUpdatedInterrupt(skip_sync=True)
        return state.syncs

    hvd.init()
    try:
        assert run(changes_once)(Counting()) == 2
    finally:
        hvd.shutdown()


def test_without_an_elastic_launcher_a_failure_is_raised() -> None:
    def fails(state: ObjectState) -> None:
        raise hvd.HorovodInternalError("a rank is gone")

    hvd.init()
    try:
        with pytest.raises(hvd.HorovodInternalError, match="a rank is gone"):
            run(fails)(ObjectState(epoch=0))
    finally:
        hvd.shutdown()
