"""What there is to choose from, drawn, and what is expected of it before it is simulated."""

import dataclasses

import pytest

from fullframe.planning.candidates import Job, border, candidates, meshes, precisions_of, saves_more
from fullframe.planning.estimate import Estimator
from fullframe.simulation.devices.table import device_named, parse_cluster
from fullframe.simulation.memory.terms import Terms
from fullframe.simulation.prediction import Moment, Prediction
from fullframe.strategy import Strategy

GIB = 2**30


def job(cluster: str = "4xA100-80GB", batch_size: int = 4, rows: int = 512, columns: int = 2048) -> Job:
    found = parse_cluster(cluster)
    return Job(
        cluster=found,
        batch_size=batch_size,
        rows=rows,
        columns=columns,
        precisions=precisions_of(found.device),
        can_offload=found.device.is_cuda,
    )


def prediction(*, seconds: float = 1.0, context: int = 0, **bytes: int) -> Prediction:
    peak = sum(bytes.values())
    return Prediction(
        peak_bytes=peak,
        reserved_bytes=peak,
        bytes=bytes,
        step_seconds=seconds,
        seconds={"matmul": seconds},
        limits={"arithmetic": seconds},
        moment=Moment(step=1, phase="backward", module=""),
        largest=(),
        modules={},
        terms={"context": context},
        parameters=0,
    )


@pytest.mark.parametrize(
    ("ranks", "batch", "rows", "columns", "found"),
    [
        # ranks that all work; the finest split in two ways cuts least, then the one along the shorter side
        (1, 4, 512, 2048, [(1, 1, 1)]),
        (2, 1, 512, 2048, [(1, 1, 2), (1, 2, 1), (1, 1, 1)]),
        (2, 2, 512, 2048, [(2, 1, 1), (1, 1, 2), (1, 2, 1), (1, 1, 1)]),
        (4, 1, 512, 2048, [(1, 1, 4), (1, 2, 2), (1, 4, 1), (1, 1, 1)]),
        # 2 replicas of a 6-rank node get 3 ranks each, or 2
        (
            6,
            2,
            512,
            512,
            [
                (2, 1, 3),
                (2, 3, 1),
                (1, 2, 3),
                (1, 3, 2),
                (1, 1, 6),
                (1, 6, 1),
                (2, 1, 2),
                (2, 2, 1),
                (1, 1, 4),
                (1, 2, 2),
                (1, 4, 1),
                (2, 1, 1),
                (1, 1, 1),
            ],
        ),
        # 7 samples on 8 ranks: 7 replicas, or all 8 on one sample's pixels
        (8, 7, 512, 40, [(1, 8, 1), (1, 4, 2), (7, 1, 1), (1, 1, 1)]),
        # 40 columns are enough for 2 ranks of at least 16, 20 rows for 1
        (4, 1, 20, 40, [(1, 1, 2), (1, 1, 1)]),
    ],
)
def test_meshes(ranks: int, batch: int, rows: int, columns: int, found: list[tuple[int, int, int]]) -> None:
    made = meshes(ranks, batch, (1, rows, columns))
    assert [(data, height, width) for data, _, height, width in made][: len(found)] == found
    for data, depth, height, width in made:
        assert depth == 1, "an image has no depth"
        assert data * height * width <= ranks and batch % data == 0


def test_meshes_of_volumes() -> None:
    """The shortest faces first; a rank has at least 16 slices of a split volume."""
    assert meshes(2, 1, (64, 32, 128)) == [(1, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 1)]
    assert (1, 2, 2, 2) in meshes(8, 1, (64, 64, 64)) and (1, 4, 1, 1) in meshes(4, 1, (64, 8, 8))
    assert all(depth == 1 for _, depth, _, _ in meshes(8, 4, (31, 512, 512)))
    assert (
        border((1, 2, 2, 1), (64, 32, 128)) == 16 * 128 + 32 * 128
    )  # a face of height by width, one of depth by width


@pytest.mark.parametrize(
    ("device", "precisions"),
    [
        ("V100-16GB", ("fp16", "fp32")),
        ("T4", ("fp16", "fp32")),
        ("A100-80GB", ("bf16", "tf32", "fp32")),
        ("RTX4090", ("bf16", "fp32")),  # TF32 is no faster there than fp32
        ("H100", ("bf16", "tf32", "fp32")),
    ],
)
def test_precisions_are_those_the_device_is_faster_in(device: str, precisions: tuple[str, ...]) -> None:
    assert precisions_of(device_named(device)) == precisions


def test_every_candidate_is_a_valid_strategy_for_the_batch() -> None:
    found = list(candidates(job("8xV100-32GB", batch_size=12)))
    assert len(found) == len(set(found))
    for strategy in found:
        assert strategy.ranks <= 8 and 12 % (strategy.data * strategy.microbatches) == 0
        assert strategy.precision in ("fp16", "fp32") and strategy.optimizer == "recipe"
        assert not (strategy.ranks == 1 and (strategy.shard_parameters or strategy.shard_optimizer))
    assert Strategy(data=2, height=2, width=2, microbatches=3, precision="fp16", recompute="blocks", offload=True,
                    shard_parameters=True) in found  # fmt: skip


def test_on_the_cpu_nothing_is_offloaded() -> None:
    assert not any(strategy.offload for strategy in candidates(job("2xcpu")))


