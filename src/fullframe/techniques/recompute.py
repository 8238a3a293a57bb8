"""Blocks whose activations are thrown away after their forward and computed again in backward.

Non-reentrant `torch.utils.checkpoint` inside the block's own forward, so the hooks of FSDP and of users run once. The
second pass starts from the random states, buffers and attributes of the first, and what it does to them is forgotten:
batch norm counts a batch once, dropout draws the same. It multiplies fp32 numbers as the first did, in TF32 or not.
What else the first pass has read must be as it was, by its version, which is no matter of values. Of what nobody knows
of the results tell: those of the 1st, 2nd, 4th, 8th, ... pass are compared, so that the second pass runs to its end.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from fullframe.errors import StrategyError
from fullframe.model.attributes import Attributes
from fullframe.model.blocks import NONE_REPEAT, blocks_that_repeat, class_name, examples, matching
from fullframe.model.buffers import borrow_buffers, buffers_of, copies, return_buffers
from fullframe.model.compiled.blocks import CompiledBlock
from fullframe.model.containers import with_own_contexts
from fullframe.model.door import unwrapped, wrapped
from fullframe.model.forward_patch import PatchedForward
from fullframe.model.runs import part
from fullframe.ranks.agreement import is_first_rank
from fullframe.ranks.randomness import python_states, set_python_states
from fullframe.strategy import Strategy
from fullframe.techniques.budget import Costs, choose
from fullframe.techniques.likeness import Sample, differ, note, sample
from fullframe.techniques.precision import Fp32Math, fp32_math
from fullframe.techniques.readings import ForeignParameters, Readings, SavedAgain, foreign
from fullframe.wording import first_of

_SMALL_BYTES = 65_536
_OTHERS = "name other modules with recompute_modules"
_NOT_IN_PLACE = f"use inplace=False in its first layer, or {_OTHERS}"


def blocks_to_recompute(model: nn.Module, strategy: Strategy) -> tuple[str, ...]:
    """Names of the modules that `strategy` may compute again, none within another; () without recompute.

    Without patterns the blocks of its `ff.unroll`, else its repeated blocks, or where it has none runs of the layers
    of its Sequentials. With "nested" none: there each `ff.unroll` does it.

    Raises StrategyError when a pattern names no module, or without patterns there is neither.
    """
    if strategy.recompute in ("none", "nested"):
        return ()
    if strategy.recompute_modules:
        return tuple(matching(model, strategy.recompute_modules, "strategy.recompute_modules"))
    found = blocks_that_repeat(model)
    if not found:
        raise StrategyError(
            f"strategy.recompute is {strategy.recompute!r}, but {class_name(model)} {NONE_REPEAT}; "
            f"name modules with recompute_modules, of {examples(model)}"
        )
    return tuple(found)


def recompute(model: nn.Module, names: Sequence[str]) -> None:
    """From now on the named modules keep their inputs only. `forward_patch.restore` takes it back."""
    for name in names:
        block = part(model, name)
        block.forward = Recomputed(block, name)


class Looks:
    """Which forward passes of a block, or of those of an `ff.unroll`, are compared, and what they read of others."""

    def __init__(self) -> None:
        self._passes = 0
        self.foreign: dict[nn.Parameter, None] = {}  # parameters of other modules

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins anew."""
        return Looks, ()

    def begin(self) -> None:
        """One more pass."""
        self._passes += 1

    @property
    def are_due(self) -> bool:
        """Whether this pass is compared: state that is there from the second step on is seen, and it costs little."""
        return self._passes & (self._passes - 1) == 0


