"""Every rule on a CUDA-like device: one process's numbers, forward and backward; nobody waits.

The host waits for a GPU where it asks for a value; then the GPU stands still until the host has gone on. On real ranks,
whose messages go through the host here.
"""

import threading
from collections import Counter
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import fullframe as ff
from tests.cuda_like.cases import Ran, on_device, on_host
from tests.cuda_like.device import counted, to_device, to_host
from tests.cuda_like.ranks import device_ranks
from tests.exactness import mesh, relative
from tests.spatial.cases import TOLERANCE, all_cases, every_fourth

# The host waits there although torch's own function does not. It only shrinks: what does not wait any more fails.
WAITS_THOUGH_TORCH_DOES_NOT: dict[str, str] = {
    "spatial/rules/counting.py _unique": "of `isin`, whose split set is made one of different elements",
    "spatial/rules/grid_sample.py _borrowed": "which rows are read decides what is sent",
    "spatial/rules/grid_sample.py _reach": "the same",
    "spatial/rules/grid_sample.py _reach.<locals>.<listcomp>": "the same",
    "spatial/rules/order.py _from_candidates": "equal values decide whether whole rows are sent",
    "spatial/rules/quantiles.py _nth": "bincount and a mask; eight times a median",
    "spatial/rules/scattering.py those_of": "the number of positions that this rank holds",
    "spatial/rules/unpooling.py _all_in_reach": "where the places lie decides what is sent",
}
# torch's own function waits as well, for the shape, the number or the error that it gives hangs on values.
WAITS_AS_TORCH_DOES = {
    "spatial/dispatch.py with_whole_views",
    "spatial/rules/creation.py _of_data",
    "spatial/rules/counting.py _bincount",
    "spatial/rules/counting.py _different",
    "spatial/rules/counting.py _histc",
    "spatial/rules/counting.py _histogram",
    "spatial/rules/counting.py _range",
    "spatial/rules/counting.py _unique_consecutive",
    "spatial/rules/counting.py _unique_slices",
    "spatial/rules/covariance.py _cov",
    "spatial/rules/indexing.py _as_tensor",
    "spatial/rules/indexing.py _write_into_whole",
    "spatial/rules/indexing.py as_number",
    "spatial/rules/linear_algebra.py _of_matrices.<locals>.<lambda>",
    "spatial/rules/linear_algebra.py _of_systems",
    "spatial/rules/linear_algebra.py _of_systems.<locals>.<lambda>",
    "spatial/rules/loss.py _gaussian_nll",
    "spatial/rules/masks.py _require_inside",
    "spatial/rules/masks.py _nonzero",
    "spatial/rules/masks.py _nonzero.<locals>.<listcomp>",
    "spatial/rules/masks.py _picked_by",
    "spatial/rules/masks.py _write_beside_tensors",
    "spatial/rules/masks.py write",
    "spatial/rules/reduction.py _allclose",
    "spatial/rules/reduction.py _equal",
    "spatial/rules/reshape.py _repeat_interleave",
    "spatial/selection.py Selection.of_all",
    "spatial/selection.py Selection.of_all.<locals>.<listcomp>",
    "spatial/selection.py _picks",
    "spatial/selection.py _true_places",
    "spatial/selection.py picked.<locals>.take",
    "spatial/selection.py selected",
}
# Under NCCL no message goes through the host. What is sent to the device once and kept is not counted either.
NOT_COUNTED = {f"ranks/{name}.py" for name in ("shared_memory", "exchange", "collectives", "constants")}
KEPT = {"spatial/rules/taps.py _of_rows"}


class Answer(NamedTuple):
    """Of one case on one rank."""

    name: str
    error: str  # of the run, "" where it ended
    difference: float  # from one process
    faults: list[str]  # what CUDA would refuse, where it does not refuse the plain function's
    waits: dict[tuple[str, str], int]  # (function of the package, why) -> how often
    torch_waits: bool
    in_main_thread: bool  # the backward pass alone


