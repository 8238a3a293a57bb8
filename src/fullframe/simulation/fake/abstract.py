"""A recipe's model and batch without their memory: what is built is real Python, its tensors are fake."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import default_collate
from torch.utils.weak import WeakTensorKeyDictionary

from fullframe.data.nested import leaves, tensors_replaced
from fullframe.errors import RecipeError
from fullframe.model.attributes import OF_EVERY_MODULE
from fullframe.model.trained import require_shapes
from fullframe.ranks.randomness import sample_randomness
from fullframe.recipe import Recipe
from fullframe.simulation.fake.blame import blamed
from fullframe.simulation.fake.numbers import FEW, know
from fullframe.simulation.fake.replaced import replaced
from fullframe.training.loading.listing import first_sample

LIKE_THE_FIRST = (
    "collate hands on tensors of single samples: each is taken to be as large as the first sample's; let recipe.sample "
    "give the largest"
)

_LARGE = 2**20  # elements
_MADE_OF_ANOTHER = (Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor)


def abstract_model(recipe: Recipe, fake: FakeTensorMode) -> nn.Module:
    """The recipe's model with fake parameters and buffers; what is large was never allocated, where that can be.

    Of tensors that are neither the large ones are fake; small ones are constants that a program may read.

    Raises RecipeError where there is no such model or it holds sparse tensors, ShapeError where parameters are lazy.
    """
    with blamed("recipe.model() gives no model"):
        model = _built(recipe)
    require_shapes(model)
    if scripted := [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]:
        raise RecipeError(
            f"module '{scripted[0]}' is a ScriptModule, whose ops cannot be simulated; give the module that "
            "torch.jit.script was given"
        )
    known = WeakTensorKeyDictionary()  # a tensor that two modules share stays shared

    def faked(tensor: Tensor) -> Any:
        if tensor not in known:
            known[tensor] = _abstract(tensor, fake)
        return known[tensor]

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            table.update({name: faked(tensor) for name, tensor in table.items() if tensor is not None})
    for attributes, name, value in _attributes(model):
        if any(tensor in known or _is_large(tensor) for tensor in _tensors(value)):
            attributes[name] = tensors_replaced(value, lambda t: faked(t) if t in known or _is_large(t) else t)
    return model


def plain_tensors(model: nn.Module) -> list[Tensor]:
    """The tensors that modules hold as ordinary attributes, neither parameters nor buffers."""
    return [tensor for *_, value in _attributes(model) for tensor in _tensors(value)]


def _attributes(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for module in model.modules():
        for name in [name for name in vars(module) if name not in OF_EVERY_MODULE]:
            yield vars(module), name, vars(module)[name]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def _is_constant(tensor: Tensor) -> bool:
    """Whether a program may read its numbers, as of a grid's size that is kept as a parameter."""
    return not tensor.requires_grad and tensor.numel() <= FEW


def _stays(parameter: Tensor) -> bool:
    """Whether it has no memory that it might lose, or numbers that may be read."""
    return is_lazy(parameter) or parameter.device.type == "meta" or _is_constant(parameter)


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() > _LARGE or tensor.device.type == "meta"


def _built(recipe: Recipe) -> nn.Module:
    """With memory only where the constructor wants parameters that have some, as for what it gives them by `.data`."""
    with suppress(RuntimeError), _parameters_on_meta(), _LargeOnMeta():
        return recipe.training_model()
    return recipe.training_model()


def _abstract(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    if tensor.layout != torch.strided:
        raise RecipeError(
            f"the model holds a sparse tensor {tuple(tensor.shape)} ({tensor.layout}), which cannot be simulated; "
            "plan with a model that makes do without"
        )
    with fake:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
        vars(made).update(vars(tensor))  # marks, by which an optimizer groups them
    if _is_constant(made) and tensor.device.type != "meta":
        with torch._C._DisableTorchDispatch():
            know(made, tensor.detach().clone())
    return made


def _parameters_on_meta() -> AbstractContextManager[None]:
    """A parameter loses its memory as soon as a module has it, before anything is written to it.

    Not `torch.device("meta")`: constructors compute with small tensors and read them, and those stay real.
    """
    register = nn.Module.register_parameter
    moved = WeakTensorKeyDictionary()

    def register_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not _stays(parameter):
            if parameter not in moved:
                moved[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                moved[parameter].__dict__ = parameter.__dict__  # also what is yet to be set
            parameter = moved[parameter]
        register(module, name, parameter)

    return replaced(nn.Module, "register_parameter", register_parameter)


class _LargeOnMeta(TorchFunctionMode):
    """What a constructor makes from sizes alone (`torch.empty` and its like) has no memory where it is large.

    What is few has, also of a parameter that has none: a mask of channels, say, `self.weight.new_zeros(8)`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.numel() > _LARGE:
                return made
        if func in _MADE_OF_ANOTHER and args[0].device.type == "meta" and kwargs.get("device") is None:
            made = func(*args, **kwargs)
            return made if made.numel() > FEW else func(*args, **{**kwargs, "device": "cpu"})
        return func(*args, **kwargs)


def read_sample(recipe: Recipe) -> Any:
    """The recipe's first sample with its numbers, as training reads it first; random states are as before.

    Raises RecipeError where it gives none.
    """
    remedy = "; where the data is not at hand, give recipe.sample, a function that returns one with the same shapes"
    with sample_randomness(recipe.seed, 0, 0):
        if recipe.sample is not None:
            with blamed("recipe.sample() gives no sample"):
                return recipe.sample()
        with blamed("recipe.data() gives no sample", remedy):
            return first_sample(recipe.data())


def abstract_batch(
    recipe: Recipe,
    sample: Any,
    samples: int,
    fake: FakeTensorMode,
    note: Callable[[str], object] = lambda sentence: None,
) -> Any:
    """`samples` times `sample` as the loader would collate them, fake; `note` gets what is taken for granted.

    A `collate` that wants numbers, of which fake tensors have none, gets the real sample. Raises RecipeError where it
    gives no batch of that either.
    """
    collate = recipe.collate or default_collate
    with fake, suppress(Exception):
        copies = [_faked(sample, fake) for _ in range(samples)]
        batch = collate(copies)
        _note_kept(copies, batch, note)
        return batch
    with _disable_current_modes(), blamed(f"recipe.collate gives no batch of {samples} samples"):
        batch = collate([sample] * samples)
        _note_kept([sample], batch, note)
    return _faked(batch, fake)


def _note_kept(samples: list[Any], batch: Any, note: Callable[[str], object]) -> None:
    kept = {tensor.untyped_storage()._cdata for tensor in _tensors(samples)}
    if any(tensor.untyped_storage()._cdata in kept for tensor in _tensors(batch)):
        note(LIKE_THE_FIRST)


def _faked(tree: Any, fake: FakeTensorMode) -> Any:
    return tensors_replaced(tree, lambda tensor: _abstract(tensor, fake))
