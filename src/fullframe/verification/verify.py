"""One step of a recipe on split ranks against the same step in one process: are the numbers the same, and where not?

The split step compares itself with the reference while it runs: a hook reads this rank's part of the reference from a
file and keeps only how far it is off. Hooks send nothing, so that a rank can never wait for another in one of them.
"""

import contextlib
import dataclasses
import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, Subset, default_collate
from torch.utils.weak import WeakIdKeyDictionary

from fullframe.data.nested import tensors_replaced
from fullframe.data.slices import SliceReader
from fullframe.errors import RecipeError, UnsupportedOp
from fullframe.ranks.agreement import from_all_ranks, on_all_ranks
from fullframe.ranks.collectives import all_sum_no_grad
from fullframe.ranks.mesh import has_stages, init_mesh, spatial_of, stage_axis
from fullframe.ranks.randomness import mixed_seed, seed_everything
from fullframe.recipe import Recipe, load_recipe, values_of
from fullframe.spatial.redistribute import sliced
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import local_or_whole, spec_in, wrap
from fullframe.strategy import Strategy
from fullframe.training.loading.delivery import mesh_device
from fullframe.training.loading.loader import ShardedLoader
from fullframe.training.session import host_loader, prepare
from fullframe.training.step import TrainStep
from fullframe.verification import reference
from fullframe.verification.diagnosis import Evidence, Named, PartEvidence, judged, refused
from fullframe.verification.module_tensors import ModuleTensors, compared, writes_to
from fullframe.verification.reference import Answers, Part
from fullframe.verification.stages import StagedCalls
from fullframe.verification.verdict import Found, Place, Verdict
from fullframe.wording import some

DEFAULT_TOLERANCE = 1e-9
_LEAVE_SECONDS = 10.0
K = TypeVar("K")
_Key = tuple[str, str, int, int]  # of a place: kind, path, call, leaf


@reference.default_dtype(torch.float64)
def verify(
    path: Path,
    strategy: Strategy,
    *,
    values: Sequence[str] = (),
    unsupported: Literal["error", "gather"] | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    noise: float = 0.0,
) -> Verdict:
    """Run one step of the recipe in one process and on the mesh of `strategy`, in float64; all ranks call it.

    What is compared: the loss, every parameter's gradient, every buffer, and every module's inputs and outputs with
    their gradients. Same seed, same weights, first batch of the recipe's order; dropout is off. Differences are
    relative to the largest value of the tensor in one process.

    It proves these numbers for this batch, this mesh and this device. It does not prove other sizes or meshes, code
    that this batch does not reach, lower precision, the optimizer, or evaluation. With data replicas, the reference
    takes each replica's samples separately, so that batch norm sees in both what it sees in data-parallel training.
    `values` are words for the recipe, as `name=value`. `noise` moves the weights first (`reference.moved`).

    Raises MeshError or RecipeError on all ranks; an op without an exact rule gives a verdict with `refused`.
    """
    recipe = load_recipe(path, values_of(values))
    recipe = dataclasses.replace(
        recipe,
        unsupported=unsupported or recipe.unsupported,
        find_unused_parameters=True,  # a note names them
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),  # weights stay as they are
    )
    mesh = init_mesh(strategy.height, strategy.width, depth=strategy.depth, stages=strategy.stages)
    notes: list[str] = []
    about = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True)), mesh_device(mesh).type, tolerance, notes
    plain, step, batch, kept = _prepared(recipe, strategy, mesh, notes, noise)
    with _machine_folder() as folder:
        _run_reference(path, values, folder, recipe, mesh, plain, kept.batch)
        answers, part = reference.read(folder, mesh.get_local_rank("data"))
        comparison = _Comparison(part, mesh, plain, step)
        try:
            with _gather_warnings(notes), comparison.tensors, reference.nothing_dropped():
                seed_everything(_seed(recipe, comparison.replica))
                loss = step(batch).loss
        except UnsupportedOp as error:  # on every rank of the replica alike; from here on nobody sends anything
            return refused(error, *about)
        comparison.finish()
        evidence = _evidence(answers, comparison, plain, loss)
    return judged(evidence, *about)


