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


def test_what_was_not_seen_is_no_answer() -> None:
    assert checklist(ranks([], []), []) == []
