"""The units of a model whose parameters are sharded: each gathers its own when it runs, the model itself the rest.

While a unit runs, a rank holds its parameters and the rest whole. So the rest is to be small, and no more units are
made than that takes: each sends messages of its own.
"""

from collections import Counter

from torch import nn
from torch.distributed.tensor import DTensor

from fullframe.model.blocks import repeated_blocks, repeated_layers

_SMALL_BYTES = 25 << 20  # as much as DDP sends in one message
_Parameters = set[nn.Parameter]


def units_to_shard(model: nn.Module) -> list[str]:
    """Names of the repeated blocks, and of the largest repeated layers outside them and in those that are Sequentials.

    As many of these as it takes until those left of the model, or of a Sequential, have no more bytes than the largest
    layer, than a block that is none, than what else there is, or than 25 MiB. None shares a parameter with another
    part of the model, or is sharded by the user, whole or in part.
    """
    blocks, layers = _alone(model, repeated_blocks(model)), _alone(model, repeated_layers(model))
    rest = set(model.parameters()).difference(*blocks.values())
    sequences = {name: own for name, own in blocks.items() if isinstance(model.get_submodule(name), nn.Sequential)}
    layers = {name: own for name, own in layers.items() if name not in blocks}
    parts = [(own, _within(own, layers)) for own in (rest, *sequences.values())]
    pieces = [own for _, inner in parts for own in inner.values()]
    pieces += [own for name, own in blocks.items() if name not in sequences]
    small = max([_SMALL_BYTES, *map(_bytes, pieces)])
    return [*blocks, *(name for own, inner in parts for name in _largest(own, inner, small))]


def _within(whole: _Parameters, layers: dict[str, _Parameters]) -> dict[str, _Parameters]:
    return {name: own for name, own in layers.items() if own <= whole}


def _largest(whole: _Parameters, layers: dict[str, _Parameters], small: int) -> list[str]:
    """Of these layers of a part of the model, so many that few bytes are left of them."""
    names, left = [], sum(map(_bytes, layers.values()))
    small = max(small, _bytes(whole) - left)
    for name in sorted(layers, key=lambda layer: _bytes(layers[layer]), reverse=True):
        if left <= small:
            break
        names.append(name)
        left -= _bytes(layers[name])
    return names


def _alone(model: nn.Module, names: list[str]) -> dict[str, _Parameters]:
    """The parameters of those modules that can be a unit."""
    holders, found = _holders(model), {}
    for name in names:
        within = _holders(model.get_submodule(name))
        if within and all(holders[p] == within[p] and not isinstance(p, DTensor) for p in within):
            found[name] = set(within)
    return found


def _holders(module: nn.Module) -> Counter[nn.Parameter]:
    """How many modules have each parameter as their own."""
    return Counter(p for each in module.modules() for p in each._parameters.values() if p is not None)


def _bytes(parameters: _Parameters) -> int:
    return sum(parameter.nbytes for parameter in parameters)