class _KeptBatch:
    """Collates in float64 and keeps this replica's whole batch, which is what one process gets."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate or default_collate
        self.batch: Any = None

    def __call__(self, samples: list[Any]) -> Any:
        collated = self._collate(samples)
        self.batch = tensors_replaced(collated, reference.in_double)
        return self.batch


def _prepared(
    recipe: Recipe, strategy: Strategy, mesh: DeviceMesh, notes: list[str], noise: float
) -> tuple[nn.Module, TrainStep, Any, _KeptBatch]:
    plain, silenced = reference.double_model(recipe, mesh_device(mesh))
    if noise:
        reference.moved(plain, noise, recipe.seed)
        notes.append(f"the weights are the recipe's with noise of {noise:g} times their size, in both runs")
    if silenced:
        notes.append(f"dropout is off for the comparison, in both runs: {some(silenced)}")
    if not any(p.requires_grad for p in plain.parameters()):
        raise RecipeError("no parameter of the model requires a gradient; there is no step to compare")
    _, _, step = prepare(recipe, strategy, mesh, plain)
    kept = _KeptBatch(recipe.collate)
    reads = dataclasses.replace(recipe, workers=0, collate=kept)

    def first_batch(data: Dataset[Any], read: Dataset[Any] | None = None) -> Any:
        host = host_loader(reads, data, read)
        return next(
            iter(ShardedLoader(host, mesh, seed=recipe.seed, prefetch=0))
        )  # the next would be kept in its place

    with reference.default_dtype(torch.float32):  # read as in training: a data set is no part of what is compared
        data = recipe.data()
        batch = first_batch(data)
        if isinstance(data, SliceReader):  # then `batch` was read in parts, and what was kept is one of them
            first_batch(data, Subset(data, range(len(data))))  # type: ignore[arg-type]  # which offers no read()
    return plain, step, batch, kept


def _run_reference(
    path: Path, values: Sequence[str], folder: Path, recipe: Recipe, mesh: DeviceMesh, plain: nn.Module, mine: Any
) -> None:
    """One rank of each machine has the reference computed; raises RecipeError on all ranks when it fails on any."""
    first_ranks = mesh.mesh.flatten(1)[:, 0].tolist()
    parts = []
    for rank in first_ranks:
        carried = [reference.packed(mine) if rank == dist.get_rank() else b""]
        dist.broadcast_object_list(carried, src=rank)
        parts.append(reference.unpacked(carried[0]))
    seeds = [_seed(recipe, replica) for replica in range(len(parts))]

    def compute() -> None:
        if _first_of_machine():
            reference.hand_over(folder, parts, seeds, plain, str(mesh_device(mesh)))
            reference.compute(path, folder, values)

    on_all_ranks(compute)


class _Hooked(NamedTuple):
    """A value whose gradient is waited for."""

    spec: Spec | None
    empty: Tensor  # of its dtype and device
    local_shape: tuple[int, ...]

    def zeros(self) -> Tensor:
        return self.empty.new_zeros(self.local_shape)


class _Comparison:
    """The values of the split step against those of one process, as they appear."""

    def __init__(self, part: Part, mesh: DeviceMesh, plain: nn.Module, step: TrainStep):
        self.part, self._spatial = part, spatial_of(mesh)
        self.replica = mesh.get_local_rank("data")
        self._stage = stage_axis(mesh).coordinate if has_stages(mesh) else 0
        self._calls = _staged_calls(part, plain, step)
        self.tensors = ModuleTensors(plain, self.seen, self._calls.entering)
        self.found = PartEvidence(places=part.places, values=part.values, forward={}, backward={}, unexpected=[])
        self._numbers: dict[_Key, int] = {place[:4]: number for place, number in part.places}
        self._known = WeakIdKeyDictionary()  # local tensor -> its version
        self._hooked: dict[int, _Hooked] = {}
        self._shares: dict[int, Tensor] = {}  # gradients of which other ranks hold a share

    def seen(self, place: Place, tensor: Tensor) -> None:
        """Compare, and wait for the gradient. Sends nothing."""
        number = self._numbers.get(place[:4])
        if number is None:
            self.found.unexpected.append(place)
            return
        spec = spec_in(tensor)
        local = local_or_whole(tensor)
        found = self.found.forward[place[:4]] = self._compared(number, local, spec)
        is_another_s = self._calls.leaving(place, self.tensors.calls) or self._calls.begins_part(place)
        if self._known.get(local, None) == writes_to(local):
            return  # its gradient is that of all its uses, and belongs to the value that it was first
        self._known[local] = writes_to(local)
        if is_another_s:
            return  # a copy of what a stage has made, which gets a part of the gradient
        if isinstance(local, nn.Parameter):
            return  # its gradient is compared by its name, as the mean over replicas that it is
        if place.path in self.part.again and not self.part.values[number].requires_grad:
            return  # torch's reentrant checkpoint has gradients in its second pass alone, ours in the first
        if local.requires_grad and not found.problem and number not in self._hooked:
            self._hooked[number] = _Hooked(spec, local.detach().new_empty(0), tuple(local.shape))
            local.register_hook(lambda gradient: self._arrived(number, gradient))

    def _compared(self, number: int, local: Tensor, spec: Spec | None) -> Found:
        shape = tuple(local.shape) if spec is None else spec.shape
        value = self.part.values[number]
        if shape != value.shape or str(local.dtype) != value.dtype:
            problem = f"{shape} {local.dtype} instead of {value.shape} {value.dtype}"
            return Found(float("inf"), 0.0, True, problem, tuple(local.shape), dist.get_rank())
        whole = self.part.tensor(number)
        return compared(whole if spec is None else sliced(whole, spec), local.detach(), dist.get_rank())

    def _arrived(self, number: int, gradient: Tensor) -> None:
        """In backward. The true gradient is the mean over the replica's ranks of what each holds, zero elsewhere."""
        spec = self._hooked[number].spec
        if self._parts(spec) == self._spatial.size:
            self._judge(number, gradient / self._spatial.size, spec)
        else:
            self._shares[number] = gradient.detach()

    def _parts(self, spec: Spec | None) -> int:
        """How many ranks of a replica hold different parts."""
        axes = [] if spec is None else [self._spatial.axis(placement.axis) for placement in spec.placements]
        return math.prod(axis.size for axis in axes)

    def _judge(self, number: int, gradient: Tensor, spec: Spec | None) -> None:
        value = self.part.values[number]
        has_one = value.gradient_order is not None
        if value.is_view and not has_one:
            return
        whole = self.part.gradient(number) if has_one else torch.zeros(value.shape, dtype=gradient.dtype)
        expected = whole if spec is None else sliced(whole, spec)
        self.found.backward[number] = compared(expected, gradient, dist.get_rank())

    @torch.no_grad()
    def finish(self) -> None:
        """Compare the gradients of which several ranks hold shares; all ranks call it after backward."""
        shared: dict[int, str] = {}
        for number, hooked in self._hooked.items():
            if self._parts(hooked.spec) < self._spatial.size:
                shared[number] = str(hooked.spec and hooked.spec.placements)
            elif number not in self.found.backward:  # no gradient came
                self._judge(number, hooked.zeros(), hooked.spec)
        mine = self.replica, self._stage
        replica = [theirs for whose, theirs in from_all_ranks((mine, shared)) if whose == mine]
        agreed = [n for n, cuts in sorted(replica[0].items()) if all(theirs.get(n) == cuts for theirs in replica)]
        for number in agreed:
            hooked = self._hooked[number]
            share = self._shares.get(number)
            whole = hooked.zeros() if share is None else share
            if hooked.spec is not None:
                whole = wrap(whole, hooked.spec).full()  # type: ignore[attr-defined]
            total = all_sum_no_grad(whole, self._spatial.replica)  # of equal wholes, one for each part of it
            self._judge(number, total / (self._spatial.size * self._parts(hooked.spec)), None)


