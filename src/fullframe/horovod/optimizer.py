"""`DistributedOptimizer`: an optimizer that reduces gradients over the ranks before it applies them."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.horovod.compression import Compression, Compressor
from fullframe.horovod.context import world
from fullframe.horovod.gradient_groups import grouped, named_parameters_of, terms_of
from fullframe.horovod.gradient_reducer import GradientReducer
from fullframe.horovod.handles import complete
from fullframe.horovod.membership import membership
from fullframe.horovod.process_sets import ProcessSet, global_process_set
from fullframe.horovod.queries import rocm_built
from fullframe.horovod.request import ReduceOp
from fullframe.horovod.requests_of import allreduce_request, check_allreduce


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of the same class, state and options that reduces gradients over `process_set`, then steps.

    Gradients are reduced while backward computes others, in groups of 25 MiB, of `HOROVOD_FUSION_THRESHOLD` bytes where
    that is set, or as `groups` says: how many, or lists of parameters; the rest as without. `named_parameters` gives
    them names, which must be the same on all ranks. `backward_passes_per_step` backward passes are added up before.
    `sparse_as_dense` makes sparse gradients dense first. With `op=Adasum` the updates are reduced in place of the
    gradients. Raises ValueError for parameters without a name and for factors that do not fit `op`.
    """
    op = ReduceOp(op)
    if gradient_predivide_factor != 1.0:
        if rocm_built():
            raise ValueError("gradient_predivide_factor not supported yet with ROCm")
        if op != ReduceOp.Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if op not in (ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum):
        raise ValueError(f"DistributedOptimizer can reduce by Average, Sum or Adasum, not {op.name}")
    names = named_parameters_of(optimizer.param_groups, named_parameters)
    trained = [parameter for parameter in names if parameter.requires_grad]
    parts = grouped(trained, groups, world().settings.gradient_bytes)
    check_allreduce((), op, process_set)
    # Alone too where others may come: what is made now is used with them.
    reduces = bool(process_set.included()) and ((process_set.size() or 1) > 1 or membership() is not None)
    kind = _ByUpdate if op == ReduceOp.Adasum else _ByGradient
    made = _same(optimizer, kind)
    made.backward_passes_per_step = backward_passes_per_step
    made.process_set = process_set
    made.compression, made.names = compression, names
    if reduces and kind is _ByGradient:
        made.reducer = GradientReducer(
            made,
            names,
            parts,
            compression=compression,
            passes=backward_passes_per_step,
            op=op,
            predivide=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
    return made


def _same(optimizer: torch.optim.Optimizer, mixin: type) -> Any:
    """An optimizer that shares the state and the options of another; its class is a child of the other's."""
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (mixin, kind), {}))
    kept = {name: value for name, value in optimizer.__dict__.items() if name != "step"}  # a scheduler's
    made.__dict__.update(kept)
    return made


class _ByGradient:
    """Gradients are reduced, then applied."""

    reducer: GradientReducer | None = None
    backward_passes_per_step: int
    process_set: ProcessSet
    _synchronized = False
    _skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce after so many backward passes from now on."""
        self.backward_passes_per_step = passes
        if self.reducer is not None:
            self.reducer.set_passes(passes)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, to clip them, say; then `step` inside `skip_synchronize()`."""
        if self.reducer is not None:
            groups = self.param_groups  # type: ignore[attr-defined]
            self.reducer.finish(parameter for group in groups for parameter in group["params"])
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not reduce: `synchronize` has done it."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce, unless inside `skip_synchronize()`, then step; with a `closure` reduce what each call of it computes.

        An optimizer that cannot do without a closure (LBFGS) gets the reduced loss too: the ranks must search alike.
        """
        if closure is not None and not self._skips:
            closure = self._reducing(closure)
        elif self._skips:
            if not self._synchronized and self.reducer is not None and self.reducer.is_under_way:
                raise AssertionError(
                    "optimizer.step() inside optimizer.skip_synchronize() before optimizer.synchronize(): gradients "
                    "are still being reduced, and the ranks would drift apart; call optimizer.synchronize() first"
                )
        else:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        result = super().step(closure)  # type: ignore[misc]
        if self.reducer is not None:
            self.reducer.note_step()
        return result

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        searches = inspect.signature(super().step).parameters["closure"].default is inspect.Parameter.empty  # type: ignore[misc]

        def reducing() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            return self.reducer.of_all(loss) if searches and self.reducer is not None else loss

        return reducing

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients; AssertionError while they are being reduced."""
        if self.reducer is not None and self.reducer.is_under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]


class _ByUpdate:
    """Each rank steps by itself; what changed is reduced by Adasum, parameter by parameter."""

    backward_passes_per_step: int
    process_set: ProcessSet
    compression: type[Compressor]
    names: dict[Tensor, str]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients add up until `step`, however many passes those are."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Nothing: there is nothing to wait for before `step`."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Not with Adasum, whose step is the reduction."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank, then to where the ranks' updates together lead."""
        groups = self.param_groups  # type: ignore[attr-defined]
        parameters = [p for group in groups for p in group["params"] if p.requires_grad]
        before = [parameter.detach().clone() for parameter in parameters]
        result = super().step(closure)  # type: ignore[misc]
        if self.process_set.included() and (self.process_set.size() or 1) > 1:
            updates = [parameter - start for parameter, start in zip(parameters, before, strict=True)]
            small = [self.compression.compress(update) for update in updates]
            sent = [tensor for tensor, _ in small]
            for parameter in parameters:  # those that came later
                self.names.setdefault(parameter, f"allreduce.noname.{len(self.names)}")
            terms = terms_of(parameters, self.names, self.compression)
            name, op = "DistributedOptimizer.adasum", ReduceOp.Adasum
            request = allreduce_request(sent, name, op, 1.0, 1.0, self.process_set, terms)
            reduced = complete(request, sent, self.process_set, list, targets=sent)
            for parameter, start, whole, (_, ctx) in zip(parameters, before, reduced, small, strict=True):
                parameter.copy_(start + self.compression.decompress(whole, ctx))
        return result
