"""What a chain on several stages is called with, in microbatches, and what stages must know of each other's tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fullframe.errors import ShapeError, StrategyError
from fullframe.ranks.mesh import Spatial
from fullframe.ranks.stage_messages import Form
from fullframe.spatial.operands import has_gradients
from fullframe.spatial.spec import spec_of
from fullframe.spatial.tensor import SpatialTensor, local_or_whole, spec_in, wrap
from fullframe.techniques.stages.buffers import Said


class Leaf(NamedTuple):
    """What other stages must know of a tensor; pickled, so without the mesh."""

    form: Form  # of the local tensor
    facts: tuple[Any, ...] | None  # of its spec

    @classmethod
    def of(cls, value: Any) -> "Leaf":
        spec = spec_in(value)
        if spec is not None and spec.fleeting:
            raise ShapeError("what a mask has picked of a split tensor cannot go to another stage; take it in one part")
        facts = None if spec is None else (spec.shape, spec.placements, spec.gather, spec.strides)
        return cls(Form.of(local_or_whole(value)), facts)

    def times(self, microbatches: int) -> "Leaf":
        """As it is of the whole batch."""
        if microbatches == 1:
            return self
        shape, facts = self.form.shape, self.facts
        if facts is not None:
            facts = ((facts[0][0] * microbatches, *facts[0][1:]), *facts[1:3], None)
        return Leaf(self.form._replace(shape=(shape[0] * microbatches, *shape[1:])), facts)

    def dressed(self, local: Tensor, spatial: Spatial | None) -> Tensor:
        """The tensor with its shell."""
        if self.facts is None or spatial is None:
            return local
        return wrap(local, spec_of(spatial, *self.facts))


class State(NamedTuple):
    """What other stages must know of a state; pickled by its form with numbers in the place of tensors."""

    tree: TreeSpec
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, state: Any) -> "State":
        leaves, tree = tree_flatten(state)
        return cls(tree, tuple(map(Leaf.of, leaves)))

    def __reduce__(self) -> Any:
        return _numbered, (tree_unflatten(range(len(self.leaves)), self.tree), self.leaves)

    @property
    def forms(self) -> list[Form]:
        return [leaf.form for leaf in self.leaves]

    def dressed(self, locals_: Sequence[Tensor], spatial: Spatial | None) -> Any:
        """The state of these tensors."""
        dressed = [leaf.dressed(local, spatial) for leaf, local in zip(self.leaves, locals_, strict=True)]
        return tree_unflatten(dressed, self.tree)


def _numbered(numbered: Any, leaves: tuple[Leaf, ...]) -> State:
    return State(tree_flatten(numbered)[1], leaves)


class StageSaid(NamedTuple):
    """What a stage tells the others when all its microbatches are through."""

    states: tuple[State, ...]  # that it returns, or its last
    buffers: Said
    random: Any  # the random states that it leaves


class Kept(NamedTuple):
    """One microbatch's graph on this stage, until backward has gone through it."""

    given: list[Tensor]
    inputs: list[Tensor]
    states: list[list[Tensor]]  # those that are returned, and the last

    def seeded(
        self, gradients: Sequence[Sequence[Tensor | None]], number: int, microbatches: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Which tensors of the returned states get a gradient, and this microbatch's part of each."""
        outs, seeds = [], []
        for state, found in zip(self.states, gradients, strict=False):
            for tensor, gradient in zip(state, found, strict=True):
                if gradient is not None and tensor.requires_grad:
                    size = gradient.shape[0] // microbatches if gradient.dim() else 0
                    outs.append(tensor)
                    seeds.append(gradient.narrow(0, number * size, size) if gradient.dim() else gradient)
        return outs, seeds


class _Alias(torch.autograd.Function):
    """The same memory, as an operation gives it: no view, so that it may be written to."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Begun:
    """State and inputs at the beginning of a graph of their own, for one microbatch on one stage.

    What a part gets is no leaf, whose gradient would be put as users see it; `leaves` have the gradients.
    """

    def __init__(self, state: Sequence[Tensor], inputs: Sequence[Tensor], keeps: bool, came: bool):
        """`keeps`: there is a graph; `came`: the state came from another stage, so its gradient will go there."""
        tensors = [tensor.detach() for tensor in (*state, *inputs)] if keeps else [*state, *inputs]
        for number, (given, own) in enumerate(zip((*state, *inputs), tensors, strict=True)):
            if keeps and has_gradients(own):
                own.requires_grad_(given.requires_grad or (came and number < len(state)))
        alias: Any = _Alias.apply
        values = [alias(tensor) if keeps and tensor.requires_grad else tensor for tensor in tensors]
        self.leaves, self._values, self._came, self._of_state = tensors, values, came, len(state)
        self._versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    @property
    def state(self) -> list[Tensor]:
        """What a part gets."""
        return self._values[: self._of_state]

    @property
    def inputs(self) -> list[Tensor]:
        """What a part gets."""
        return self._values[self._of_state :]

    def require_as_given(self, stage: int, returns_all: bool) -> None:
        """Raises StrategyError where parts have changed what others hold, too: values, or the way of gradients."""
        mine_alone = self._of_state if self._came and not returns_all else 0
        for tensor, version in list(zip(self.leaves, self._versions, strict=True))[mine_alone:]:
            if not tensor.is_inference() and tensor._version != version:
                raise StrategyError(
                    f"a part on stage {stage} writes to its state or its inputs (a tensor of shape "
                    f"{tuple(tensor.shape)}), which other stages would not see; write state = state + step, not state "
                    "+= step, and use inplace=False in its first layer"
                )
        if self._came and returns_all and any(tensor._backward_hooks for tensor in self.state):
            raise StrategyError(
                f"a part on stage {stage} puts a hook on the state that it gets, which would not see the gradient of "
                "the loss on that state; put it on what the part returns, or leave out return_all"
            )


class Arguments:
    """State and inputs of one call, plain or split; tensors are counted as `tensors` has them, the state's first."""

    def __init__(self, state: Any, inputs: tuple[Any, ...], microbatches: int, must_cut: bool):
        """In one microbatch where it cannot be cut into so many and need not be; else that raises ShapeError."""
        leaves, self._tree = tree_flatten(state)
        self._inputs, self._input_tree = tree_flatten(inputs)
        other = next((leaf for leaf in leaves if not isinstance(leaf, Tensor)), None)
        if other is not None:
            raise ShapeError(
                f"the state goes from stage to stage, so it must be of tensors alone, and holds {other!r}; keep what "
                "is no tensor in the block, or make it one"
            )
        self.tensors: list[Tensor] = [*leaves, *(leaf for leaf in self._inputs if isinstance(leaf, Tensor))]
        self.of_state = len(leaves)  # how many tensors the state has
        self.locals: list[Tensor] = [local_or_whole(tensor) for tensor in self.tensors]
        self.device = self.locals[0].device
        self.spatial = next((t.spec.spatial for t in self.tensors if isinstance(t, SpatialTensor)), None)
        problem = _why_not_cut(leaves, self.tensors[len(leaves) :], microbatches)
        if problem and must_cut:
            raise ShapeError(problem)
        self.microbatches = 1 if problem else microbatches

    def microbatch(self, number: int) -> list[Tensor]:
        """Its part of all tensors."""
        parts = []
        for whole, local in zip(self.tensors, self.locals, strict=True):
            spec = spec_in(whole)
            if self.microbatches > 1 and local.dim():
                size = whole.shape[0] // self.microbatches
                part = local.detach().narrow(0, number * size, size)  # torch leaves out the flag for a view of a view
                local = part.requires_grad_(local.requires_grad)
                spec = spec and spec.resized(0, size)
            parts.append(local if spec is None else wrap(local, spec))
        return parts

    def state(self, parts: Sequence[Tensor]) -> Any:
        """A microbatch's state."""
        return tree_unflatten(parts[: self.of_state], self._tree)

    def form(self, parts: Sequence[Tensor]) -> State:
        """What is known of a microbatch's state."""
        return State(self._tree, tuple(map(Leaf.of, parts[: self.of_state])))

    def inputs(self, parts: Sequence[Tensor], locals_: Sequence[Tensor]) -> tuple[Any, ...]:
        """The inputs of a microbatch, of which `locals_` are the local tensors."""
        own = zip(parts[self.of_state :], locals_, strict=True)
        dressed = (wrap(local, part.spec) if isinstance(part, SpatialTensor) else local for part, local in own)
        leaves = [next(dressed) if isinstance(leaf, Tensor) else leaf for leaf in self._inputs]
        inputs: tuple[Any, ...] = tree_unflatten(leaves, self._input_tree)
        return inputs

    def joined(self, gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """The gradient of each local tensor, from those of its microbatches."""
        found: list[Tensor | None] = []
        for local, each in zip(self.locals, zip(*gradients, strict=True), strict=True):
            there = [gradient for gradient in each if gradient is not None]
            if not there:
                found.append(None)
            elif self.microbatches == 1 or not local.dim():  # what has no dims goes to all
                found.append(sum(there[1:], there[0]))
            else:
                empty = local.new_zeros((local.shape[0] // self.microbatches, *local.shape[1:]))
                found.append(torch.cat([empty if gradient is None else gradient for gradient in each]))
        return found


def _why_not_cut(state: Sequence[Tensor], inputs: Sequence[Tensor], microbatches: int) -> str:
    """Why these cannot be cut into so many microbatches along their first dim; "" if they can."""
    if microbatches == 1:
        return ""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in state}
    sizes |= {tensor.shape[0] for tensor in inputs if tensor.dim()}
    split = [tensor for tensor in (*state, *inputs) if isinstance(tensor, SpatialTensor)]
    if len(sizes) > 1 or 0 in sizes or any(tensor.spec.is_split(0) for tensor in split):
        found = ", ".join(str(tuple(tensor.shape)) for tensor in (*state, *inputs))
        return (
            f"{microbatches} microbatches need one common first dim of the state and the inputs, which is not split; "
            f"got {found}; keep what has no samples in the block, as a buffer, or use microbatches=1"
        )
    (samples,) = sizes
    return f"{samples} samples cannot be cut into {microbatches} equal microbatches" if samples % microbatches else ""