def _staged_calls(part: Part, plain: nn.Module, step: TrainStep) -> StagedCalls:
    """What this rank's stage runs of the modules that are on stages."""
    staged = step.staged
    paths = {module: path for path, module in plain.named_modules()}

    def shares() -> dict[str, range]:
        return {} if staged is None else {paths[module]: share for module, share in staged.shares().items()}

    return StagedCalls([place for place, _ in part.places], shares)


def _evidence(answers: Answers, comparison: _Comparison, plain: nn.Module, loss: float) -> Evidence:
    """What all ranks found, on all ranks."""
    parameters = dict(plain.named_parameters())
    gradients, missing = _gradients(answers, parameters)
    buffers = dict(plain.named_buffers())
    expected = answers.buffers[comparison.replica]
    of_buffers = {name: compared(expected[name], buffer, dist.get_rank()) for name, buffer in buffers.items()}
    everyone = from_all_ranks((comparison.replica, comparison.found, gradients, of_buffers))
    replicas = sorted({replica for replica, *_ in everyone})
    return Evidence(
        parts=[_joined_parts([part for number, part, *_ in everyone if number == r]) for r in replicas],
        losses=(answers.loss, loss),
        parameters=_named([found for *_, found, _ in everyone], missing, parameters),
        buffers=_named([found for *_, found in everyone], {}, buffers),
        classes={path: type(module).__name__ for path, module in plain.named_modules()},
        narrow=answers.narrow,
        draws=answers.draws,
    )


