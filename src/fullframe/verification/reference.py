"""The step in one process: plain tensors, no ranks, every module's inputs, outputs and their gradients kept as files.

`python -m fullframe.verification.reference RECIPE FOLDER NAME=VALUE ...` reads what the ranks wrote to the folder with
`hand_over` and writes there what it computed. A process of its own, so that nothing in it can know of ranks. The batch
goes through replica by replica, each from the same buffers and attributes, and the gradients are added up: batch norm
sees a replica's samples at a time, as it does in data-parallel training.
"""

import io
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from fullframe.data.nested import tensors_replaced
from fullframe.errors import FullframeError, RecipeError
from fullframe.model.attributes import Attributes
from fullframe.ranks.randomness import seed_everything
from fullframe.ranks.raw_bytes import overwrite
from fullframe.recipe import Recipe, load_recipe, values_of
from fullframe.training.faults.whereabouts import where
from fullframe.training.step import sum_and_count
from fullframe.verification.module_tensors import ModuleTensors, writes_to
from fullframe.verification.verdict import NARROW, Place, Value

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "FULLFRAME_VERIFY_",
                   "SLURM_STEP_", "OMPI_", "PMI_")  # fmt: skip


@dataclass(kw_only=True)
class Part:
    """One replica's forward and backward in one process; tensors are read from the files when asked for."""

    folder: Path
    places: list[tuple[Place, int]]  # in order of execution, with the number of the value
    values: list[Value]
    again: set[str] = field(default_factory=set)  # paths of modules that backward has called once more

    def tensor(self, value: int) -> Tensor:
        """The value, mapped from its file: only what is looked at is read."""
        return _mapped(self.folder / f"{value}.pt")

    def gradient(self, value: int) -> Tensor:
        """The gradient of this replica's loss sum by the value."""
        return _mapped(self.folder / f"{value}.gradient.pt")


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What one process computed for the whole batch."""

    loss: float
    gradients: dict[str, Tensor | None]
    buffers: list[dict[str, Tensor]]  # after the step, of each replica
    draws: bool  # with another seed the loss is another
    narrow: dict[str, str]  # what computes in less than double precision: a dtype by the module's path


def without_dropout(model: nn.Module) -> list[str]:
    """Set every nn.Dropout to p = 0, for its draws differ between ranks by design; what was set, in words."""
    silenced = []
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            silenced.append(f"{path or 'the model'} (p = {module.p})")
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention) and module.dropout > 0:
            silenced.append(f"{path or 'the model'} (dropout = {module.dropout})")
            module.dropout = 0.0
    return silenced


_SHARE_AT = {  # where a function is told which share it drops, and by which name
    **dict.fromkeys(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout),
        (1, "p"),
    ),
    F.scaled_dot_product_attention: (4, "dropout_p"),
    F.multi_head_attention_forward: (10, "dropout_p"),
}


class _NothingDropped(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SHARE_AT:
            position, name = _SHARE_AT[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs = kwargs | {name: 0.0}
        return func(*args, **kwargs)


@contextmanager
def nothing_dropped() -> Iterator[None]:
    """Inside, no function drops anything either, as a forward calls them beside nn.Dropout.

    Nor where backward runs a part of it again: backward too is a function, and such a mode is off within any.
    """
    run_backward = torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        with _NothingDropped():
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = backward
    try:
        with _NothingDropped():
            yield
    finally:
        torch.autograd._engine_run_backward = run_backward


def hand_over(folder: Path, parts: Sequence[Any], seeds: Sequence[int], model: nn.Module, device: str) -> None:
    """Give the reference what it starts from: each replica's plain batch and seed, and the model's initial state."""
    state = {name: tensor.detach().cpu() for name, tensor in _state(model).items()}
    torch.save({"parts": list(parts), "seeds": list(seeds), "state": state, "device": device}, folder / "given.pt")


def compute(recipe: Path, folder: Path, values: Sequence[str] = ()) -> None:
    """Run the reference in a process of its own and wait; raises RecipeError with what went wrong there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}
    # The ranks wait, so their threads are free.
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = int(os.environ.get("OMP_NUM_THREADS", "1")) * ranks_here
    environment["OMP_NUM_THREADS"] = str(max(min(threads, len(os.sched_getaffinity(0))), 1))
    command = [sys.executable, "-m", "fullframe.verification.reference", str(recipe), str(folder), *values]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        silent = f"it ended with exit code {done.returncode}, without a word"
        *before, last = done.stderr.strip().splitlines() or [silent]
        raise RecipeError("\n".join([f"the step fails already in one process: {last}", *before]))


