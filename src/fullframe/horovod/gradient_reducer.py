"""Gradients of a model reduced over the ranks while backward still computes others."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.errors import GradientError
from fullframe.horovod.compression import Compression, Compressor
from fullframe.horovod.context import World, world
from fullframe.horovod.gradient_groups import grouped, terms_of
from fullframe.horovod.handles import Handle, begin, synchronize
from fullframe.horovod.process_sets import ProcessSet
from fullframe.horovod.reductions import allreduce, sparse_allreduce_async
from fullframe.horovod.request import ReduceOp
from fullframe.horovod.requests_of import allreduce_request
from fullframe.model.same.optimizers import options_of
from fullframe.spatial.gradients import is_managed


class _Room:
    """One buffer for a group's gradients, where each is copied to while it is in the processor's cache."""

    def __init__(self, parameters: Sequence[Tensor]):
        self.flat = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device="cpu")
        pieces = self.flat.split([p.numel() for p in parameters])
        self.pieces = {p: piece.view(p.shape) for p, piece in zip(parameters, pieces, strict=True)}

    def take(self, parameter: Tensor) -> None:
        """Copy a gradient."""
        assert parameter.grad is not None
        self.pieces[parameter].copy_(parameter.grad.detach())


class _Group:
    """Gradients that are reduced as one; `left`: those that backward has yet to reach.

    `room`: on the CPU, for dense gradients of one dtype that travel as they are; what all ranks answer alike.
    """

    def __init__(self, name: str, parameters: Sequence[Tensor], has_room: bool, terms: str):
        self.name, self.parameters, self.terms = name, parameters, terms
        self.left = set(parameters)
        kinds = {(parameter.dtype, parameter.device.type) for parameter in parameters}
        self.has_room = has_room and kinds == {(parameters[0].dtype, "cpu")}
        self.room: _Room | None = None
        self.finish: Callable[[], None] | None = None  # once it is under way


class GradientReducer:
    """Begins to reduce a group when backward has come to all of it `passes` times; `finish` waits for all groups.

    `predivide` splits an average: divided by it before, the rest after. The `optimizer` must be set alike on all ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[Tensor, str],
        groups: Sequence[Sequence[Tensor]],
        *,
        compression: type[Compressor],
        passes: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ):
        self.passes = passes
        self._compression, self._op, self._predivide = compression, op, predivide
        self._sparse_as_dense, self._process_set = sparse_as_dense, process_set
        self._groups: list[_Group] = []
        self._of: dict[Tensor, _Group] = {}
        self._counts: dict[Tensor, int] = {}
        self._sparse: dict[Tensor, int] = {}  # the sparse dims of a gradient, of those that ever had such a one
        self._names, self._optimizer = names, optimizer
        self._steps = 0  # since the last reduction
        self._checksum: int | None = None  # while one is under way
        self._world: World | None = None
        self._take_up(groups)

    @property
    def is_under_way(self) -> bool:
        """Whether a group is being reduced."""
        self._forget_other_world()
        return any(group.finish is not None for group in self._groups)

    def set_passes(self, passes: int) -> None:
        """Reduce after so many backward passes from now on."""
        self.passes = passes
        self._counts = dict.fromkeys(self._of, passes)

    def finish(self, parameters: Iterable[Tensor]) -> None:
        """Reduce what backward has not come to, as zeros, and wait for everything.

        From now on `parameters`, the optimizer's, that are trained since are reduced too.
        """
        self._forget_other_world()
        new = [parameter for parameter in parameters if parameter.requires_grad and parameter not in self._of]
        for parameter in new:
            self._names.setdefault(parameter, f"allreduce.noname.{len(self._names)}")
        self._take_up(grouped(new, None, world().settings.gradient_bytes))
        for group in self._groups:
            if group.finish is None:
                self._begin(group, copied=False)
        for group in self._groups:
            assert group.finish is not None
            group.finish()
        self._clear()
        self._steps = 0

    def note_step(self) -> None:
        """The optimizer has applied them."""
        self._steps += 1

    def of_all(self, loss: Any) -> Tensor:
        """One number, reduced as the gradients are."""
        number = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
        return allreduce(number, op=self._op, process_set=self._process_set, name="DistributedOptimizer.loss")

    def _take_up(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Reduce the gradients of these too."""
        for parameters in groups:
            name = f"DistributedOptimizer.{self._names[parameters[0]]}.{len(parameters)}"
            terms = terms_of(parameters, self._names, self._compression)
            group = _Group(name, parameters, self._compression is Compression.none, terms)
            self._groups.append(group)
            for parameter in parameters:
                self._of[parameter], self._counts[parameter] = group, self.passes
                parameter.register_post_accumulate_grad_hook(self._reached)

    def _reached(self, parameter: Tensor) -> None:
        self._forget_other_world()
        if is_managed(parameter):
            raise GradientError(
                f"ff.parallelize averages the gradient of '{self._names[parameter]}' over all ranks already; use the "
                "optimizer itself in place of hvd.DistributedOptimizer"
            )
        if self._counts[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._counts[parameter] -= 1
        if self._counts[parameter] == 0:
            group = self._of[parameter]
            group.left.discard(parameter)
            if self._fits(group, parameter):
                if group.room is None:
                    group.room = _Room(group.parameters)
                group.room.take(parameter)
            if not group.left:
                self._begin(group, copied=True)

    def _fits(self, group: _Group, parameter: Tensor) -> bool:
        """Whether the gradient goes into the group's room; else no other of the group does from now on."""
        gradient = parameter.grad
        if group.has_room and gradient is not None and (gradient.is_sparse or gradient.dtype != parameter.dtype):
            group.has_room, group.room = False, None
        return group.has_room

    def _begin(self, group: _Group, copied: bool) -> None:
        """`copied`: what is in the group's room are all its gradients."""
        dense, waiting = [], []
        for parameter in group.parameters:
            if parameter.grad is None:  # another rank may have one
                dims = None if self._sparse_as_dense else self._sparse.get(parameter)
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros if dims is None else zeros.to_sparse(dims)
            if parameter.grad.is_sparse and self._sparse_as_dense:
                parameter.grad = parameter.grad.to_dense()
            if parameter.grad.is_sparse:
                self._sparse[parameter] = parameter.grad.sparse_dim()
                wait = sparse_allreduce_async(parameter.grad, self._names[parameter], self._op, self._process_set)
                waiting.append((parameter, wait))
            else:
                dense.append(parameter)
        if all(self._fits(group, parameter) for parameter in group.parameters):
            finish_dense: Callable[[], None] | None = self._begin_room(group, copied)
        else:
            finish_dense = self._begin_dense(group, dense) if dense else None

        def finish() -> None:
            for parameter, wait in waiting:
                parameter.grad = wait()
            if finish_dense is not None:
                finish_dense()

        group.finish = finish

    def _begin_room(self, group: _Group, copied: bool) -> Callable[[], None]:
        room = group.room = group.room or _Room(group.parameters)
        if not copied:
            for parameter in group.parameters:
                room.take(parameter)
        gradients: list[Any] = [parameter.grad for parameter in group.parameters]
        averages, count = self._op == ReduceOp.Average, self._process_set.size() or 1
        op = ReduceOp.Sum if averages else self._op  # it is divided on the way back
        handle = self._send(group, [room.flat], op, postscale=1.0)

        def finish() -> None:
            synchronize(handle)
            for gradient, piece in zip(gradients, room.pieces.values(), strict=True):
                if averages:
                    torch.div(piece, count, out=gradient.detach())
                else:
                    gradient.detach().copy_(piece)
                if self._predivide != 1.0:
                    gradient.detach().mul_(self._predivide)

        return finish

    def _begin_dense(self, group: _Group, parameters: Sequence[Tensor]) -> Callable[[], None]:
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        small = [self._compression.compress(gradient) for gradient in gradients]
        sent = [tensor for tensor, _ in small]
        handle = self._send(group, sent, self._op, postscale=self._predivide)

        def finish() -> None:
            for gradient, whole, (_, ctx) in zip(gradients, synchronize(handle), small, strict=True):
                whole = self._compression.decompress(whole, ctx)
                if whole is not gradient:
                    gradient.copy_(whole)

        return finish

    def _send(self, group: _Group, sent: list[Tensor], op: ReduceOp, postscale: float) -> Handle:
        """Begin to reduce in place, if all ranks mean the same by it."""
        terms = f"op={self._op.name}\nbackward_passes_per_step={self.passes}\n{group.terms}"
        request = allreduce_request(sent, group.name, op, 1 / self._predivide, postscale, self._process_set, terms)
        if self._checksum is None:
            self._checksum = zlib.crc32(f"{self._steps} {options_of(self._optimizer)}".encode())
        return begin(request, sent, self._process_set, list, targets=sent, checksum=self._checksum)

    def _clear(self) -> None:
        for group in self._groups:
            group.finish, group.left = None, set(group.parameters)
        self._checksum = None
        self._counts = dict.fromkeys(self._of, self.passes)

    def _forget_other_world(self) -> None:
        """What was under way before the ranks met anew is lost."""
        if self._world is not world():
            self._world, self._steps = world(), 0
            for group in self._groups:
                group.room = None  # where the other world may still write
            self._clear()