def _gradients(answers: Answers, parameters: dict[str, nn.Parameter]) -> tuple[dict[str, Found], dict[str, str]]:
    """How far this rank's gradients are off; and the parameters that have none, with the reason."""
    found: dict[str, Found] = {}
    missing: dict[str, str] = {}
    for name, parameter in parameters.items():
        expected, got = answers.gradients[name], parameter.grad
        if not parameter.requires_grad:
            continue
        if expected is None and got is None:
            missing[name] = "no gradient"
        elif got is None:
            found[name] = Found(math.inf, 0.0, problem="no gradient, though one process has one", rank=dist.get_rank())
        else:
            found[name] = compared(torch.zeros_like(got) if expected is None else expected, got, dist.get_rank())
    return found, missing


def _named(everyone: list[dict[str, Found]], missing: dict[str, str], tensors: Mapping[str, Tensor]) -> Named:
    return Named(
        found=_joined(everyone),
        missing=missing,
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        dtypes={name: str(tensor.dtype) for name, tensor in tensors.items()},
    )


def _joined_parts(parts: list[PartEvidence]) -> PartEvidence:
    """What the ranks of one replica found."""
    return dataclasses.replace(
        parts[0],
        forward=_joined([part.forward for part in parts]),
        backward=_joined([part.backward for part in parts]),
        unexpected=[place for part in parts for place in part.unexpected],
    )


def _joined(everyone: Sequence[Mapping[K, Found]]) -> dict[K, Found]:
    joined: dict[K, Found] = {}
    for found in everyone:
        for key, item in found.items():
            joined[key] = joined[key].joined(item) if key in joined else item
    return joined


def _seed(recipe: Recipe, replica: int) -> int:
    """As in training: replicas draw different numbers, the ranks of one replica start from the same state."""
    return mixed_seed(recipe.seed, replica, 0)


@contextlib.contextmanager
def _gather_warnings(notes: list[str]) -> Iterator[None]:
    """What was gathered for want of a rule, and any other warning of the step, becomes a note."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        yield
    notes += [str(warning.message) for warning in said if " runs on the gathered " in str(warning.message)]
    for warning in said:
        if " runs on the gathered " not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextlib.contextmanager
def _machine_folder() -> Iterator[Path]:
    """A folder that the ranks of one machine share; removed when the last of them has left, by the first.

    Made within the folder that whoever started the ranks removes, where there is one, so that nothing stays behind
    when ranks are killed.
    """
    made = None
    if _first_of_machine():
        made = tempfile.mkdtemp(prefix="fullframe-verify-", dir=os.environ.get("FULLFRAME_VERIFY_FOLDER"))
    machine = os.environ.get("GROUP_RANK", "0")
    everyone = from_all_ranks((machine, made))
    folder = Path(next(folder for name, folder in everyone if name == machine and folder is not None))
    try:
        yield folder
    except BaseException:  # this rank's end is the end of the job: nobody is waited for
        if made is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / f"left-{dist.get_rank()}").touch()
    if made is None:
        _wait_until(lambda: not folder.exists())  # who ends first may have the others ended
        return
    _wait_until(lambda: len(list(folder.glob("left-*"))) == sum(name == machine for name, _ in everyone))
    shutil.rmtree(folder, ignore_errors=True)


def _wait_until(done: Callable[[], bool]) -> None:
    """Wait for the other ranks by files, for after a refusal no rank may rely on another to answer messages."""
    until = time.monotonic() + _LEAVE_SECONDS
    while not done() and time.monotonic() < until:
        time.sleep(0.01)


def _first_of_machine() -> bool:
    return int(os.environ.get("LOCAL_RANK", "0")) == 0
