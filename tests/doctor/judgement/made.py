"""Notes as ranks write them, made by hand."""

from typing import Any

from fullframe.doctor.probes.notes import Backward, BatchRead, End, Event, Job, Loader, Notes, Sketch, Update, Weights

ONE, OTHER = Sketch(1, 1.0, (1.0, 0.5)), Sketch(2, 2.0, (2.0, 0.5))


def job(rank: int = 0, **fields: Any) -> Job:
    whole = {"ranks": 2, "started": 2, "replica": rank, "host": "a", "torch": "2", "backend": "gloo", "device": "cpu"}
    return Job(**{**whole, **fields})


def update(number: int = 1, gradient: Sketch = ONE, weight: Sketch = ONE, **fields: Any) -> Update:
    return Update(number=number, optimizer=0, gradients={"w": gradient}, parameters={"w": weight}, **fields)


def weights(sketch: Sketch = ONE, **fields: Any) -> Weights:
    return Weights(parameters={"w": sketch}, **fields)


def backward(**fields: Any) -> Backward:
    return Backward(loss=0.5, **fields)


def loader(number: int = 0, epoch: int = 1, planned: Any = None, **fields: Any) -> Loader:
    whole = {"samples": 8, "workers": 0, "sampler": "DistributedSampler"}
    return Loader(loader=number, epoch=epoch, planned=planned, **{**whole, **fields})


def batch(number: int = 1, indices: Any = None, **fields: Any) -> BatchRead:
    whole = {"loader": 0, "epoch": 1, "waited": 0.0, "contents": number, "samples": 2}
    return BatchRead(number=number, indices=indices, **{**whole, **fields})


def ranks(*events: list[Event], ended: bool = True) -> list[Notes]:
    return [Notes(rank, [*found, *([End(reason="enough")] if ended else [])]) for rank, found in enumerate(events)]


def codes(findings: Any) -> list[str]:
    return [finding.code for finding in findings]