def read(folder: Path, replica: int) -> tuple[Answers, Part]:
    """What the reference computed: for the whole batch, and module by module for one replica's samples."""
    answers: Answers = torch.load(folder / "answers.pt", weights_only=False)
    part: Part = torch.load(folder / f"part-{replica}" / "index.pt", weights_only=False)
    return answers, part


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What a recipe makes without naming a dtype (class weights, an 8-bit image over 255) is of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@default_dtype(torch.float64)
def main(recipe_path: Path, folder: Path, values: Sequence[str] = ()) -> None:
    """Compute the reference in this process."""
    recipe = load_recipe(recipe_path, values_of(values))  # first: the batch may be of classes that it defines
    given = torch.load(folder / "given.pt", weights_only=False)
    device = torch.device(given["device"])
    model, _ = double_model(recipe, device)
    with nothing_dropped():
        answers = _answers(recipe, model, device, given, folder)
    torch.save(answers, folder / "answers.pt")


def _answers(recipe: Recipe, model: nn.Module, device: torch.device, given: Mapping[str, Any], folder: Path) -> Answers:
    initial = {name: tensor.to(device) for name, tensor in given["state"].items()}
    set_then = Attributes(model)  # counters, generators, and buffers that a first forward makes: each rank has its own

    def begin(seed: int) -> None:
        set_then.put_back()
        _restore(model, initial)
        seed_everything(seed)

    total, count, buffers = 0.0, 0.0, []
    for replica, (batch, seed) in enumerate(zip(given["parts"], given["seeds"], strict=True)):
        batch = tensors_replaced(batch, lambda tensor: tensor.to(device))
        begin(seed)
        part_sum, part_count = _recorded(recipe, model, batch, folder / f"part-{replica}")
        total, count = total + part_sum, count + part_count
        buffers.append({name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()})

    def forward() -> float:
        return sum_and_count(recipe.loss(model, batch))[0].item()  # with a graph, as it may ask for gradients itself

    def again(seed: int) -> float:
        begin(seed)
        return forward()

    begin(seed + 1)  # not within, where hooks are on the modules
    narrow, other = _narrow(model, forward)
    is_drawn = other is None or not math.isclose(part_sum, other, rel_tol=1e-9)
    draws = is_drawn and _draws(again, seed, part_sum)
    if not count > 0 or not torch.isfinite(torch.tensor(total)):
        raise RecipeError(
            f"the loss of the first batch is {total} over a count of {count}: there is nothing to compare; "
            "let the recipe begin with a batch whose loss is finite"
        )
    gradients = {name: None if p.grad is None else (p.grad / count).cpu() for name, p in model.named_parameters()}
    return Answers(loss=total / count, gradients=gradients, buffers=buffers, draws=draws, narrow=narrow)


