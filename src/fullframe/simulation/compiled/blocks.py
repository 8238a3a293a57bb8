"""Compiled blocks on fake tensors: each is captured as in a real step, and its programs run under the tracer.

So what is saved for backward is what the partitioner chose. Equal blocks share one program. A block that cannot be
captured is simulated as it is, and a note names it.
"""

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from fullframe.model.compiled.blocks import GIVES_OUTPUTS, CompiledBlock, ambient, reason_in
from fullframe.model.compiled.guard import SIMPLE, Guard, facts
from fullframe.ranks.recording import NotYet
from fullframe.simulation.clock.roofline import StepClock
from fullframe.simulation.fake.replaced import silenced
from fullframe.spatial.tensor import local_or_whole, spec_in
from fullframe.wording import some

EXPERIMENTAL = (
    "compiled blocks are experimental; their bytes are those of inductor's own buffers, the seconds of their fused "
    "kernels are bytes read and written by the memory's rate"
)


class SimulatedPrograms:
    """What the compiled blocks of one simulation run; called with a block and what that is called with."""

    def __init__(self, clock: StepClock):
        self._clock = clock
        self._why_not: dict[str, str] = {}  # by block
        self._made: dict[Any, Any] = {}  # by all that a program depends on; the reason where there is none

    def __call__(self, block: CompiledBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's result."""
        guard = Guard(block.module)
        leaves, tree = tree_flatten((args, kwargs))
        tensors = [local_or_whole(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        key = (guard.structure, tuple(map(facts, guard.tensors)), tree, tuple(map(_told, leaves)), *ambient())
        program = self._made.get(key)
        if program is None:
            program = self._captured(block, guard, leaves, tree)
            if not isinstance(program, _Later):
                self._made[key] = program
        if isinstance(program, str):
            self._why_not[block.name or "the model"] = str(program)
            return block.original(*args, **kwargs)
        self._why_not.pop(block.name or "the model", None)
        return program(guard.tensors, tensors)

    @property
    def notes(self) -> list[str]:
        """What was taken for granted, and which blocks were simulated as they are, and why."""
        found = defaultdict[str, list[str]](list)
        for block, why in self._why_not.items():
            found[why].append(block)
        experimental = [EXPERIMENTAL] * any(not isinstance(program, str) for program in self._made.values())
        return [
            *experimental,
            *(f"simulated without compile: {some(names, most=1)}: {why}" for why, names in found.items()),
        ]

    def _captured(self, block: CompiledBlock, guard: Guard, leaves: list[Any], tree: Any) -> Any:
        """Its program, or the reason why there is none."""
        from fullframe.model.compiled.capture import Capture  # which takes a second to import
        from fullframe.simulation.compiled.lowering import SETTINGS, Lowering

        if guard.gives_outputs:
            return GIVES_OUTPUTS
        if not all(isinstance(leaf, (Tensor, *SIMPLE)) for leaf in leaves):
            return "it is called with what is no tensor or number"
        try:
            # Inductor is not to warn of this machine: it is another that is simulated.
            with _disable_current_modes(), silenced("torch._inductor"):
                capture = Capture(block.original, guard, leaves, tree, simulated=True)
                return capture.program(Lowering(self._clock), SETTINGS)
        except Exception as error:  # torch raises many kinds of what it cannot capture or lower
            why = reason_in(error)
            return _Later(why) if isinstance(error, NotYet) else why


class _Later(str):
    """Why a block has no program yet: it changed itself, and is tried again at its next call."""


def _told(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf if isinstance(leaf, SIMPLE) else id(leaf)
    return spec_in(leaf), facts(local_or_whole(leaf)), leaf.is_leaf
