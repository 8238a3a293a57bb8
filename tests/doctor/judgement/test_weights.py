"""What must be equal on all ranks."""

from fullframe.doctor.judgement.weights import judged_weights
from fullframe.doctor.probes.notes import Failure, Sketch
from tests.doctor.judgement.made import ONE, OTHER, backward, codes, job, ranks, update, weights


def test_one_rank_has_nobody_to_differ_from() -> None:
    assert codes(judged_weights(ranks([job(), weights(), update()]))) == []


def test_equal_ranks_are_sound() -> None:
    assert codes(judged_weights(ranks(*([job(rank), weights(), update()] for rank in (0, 1))))) == []


def test_the_odd_rank_and_the_norms_are_named() -> None:
    notes = ranks(*([job(rank), weights(), update(gradient=OTHER if rank == 2 else ONE)] for rank in range(3)))
    (found,) = judged_weights(notes)
    assert found.code == "FF301"
    assert "w has norm 1 on rank 0 and 2 on rank 2 (relative difference 0.5)" in found.message


def test_rounding_is_said_to_be_rounding() -> None:
    near = Sketch(3, 1.0, (1.0, 0.5 + 1e-9))
    (found,) = judged_weights(ranks([job(), update(gradient=ONE)], [job(1), update(gradient=near)]))
    assert found.message.endswith("by rounding alone")


def test_no_sync_before_the_step_is_the_reason_and_the_remedy() -> None:
    events = [[job(rank), backward(synchronizes=False), update(gradient=g)] for rank, g in enumerate((ONE, OTHER))]
    (found,) = judged_weights(ranks(*events))
    assert "no_sync() on ranks 0, 1" in found.evidence
    assert found.fix == "leave no_sync() before the last backward of a step"


def test_a_missing_wrapper_is_the_reason() -> None:
    events = [[job(r, unsynchronized=("Net",)), backward(), update(gradient=g)] for r, g in enumerate((ONE, OTHER))]
    (found,) = judged_weights(ranks(*events))
    assert found.evidence == "no data parallel wrapper was called, only Net"


def test_ranks_that_start_apart_are_not_also_said_to_drift() -> None:
    events = [[job(r), weights(w), update(weight=w)] for r, w in enumerate((ONE, OTHER))]
    assert codes(judged_weights(ranks(*events))) == ["FF302"]
    events = [[job(r), weights(), update(weight=w)] for r, w in enumerate((ONE, OTHER))]
    assert codes(judged_weights(ranks(*events))) == ["FF303"]
    events = [[job(r), weights(), update(weight=w, rates=(w.norm,))] for r, w in enumerate((ONE, OTHER))]
    (found,) = judged_weights(ranks(*events))
    assert found.code == "FF304" and "(1.0,) on rank 0, (2.0,) on rank 1" in found.message


def test_of_sharded_parameters_only_the_same_parts_are_compared() -> None:
    from dataclasses import replace

    parts = [replace(update(), gradients={f"w[0:{r}]": g}, parameters={}) for r, g in enumerate((ONE, OTHER))]
    assert codes(judged_weights(ranks(*([job(r), part] for r, part in enumerate(parts))))) == []


def test_ranks_that_share_a_gpu_and_ranks_that_never_meet() -> None:
    events = [[job(rank, device="cuda:0", device_id="GPU-1"), update()] for rank in (0, 1)]
    (found,) = judged_weights(ranks(*events))
    assert (found.code, found.message) == ("FF337", "ranks 0, 1 all compute on cuda:0")
    elsewhere = [[job(rank, host=f"h{rank}", device="cuda:0", device_id="GPU-1")] for rank in (0, 1)]
    assert codes(judged_weights(ranks(*elsewhere))) == []
    events = [[job(rank, ranks=1), update(gradient=g)] for rank, g in enumerate((ONE, OTHER))]
    assert codes(judged_weights(ranks(*events))) == ["FF339"]


def test_ddp_that_gave_up_for_unused_parameters_is_no_missing_wrapper() -> None:
    text = "Expected to have finished reduction in the prior iteration before starting a new one"
    failed = Failure(kind="RuntimeError", text=text, trace="")
    events = [[job(r), update(gradient=g), failed] for r, g in enumerate((ONE, OTHER))]
    assert codes(judged_weights(ranks(*events))) == []
