"""The questions of every thread about several GPUs."""

from fullframe.doctor.judgement.checklist import checklist
from fullframe.doctor.judgement.judge import judge
from tests.doctor.judgement.made import ONE, OTHER, backward, batch, job, loader, ranks, update, weights


def test_each_question_is_answered_with_what_was_seen() -> None:
    events = [
        [
            loader(planned=(0, 1, 2, 3)),
            batch(indices=(0, 1)),
            backward(),
            job(rank, frameworks=("DistributedDataParallel",)),
            weights(elements=12),
            update(gradient=gradient),
        ]
        for rank, gradient in enumerate((ONE, OTHER))
    ]
    notes = ranks(*events)
    found = {answer.question: answer for answer in checklist(notes, judge(notes), again="fullframe doctor run a.py")}
    assert "2 processes started, 2 ranks in the process group (gloo)" in found["framework"].text
    assert found["framework"].fine and not found["gradient synchronization"].fine
    assert found["data parallelism"].text == "2 replicas; 2 samples of 8 read, 2 twice (DistributedSampler)"
    assert not found["data parallelism"].fine
    assert "1 parameter (12 numbers)" in found["one model on all ranks"].text
    assert found["a simplified example"].text == "fullframe doctor run a.py"


def test_samples_of_each_replica_s_own_part_are_not_the_same() -> None:
    parts = [[loader(listing=rank), batch(indices=(0, 1)), backward(), job(rank)] for rank in range(2)]
    found = {answer.question: answer for answer in checklist(ranks(*parts), [])}
    assert found["data parallelism"].text == "2 replicas; 4 samples of 16 read, 0 twice (DistributedSampler)"


def test_what_was_not_seen_is_no_answer() -> None:
    assert checklist(ranks([], []), []) == []
    steps = [event for n in range(1, 5) for event in (backward(), update(n, seconds=1.0))]
    assert not any(each.question == "loader" for each in checklist(ranks(steps), []))  # batches came from elsewhere


def test_waiting_for_a_loader_is_no_fault_of_a_small_run_and_that_is_said() -> None:
    steps = [[backward(), update(n, seconds=1.0), batch(n, waited=0.9)] for n in range(1, 5)]
    notes = ranks([loader(), *(event for step in steps for event in step)])
    text = "a rank waits 900 ms of a step of 1 s"
    (whole,) = (each for each in checklist(notes, judge(notes)) if each.question == "loader")
    assert (whole.text, whole.fine) == (text, False)
    findings = judge(notes, at_full_size=False)
    (small,) = (each for each in checklist(notes, findings, at_full_size=False) if each.question == "loader")
    assert (small.text, small.fine) == (f"{text}, which is judged at full size alone", True)


def test_samples_of_a_stream_are_counted_by_their_batches() -> None:
    parts = [
        [loader(samples=None, sampler="Frames"), batch(indices=None, samples=3), backward(), job(r)] for r in range(2)
    ]
    found = {answer.question: answer for answer in checklist(ranks(*parts), [])}
    assert found["data parallelism"].text == "2 replicas; 6 samples of a stream read (Frames)"