def double_model(recipe: Recipe, device: torch.device) -> tuple[nn.Module, list[str]]:
    """The recipe's model from its seed, in double precision, without dropout; what dropout there was, in words."""
    seed_everything(recipe.seed)
    model = recipe.training_model().double().to(device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_complex():  # which nn.Module.double() leaves as they are
            tensor.data = in_double(tensor.data)
    return model, without_dropout(model)


@torch.no_grad()
def moved(model: nn.Module, noise: float, seed: int) -> None:
    """Add to each parameter normal noise, `noise` times its root mean square, or `noise` alone where it is zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        size = parameter.abs().square().mean().sqrt().nan_to_num()
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.device)
        parameter.add_(noise * torch.where(size > 0, size, 1.0) * drawn)


def in_double(tensor: Tensor) -> Tensor:
    """Real and complex numbers in double precision, others as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _recorded(recipe: Recipe, model: nn.Module, batch: Any, folder: Path) -> tuple[float, float]:
    """Forward and backward of one replica's samples, every module's tensors written; the loss sum and its count."""
    folder.mkdir()
    record = _Record(folder)
    with ModuleTensors(model, record.seen) as tensors, _narrow_explained():
        value, count = sum_and_count(recipe.loss(model, batch))
        value.backward()
    record.part.again = tensors.again
    torch.save(record.part, folder / "index.pt")
    return value.item(), count.item()


@contextmanager
def _narrow_explained() -> Iterator[None]:
    """Raises RecipeError in place of torch's error where float32 and float64 meet, which only happens here."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).lower().replace("float64", "double").replace("tensor", "")  # also torch.FloatTensor
        if not {"float", "double"} <= set(re.findall("[a-z]+", said)):
            raise
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        raise RecipeError(
            f"{error} ({where(innermost)}). In training all is float32; verify computes in float64, and a "
            "tensor that is float32 whatever it meets does not follow: write weights.to(prediction) for constants of a "
            "loss, and in place of .float() write .to(torch.get_default_dtype())"
        ) from error


class _Record:
    def __init__(self, folder: Path):
        self.part = Part(folder=folder, places=[], values=[])
        self._numbers = WeakIdKeyDictionary()  # tensor -> (version, number); an in-place op makes it another value
        self._gradients = 0

    def seen(self, place: Place, tensor: Tensor) -> None:
        version, number = self._numbers.get(tensor, (None, 0))
        if version != writes_to(tensor):
            number = len(self.part.values)
            self._numbers[tensor] = writes_to(tensor), number
            kind = {"is_view": tensor._is_view(), "requires_grad": tensor.requires_grad}
            self.part.values.append(Value(shape=tuple(tensor.shape), dtype=str(tensor.dtype), **kind))
            _write(tensor, self.part.folder / f"{number}.pt")
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._arrived(number, gradient))
        self.part.places.append((place, number))

    def _arrived(self, number: int, gradient: Tensor) -> None:
        self.part.values[number].gradient_order = self._gradients
        self._gradients += 1
        _write(gradient, self.part.folder / f"{number}.gradient.pt")


def _draws(again: Callable[[int], float], seed: int, expected: float) -> bool:
    """Whether another seed gives another loss sum than `expected`, beyond rounding, and this one the same again.

    A loss that writes into its batch, or counts its calls, gives another one in any case.
    """
    is_expected = partial(math.isclose, expected, rel_tol=1e-9)
    return not is_expected(again(seed + 1)) and is_expected(again(seed))


def _narrow(model: nn.Module, forward: Callable[[], float]) -> tuple[dict[str, str], float | None]:
    """What in `forward` computes in less than double precision, and what it gives.

    Nothing and None where torch cannot look into it.
    """
    given = None
    with ModuleTensors(model, lambda place, tensor: None) as tensors:
        found = _Narrow(lambda: tensors.caller[0] or "")
        with suppress(Exception), found:  # some compiled programs run under no mode
            given = forward()
    return found.dtypes, given


class _Narrow(TorchDispatchMode):
    """Notes where numbers of one floating dtype become such of another that is no double precision."""

    def __init__(self, path: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path = path
        self.dtypes: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and str(tensor.dtype) in NARROW and _takes_numbers(args):
                self.dtypes.setdefault(self._path(), str(tensor.dtype))
        return result


def _takes_numbers(args: tuple[Any, ...]) -> bool:
    return any(
        isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) for value in tree_leaves(args)
    )


def _state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


@torch.no_grad()
def _restore(model: nn.Module, initial: Mapping[str, Tensor]) -> None:
    state = _state(model)
    if state.keys() != initial.keys():
        raise RecipeError(
            f"model() makes other parameters on the ranks than in one process: {sorted(state.keys() ^ initial.keys())}"
        )
    for name, tensor in state.items():
        overwrite(tensor, initial[name])


def packed(value: Any) -> bytes:
    """For other ranks, with tensors of any dtype: of some, as uint16, torch reads no pickle."""
    into = io.BytesIO()
    torch.save(value, into)
    return into.getvalue()


def unpacked(raw: bytes) -> Any:
    """What was `packed`."""
    return torch.load(io.BytesIO(raw), weights_only=False)


def _write(tensor: Tensor, path: Path) -> None:
    whole = tensor.detach().cpu().contiguous()
    if whole.untyped_storage().nbytes() != whole.nbytes:
        whole = whole.clone()  # a view would write all of its base
    torch.save(whole, path)


def _mapped(path: Path) -> Tensor:
    return torch.load(path, mmap=True, weights_only=True)  # type: ignore[no-any-return]


if __name__ == "__main__":
    # Pickled classes are found again under the module's own name, not under __main__.
    from fullframe.verification import reference

    try:
        reference.main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    except FullframeError as error:
        sys.exit(str(error))
    except Exception:
        sys.exit(traceback.format_exc().rstrip())