class Recomputed(PatchedForward):
    """The forward of `module`, of which its inputs alone are kept; the error where it writes to them says `remedy`.

    `leave_out` says how not to recompute it, in all errors. With `looks` someone else counts the passes.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        remedy: str = _NOT_IN_PLACE,
        leave_out: str = _OTHERS,
        looks: Looks | None = None,
    ):
        super().__init__(module)
        self._module, self._name, self._remedy, self._leave_out = module, name, remedy, leave_out
        self._counts, self._looks = looks is None, looks or Looks()
        self.was_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if self._counts:
            self._looks.begin()
        # All tensors go in as plain positional arguments: only those does checkpoint save through the hooks around it,
        # which may offload them.
        locals_, shells = unwrapped((args, kwargs))
        shells.tree = with_own_contexts(shells.tree)  # which the first pass may write to
        given = [(args, kwargs)]  # the first pass gets the very objects, which it may change; and lets go of them
        versions = [(tensor, tensor._version) for tensor in locals_ if isinstance(tensor, Tensor)]
        before = _Before(self._module, self._name, self._leave_out, self._looks, locals_)
        del args, kwargs

        def run(*again: Any) -> Any:
            if given:
                args, kwargs = given.pop()
                return before.noted(self.original(*args, **kwargs))
            args, kwargs = wrapped(again[: len(shells.specs)], shells)
            return before.compared(self.original(*args, **kwargs))

        result = checkpoint(
            run,
            *locals_,
            *_elsewhere(self._module, locals_),
            use_reentrant=False,
            context_fn=lambda: (before.noting(), before),
            early_stop=not before.is_compared,
        )
        if any(tensor._version != version for tensor, version in versions):
            raise StrategyError(f"{self._name} writes to its input, so it cannot be recomputed from it; {self._remedy}")
        return result


class _Before:
    """What the first pass starts from, beside its inputs and torch's random states, and what it came to."""

    def __init__(self, module: nn.Module, name: str, leave_out: str, looks: Looks, inputs: Sequence[Any]):
        self.module, self.name, self._leave_out, self._looks = module, name, leave_out, looks
        self.attributes = Attributes(module)
        self.random_states = python_states()
        self.math = Fp32Math.now()
        self.buffers: dict[tuple[nn.Module, str], Tensor] = {}  # as they were
        self.is_compared = looks.are_due and not any(map(_has_no_values, (*inputs, *module.parameters())))
        self._sample: list[Sample] | None = None  # of the result, once there is one
        self._readings, self._saved = Readings(), SavedAgain()
        self._readings.add_objects(inputs)
        if self.attributes.iterators:
            raise StrategyError(
                f"{name} has an iterator, its attribute {self.attributes.iterators[0]}, which would go on once more "
                f"when {name} is recomputed; keep a number that counts, or {leave_out}"
            )

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Around the first pass."""
        there = buffers_of(self.module)
        watched = list(zip(there, copies([b for _, _, b in there]), [b._version for _, _, b in there], strict=True))
        for name, parameter in self.module.named_parameters():
            self._readings.add(f"its parameter {name}", parameter)
        for name, tensor in self.attributes.tensors:
            self._readings.add(f"its attribute {name}", tensor)
        for parameter in self._looks.foreign:
            self._readings.add(foreign(parameter), parameter)
        try:
            with ExitStack() as looks:
                if self.is_compared:
                    looks.enter_context(self._seeing_others())
                    looks.enter_context(self._saved.first())
                yield
        finally:
            large = []
            for (owner, name, buffer), copy, version in watched:
                # Of a large one that the pass left alone no copy: an unrolled block would hold one for each iteration.
                # Batch norm's kernel writes its statistics unseen by autograd.
                is_left = not isinstance(owner, _NormBase) and buffer._version == version
                self.buffers[owner, name] = buffer if is_left and buffer.nbytes > _SMALL_BYTES else copy
                large += [(name, buffer)] if self.buffers[owner, name] is buffer else []
        written = self._readings.written()
        if written is not None:
            raise StrategyError(
                f"{self.name} writes to {written} in forward, which it would do once more when it is recomputed; make "
                f"it a buffer, or {self._leave_out}"
            )
        for name, buffer in large:
            self._readings.add(f"its buffer {name}", buffer)

    def _seeing_others(self) -> AbstractContextManager[object]:
        """Parameters of other modules are noted; not those of a program, which does not run while someone watches."""
        if _is_compiled(self.module):
            return nullcontext()
        return ForeignParameters(self.module.parameters(), self._looks.foreign, self._readings)

    def noted(self, result: Any) -> Any:
        """The result of the first pass."""
        if self.is_compared:
            self._sample = sample(result)
        return result

    def compared(self, result: Any) -> Any:
        """The result of the second pass, which runs to its end where it is compared."""
        again = [] if self._sample is None else sample(result)
        if self._sample or again:
            note(
                f"{self.name} had another result when it was recomputed in backward, so gradients would be wrong: it "
                "depends on what was changed meanwhile (entries of a list or a dict, a global, a generator that is no "
                f"attribute of it); keep that in buffers, or in attributes that are set anew, or {self._leave_out}",
                differ(self._sample or [], again),
            )
        return result

    def _require_unwritten(self) -> None:
        written, frozen = self._readings.written(), self._readings.frozen()
        if written is not None:
            raise StrategyError(
                f"{self.name} reads {written}, which was written to after its forward pass, so it cannot be recomputed "
                f"in backward; write to it later, leave out update_in_backward if you have that, or {self._leave_out}"
            )
        if frozen is not None:
            raise StrategyError(
                f"{self.name} reads {frozen}, whose requires_grad was set after its forward pass, so it cannot be "
                f"recomputed in backward; set it after backward, or {self._leave_out}"
            )

    def __enter__(self) -> None:
        """Around the second pass, which can come more than once: it starts as the first did and leaves no trace."""
        self._require_unwritten()
        self._now = python_states()
        set_python_states(self.random_states)
        self._now_set = Attributes(self.module)
        self.attributes.put_back()
        self._there = borrow_buffers(self.module, self.buffers)
        self._inside = ExitStack()
        self._inside.enter_context(fp32_math(self.math))
        if self.is_compared:
            self._inside.enter_context(self._seeing_others())  # what is compiled may be another program under a mode
            self._inside.enter_context(self._saved.second())

    def __exit__(self, *error: object) -> None:
        self._inside.close()
        return_buffers(self._there)
        self._now_set.put_back()
        del self._now_set
        set_python_states(self._now)


def _elsewhere(module: nn.Module, inputs: Sequence[Any]) -> list[Tensor]:
    """One empty tensor on each device that `module` has and the inputs, which may be objects of tensors, do not show.

    `checkpoint` keeps the random states of those GPUs alone on which an argument lies.
    """
    known = {leaf.device for leaf in inputs if isinstance(leaf, Tensor)}
    own = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return [torch.empty(0, device=device) for device in own - known]


def _has_no_values(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (isinstance(leaf, FakeTensor) or leaf.is_meta)


def _is_compiled(block: nn.Module) -> bool:
    for module in block.modules():
        forward = vars(module).get("forward")
        while isinstance(forward, PatchedForward):
            if isinstance(forward, CompiledBlock):
                return True
            forward = forward.original
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            return True
    return False


class Recomputation:
    """Which blocks of `model` are computed again, by their `names`; with a budget, none until it is settled."""

    def __init__(self, model: nn.Module, strategy: Strategy):
        self._model, self._candidates = model, blocks_to_recompute(model, strategy)
        self._budget_bytes = strategy.recompute_budget_bytes  # None: there is none to be settled
        self.names = self._unchecked = self._candidates if self._budget_bytes is None else ()
        recompute(model, self.names)

    def settle(self, costs: Callable[[Sequence[str]], Costs]) -> None:
        """Before a forward pass: choose within the budget, once, by `costs(names)`, on which the ranks agree."""
        if self._budget_bytes is not None:
            self.names = self._unchecked = choose(costs(self._candidates), self._budget_bytes)
            self._budget_bytes = None
            recompute(self._model, self.names)

    def check(self) -> None:
        """After the first forward pass: say which blocks it did not call (but their parts one by one, perhaps)."""
        forwards = {name: part(self._model, name).forward for name in self._unchecked}
        passed_by = [name for name, f in forwards.items() if isinstance(f, Recomputed) and not f.was_called]
        self._unchecked = ()
        if passed_by and is_first_rank():
            warnings.warn(
                f"strategy.recompute has no effect on {first_of(passed_by)}: "
                "the model did not call them as modules in its first forward pass; name others with recompute_modules",
                stacklevel=2,
            )
