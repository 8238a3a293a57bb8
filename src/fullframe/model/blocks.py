"""The repeated blocks of a model: what recompute computes again and sharding gathers, one at a time.

Found by structure alone: residual layers, transformer layers, encoder levels, whatever a model repeats.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fullframe.errors import StrategyError
from fullframe.model.runs import runs_of_layers
from fullframe.wording import first_of, inside

NONE_REPEAT = "has no repeated blocks, and no nn.Sequential of four layers with weights"
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[str]:
    """Names of the model's repeated blocks, in the order of `named_modules`; none contains another.

    A block is a module of which its parent holds several: the same class, under the same name but for the number
    (items of a list, `down1` and `down2`), with at least two weights, since a convolution and its norm are no block.
    Other modules of such a class are blocks too. A stage, most of which are blocks, gives those.
    """
    repeated = {child for child in _repeated_children(model) if _weights(child) > 1}
    classes = {type(block) for block in repeated} - {nn.Sequential}  # which says nothing of what is in it
    repeated |= {module for module in model.modules() if type(module) in classes}
    return _innermost(model, "", repeated)


def repeated_layers(model: nn.Module) -> list[str]:
    """Names of layers, in blocks or not, of which their parent holds several as it does of blocks; one weight will do.

    Others of their class are none: who holds a single layer may take its weight, and never call it.
    """
    return _innermost(model, "", {child for child in _repeated_children(model) if _weights(child) > 0})


def _repeated_children(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        kinds = {name: (type(child), re.sub(r"\d+", "", name)) for name, child in module.named_children()}
        number = Counter(kinds.values())
        for name, child in module.named_children():
            if number[kinds[name]] > 1 and not isinstance(child, _NEVER_CALLED):
                yield child


def _weights(module: nn.Module) -> int:
    """Weights of convolutions and linear layers; norms and biases have one dim."""
    return sum(parameter.dim() > 1 for parameter in module.parameters())


def _innermost(module: nn.Module, name: str, repeated: set[nn.Module]) -> list[str]:
    """The blocks inside `module`, or its own name where it is one and few of its parameters are in blocks."""
    children = [(inside(name, child), submodule) for child, submodule in module.named_children()]
    inner = [block for child, submodule in children for block in _innermost(submodule, child, repeated)]
    if module not in repeated:
        return inner
    blocks = [module.get_submodule(block[len(name) + 1 :]) for block in inner]
    return inner if 2 * _size(*blocks) > _size(module) else [name]


def _size(*modules: nn.Module) -> int:
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


def blocks_that_repeat(model: nn.Module) -> list[str]:
    """Names of what is recomputed or compiled where nothing is named; none where the model repeats nothing."""
    return _iterated_blocks(model) or repeated_blocks(model) or runs_of_layers(model) or _small_blocks(model)


def _small_blocks(model: nn.Module) -> list[str]:
    """Those of one weight: convolution, norm and activation that a forward of the user's own calls one by one."""
    repeated = {child for child in _repeated_children(model) if _weights(child) == 1 and any(child.children())}
    return _innermost(model, "", repeated)


def _iterated_blocks(model: nn.Module) -> list[str]:
    """The blocks of each `ff.unroll`, shared by its iterations or one for each."""
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        iterated: Callable[[], dict[str, nn.Module]] | None = getattr(module, "iterated_blocks", None)
        for own, block in iterated().items() if iterated is not None else ():
            found.setdefault(block, inside(name, own))
    return list(found.values())


def matching(model: nn.Module, patterns: Sequence[str], field: str) -> Iterator[str]:
    """Names of the outermost modules that match; a list of modules stands for what is in it.

    Raises StrategyError, of `field`, where a pattern matches none.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise StrategyError(
                f"{field} names {pattern!r}, which no module of {class_name(model)} matches; "
                f"there are {examples(model)}"
            )
    covered: set[str] = set()
    for name, module in modules.items():  # a parent comes before its children
        parent = name.rpartition(".")[0]
        is_in_list = parent in covered and isinstance(modules[parent], _NEVER_CALLED)
        if parent in covered and not is_in_list:
            covered.add(name)
        elif is_in_list or any(fnmatchcase(name, pattern) for pattern in patterns):
            covered.add(name)
            if not isinstance(module, _NEVER_CALLED):
                yield name


def examples(model: nn.Module) -> str:
    """The names of some of its modules, for an error."""
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    return first_of(names, most=6) or "which it has none"


def class_name(module: nn.Module) -> str:
    """The name of a module's class, for an error: the user's, over which FSDP2 puts one of its own."""
    return next(kind.__name__ for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
