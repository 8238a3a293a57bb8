"""The door of a parallel model: shells come off before DDP and are put on behind it, and the other way round.

DDP looks for plain tensors and their graphs, which shells do not have.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from fullframe.errors import GradientError
from fullframe.model.containers import Contents
from fullframe.ranks.raw_bytes import repeated_dims, without_repeats
from fullframe.spatial.spec import Spec, spec_of
from fullframe.spatial.tensor import local_or_whole, spec_in, wrapped_as


class Shells:
    """Where the shells were in nested values: opaque to DDP."""

    def __init__(self, tree: TreeSpec, specs: list[Spec | None]):
        self.tree, self.specs = tree, specs


class Undressed(nn.Module):
    """The model between a door where shells come off and one where they are put on."""

    def __init__(self, model: nn.Module, gather: bool):
        super().__init__()
        self.model = model
        self.gather = gather

    def forward(self, leaves: list[Any], shells: Shells, method: str = "") -> tuple[list[Any], Shells, list[Tensor]]:
        """The model of those arguments, or its method of that name; with what it wrote to lists and dicts of them."""
        if self.gather:
            shells = Shells(
                shells.tree,
                [lay and spec_of(lay.spatial, lay.shape, lay.placements, True, None) for lay in shells.specs],
            )
        args, kwargs = wrapped(leaves, shells)
        contents = Contents((args, kwargs))
        called = getattr(self.model, method) if method else self.model
        result = called(*args, **kwargs)
        results, shells = unwrapped((result, contents.changed()))
        return results, shells, list(_within(results))

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Without `nn.SyncBatchNorm`, which DDP refuses on a CPU: `synchronize_batchnorm` has given it a way to run."""
        every = self.named_modules(remove_duplicate=remove_duplicate)
        return (module for _, module in every if not isinstance(module, nn.SyncBatchNorm))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Of expanded ones, as `meshgrid`'s are, what was expanded, to which DDP can write, without dims of one."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield name, without_repeats(buffer).squeeze() if repeated_dims(buffer) else buffer


def require_no_ddp_around(model: nn.Module) -> None:
    """Raises GradientError where a DistributedDataParallel of the user's would divide this model's means once more."""
    around = DistributedDataParallel._get_active_ddp_module()
    if around is None or isinstance(around.module, Undressed):  # ours, of a model that calls this one
        return
    if any(module is model for module in around.modules()):
        raise GradientError(
            "a DistributedDataParallel is around the model of fullframe.parallelize, which averages its gradients "
            "already; they would come out too small. Leave it out (with Accelerate: do not prepare the model)"
        )


def unwrapped(tree: Any) -> tuple[list[Any], Shells]:
    """The leaves of nested values, of split ones the local tensors, and where the shells were."""
    leaves, shells = tree_flatten(tree)
    specs = list(map(spec_in, leaves))
    return [local_or_whole(leaf) for leaf in leaves], Shells(shells, specs)


def _within(leaves: list[Any]) -> Iterator[Tensor]:
    """Plain tensors in objects, a dataclass say, that come out as they are: DDP asks what a result depends on."""
    waiting = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, nn.Module, type))]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        names = getattr(type(value), "__dataclass_fields__", None) or getattr(value, "__dict__", ())
        if id(value) in seen or not names or callable(value):
            continue
        seen.add(id(value))
        for leaf in tree_leaves([getattr(value, name, None) for name in names]):
            if isinstance(leaf, Tensor):
                yield local_or_whole(leaf)
            elif not isinstance(leaf, (nn.Module, type)):
                waiting.append(leaf)


def wrapped(leaves: Sequence[Any], shells: Shells) -> Any:
    """What `unwrapped` took apart."""
    return tree_unflatten(wrapped_as(leaves, shells.specs), shells.tree)