def test_the_state_is_scaled_by_who_keeps_it_and_the_activations_by_what_is_held() -> None:
    known = prediction(parameter=4 * GIB, gradient=4 * GIB, optimizer=8 * GIB, activation=16 * GIB, context=GIB)
    estimator = Estimator({Strategy(width=4): known}, job())

    def gib(**fields: object) -> float:
        return estimator(Strategy(**fields)).bytes / GIB  # type: ignore[arg-type]

    # a microbatch of 4 whole frames, cut in 4 columns, holds what one frame a rank does
    assert gib(width=4) == 16 + 16 + 1
    assert gib(data=4) == 16 + 16 + 1
    assert gib(width=2) == 16 + 32 + 1
    assert gib(width=4, microbatches=4) == 16 + 4 + 1
    assert gib(width=4, shard_optimizer=True) == 8 + 2 + 16 + 1
    assert gib(width=4, shard_parameters=True) == 4 + 16 + 1


def test_the_most_similar_strategy_is_scaled() -> None:
    known = {
        Strategy(width=4): prediction(activation=100 * GIB),
        Strategy(width=4, recompute="blocks"): prediction(activation=10 * GIB, seconds=1.3),
    }
    found = Estimator(known, job())(Strategy(width=2, recompute="blocks", shard_optimizer=True))
    assert found.like.recompute == "blocks" and found.bytes == 20 * GIB and found.seconds == pytest.approx(2.6)
    assert found.doubt == 0.8  # who keeps the optimizer's state is not the same


def test_what_arithmetic_limits_goes_by_the_rate_and_the_shortest_kernels_by_their_number() -> None:
    made = prediction(seconds=4.0)
    made = dataclasses.replace(made, limits={"arithmetic": 1.0, "kernel": 3.0})
    asked = job("4xV100-16GB")
    rates = asked.cluster.device.rate
    estimator = Estimator({Strategy(data=4, precision="fp16"): made}, asked)
    assert estimator(Strategy(data=4)).seconds == pytest.approx(3 + rates("fp16") / rates("fp32"))
    assert estimator(Strategy(data=2, precision="fp16")).seconds == pytest.approx(3 + 2)
    assert estimator(Strategy(data=2, precision="fp16", microbatches=2)).seconds == pytest.approx(6 + 2)


def test_more_work_fills_the_time_in_which_gradients_are_waited_for() -> None:
    made = dataclasses.replace(prediction(seconds=1.0), seconds={"matmul": 1.0, "gradients": 0.9, "launch": 0.3})
    estimator = Estimator({Strategy(data=4): dataclasses.replace(made, step_seconds=2.2)}, job("4xV100-16GB"))
    assert estimator(Strategy(data=4)).seconds == pytest.approx(2.2)
    assert estimator(Strategy(data=2)).seconds == pytest.approx(2.0)  # 0.9 less a third, and 0.3, are less than 1.0


def test_whether_one_rank_is_much_faster_than_replicas_is_not_known_before_one_was_simulated() -> None:
    known = {Strategy(data=4): dataclasses.replace(prediction(seconds=0.1), host_seconds=5.0)}
    assert Estimator(known, job())(Strategy(data=2)).doubt == 0.95
    assert Estimator(known, job())(Strategy()).doubt == 0.8
    half = {"precision": "bf16"}
    known |= {
        Strategy(data=n, **half): dataclasses.replace(prediction(), host_seconds=s)  # type: ignore[arg-type]
        for n, s in ((1, 6.0), (4, 8.0))
    }
    found = Estimator(known, job())(Strategy())
    assert found.doubt == 0.95 and found.seconds == pytest.approx(5.0 * 6 / 8)


def test_a_communicator_takes_what_it_takes_for_as_many_ranks() -> None:
    of = Terms(job().cluster.device, "fp32").nccl_bytes
    known = dataclasses.replace(prediction(activation=GIB), terms={"nccl": of([4])})
    estimator = Estimator({Strategy(data=4): known}, job())
    least = estimator(Strategy(data=4, microbatches=1)).bytes - of([4])
    assert estimator(Strategy(data=2)).bytes == least + GIB + of([2])
    assert estimator(Strategy()).bytes == least + 3 * GIB
    alone = Estimator({Strategy(): prediction(activation=4 * GIB)}, job())
    assert alone(Strategy(data=4)).bytes == GIB + of([4])


@pytest.mark.parametrize(
    ("more", "less", "saves"),
    [
        ({"microbatches": 2}, {}, True),
        ({"recompute": "blocks"}, {}, True),
        ({"recompute": "blocks", "offload": True}, {"offload": True}, True),
        ({"shard_parameters": True}, {"shard_optimizer": True}, True),
        ({"shard_optimizer": True}, {"shard_parameters": True}, False),
        ({"recompute": "blocks"}, {"microbatches": 2}, False),
        ({"recompute": "blocks", "width": 2}, {}, False),
        ({"recompute": "blocks", "precision": "bf16"}, {}, False),
        ({}, {}, False),
    ],
)
def test_what_only_saves_memory(more: dict[str, object], less: dict[str, object], saves: bool) -> None:
    assert saves_more(Strategy(**more), Strategy(**less)) is saves  # type: ignore[arg-type]