def _answers(every: int) -> list[Answer]:
    on = mesh(1, 2)
    found = []
    for name, case in all_cases(every).items():
        here, plain, split = on_host(case), None, None
        try:
            plain = on_device(case)
            split = on_device(case, lambda whole: ff.shard(whole, on, check=False))
        except Exception as error:
            found.append(Answer(name, f"{type(error).__name__}: {error}", 0.0, [], {}, False, False))
            continue
        faults = [] if _faults(plain) else [f"{what}, {line}" for what, line in _faults(split)]
        waits: Counter[tuple[str, str]] = Counter()
        for (why, line), times in (split.forward.waits + split.backward.waits).items():
            function = f"{line.path} {line.function}"
            if line.ours and line.path not in NOT_COUNTED and function not in KEPT:
                waits[function, why] += times
        torch_waits = bool(plain.forward.waits or plain.backward.waits)
        only_here = split.backward.threads <= {threading.get_ident()}
        found.append(Answer(name, "", _difference(here, split), faults, dict(waits), torch_waits, only_here))
    return found


def _faults(run: Ran) -> set[tuple[str, object]]:
    return {*run.forward.faults, *run.backward.faults}


def _difference(here: Ran, there: Ran) -> float:
    differences = [relative(a, b) for a, b in zip(here.outputs, there.outputs, strict=True)]
    for a, b in zip(here.gradients, there.gradients, strict=True):
        differences.append(
            0.0 if a is None and b is None else relative(a, b) if a is not None and b is not None else 9.0
        )
    return max(differences, default=0.0)


@cache
def answers(every: int) -> list[list[Answer]]:
    """By rank; asked once."""
    return device_ranks().run(_answers, every, timeout_seconds=800)


@pytest.mark.timeout(900)
@every_fourth
def test_the_numbers_are_those_of_one_process(every: int) -> None:
    for rank in answers(every):
        assert len(rank) == len(all_cases(every)) > 500 / every
        assert {answer.name: answer.error for answer in rank if answer.error} == {}
        assert {answer.name: answer.difference for answer in rank if not answer.difference <= TOLERANCE} == {}


@every_fourth
def test_backward_runs_in_the_thread_that_called_it(every: int) -> None:
    assert {answer.name for rank in answers(every) for answer in rank if not answer.in_main_thread} == set()


@every_fourth
def test_no_tensor_of_the_cpu_meets_one_of_the_device(every: int) -> None:
    assert {answer.name: answer.faults for rank in answers(every) for answer in rank if answer.faults} == {}


@every_fourth
def test_the_host_waits_for_the_device_where_torchs_own_function_does(every: int) -> None:
    waiting: dict[str, set[str]] = {}
    more: dict[str, set[str]] = {}
    for rank in answers(every):
        for answer in rank:
            for (function, why), times in answer.waits.items():
                place = waiting if answer.torch_waits else more
                place.setdefault(function, set()).add(f"{answer.name}: {why} x {times}")
    known = {function: cases for function, cases in more.items() if function not in WAITS_THOUGH_TORCH_DOES_NOT}
    assert known == {}, "the host waits although torch's own function does not"
    if every == 1:
        assert WAITS_THOUGH_TORCH_DOES_NOT.keys() - more.keys() == set(), "waits no more: take it out of the table"
    new = waiting.keys() - WAITS_AS_TORCH_DOES - WAITS_THOUGH_TORCH_DOES_NOT.keys()
    assert {function: waiting[function] for function in new} == {}
    if every == 1:
        assert WAITS_AS_TORCH_DOES - waiting.keys() == set(), "waits no more: take it out of the table"


def _by_indices_of_the_host() -> tuple[list[float], set[tuple[str, object]]]:
    """How far reads and writes at index tensors and with a number of the host are from one process's, and faults."""
    on, at = mesh(1, 2), torch.tensor([0, 30, 5])
    whole = torch.arange(2.0 * 4 * 11 * 37, dtype=torch.float64).view(2, 4, 11, 37)

    def answers(x: Tensor) -> list[Tensor]:
        written, put = x.clone(), x.index_put((torch.tensor([0, 1]), torch.tensor([3, 1])), x[0, 0])
        written[..., at] = torch.tensor(7.0, dtype=torch.float64)
        return [x[..., at], x[:, :, at // 3, at], written, put, x[:, :, whole[0, 0] > 300]]

    with counted() as counts:
        split = answers(ff.shard(to_device(whole), on, check=False))
    got = [to_host(t.full() if isinstance(t, ff.SpatialTensor) else t) for t in split]
    return [relative(a, b) for a, b in zip(answers(whole), got, strict=True)], counts.faults


def test_index_tensors_and_numbers_of_the_host() -> None:
    assert device_ranks().run(_by_indices_of_the_host) == [([0.0] * 5, set())] * 2
