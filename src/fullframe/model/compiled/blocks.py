"""Blocks that run compiled: each is captured at its first call, and again for other shapes, modes or attributes.

Equal blocks share one program. A block that cannot be captured runs as it is, which is said once, with its name.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_flatten

from fullframe.errors import StrategyError
from fullframe.model.blocks import NONE_REPEAT, blocks_that_repeat, class_name, examples, matching
from fullframe.model.compiled.guard import MOST_KNOWN, SIMPLE, Guard, facts, memory, simple
from fullframe.model.forward_patch import PatchedForward
from fullframe.model.runs import part
from fullframe.ranks.agreement import is_first_rank
from fullframe.ranks.recording import NotCapturable, NotYet, reason_not_to_compile, recorder
from fullframe.ranks.tags import line_of
from fullframe.spatial.tensor import local_or_whole, spec_in

_GLOBAL_HOOKS = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
_WATCHED = "a mode or a hook of torch wants to see each op"
GIVES_OUTPUTS = "transformers was asked for a result from inside it (output_hidden_states, output_attentions)"
_MOST_CAPTURES = 8  # of one block: so many take long enough


class Said(NamedTuple):
    """What became of a block at one capture."""

    block: str
    seconds: float
    why_not: str  # "" where it runs compiled


class Programs:
    """The programs of one model by all that they depend on; for what cannot be captured the reason, a string.

    `whys` has for each block that was called why it runs as it is, "" where it runs compiled.
    """

    def __init__(self, backend: str = "inductor", options: dict[str, Any] | None = None):
        self.backend, self.options = backend, options or {}
        self.made: dict[Any, Any] = {}
        self.said: list[Said] = []
        self.whys: dict[str, str] = {}
        # In a simulation, what runs a block: called with it, its arguments and its keywords.
        self.simulated: Callable[[CompiledBlock, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.tell: Callable[[str], None] | None = None  # called with a line for each program that is made
        self._warned: set[str] = set()
        self._partly: set[tuple[str, str]] = set()  # blocks that run as they are in some place, and why

    def find(self, key: Any, block: "CompiledBlock", guard: Guard, leaves: Sequence[Any], tree: Any) -> Any:
        """The program for `key`, made at the first call with it, or the reason why there is none."""
        found = self.made.get(key)
        if isinstance(found, str):
            return self.refuse(block, found)
        if found is not None and found.is_current:
            self.whys[block.name] = ""
            return found
        if block.captures == _MOST_CAPTURES:  # nothing more is kept of it, which may change at each call
            return self.refuse(block, f"what it depends on has changed {_MOST_CAPTURES} times (a number, a shape)")
        block.captures += 1
        started = time.perf_counter()
        why_not, program, again = "", None, False
        try:
            from fullframe.model.compiled.capture import Capture  # which takes a second to import

            program = Capture(block.original, guard, leaves, tree).program(self.backend, self.options)
        except Exception as error:  # whatever it is, the block as it is will raise it too, if it is the block's
            why_not = reason_in(error)
            again = isinstance(error, NotYet)
        made = why_not if program is None else program
        if not again:
            self.made[key] = made
        else:  # an equal block may be done with it, this one too at its next call
            block.forget()
        self._say(Said(block.name, time.perf_counter() - started, why_not), aloud=not again or block.captures > 1)
        return made

    def refuse(self, block: "CompiledBlock", why_not: str) -> str:
        """The reason for which `block` runs as it is, said where it is another than before."""
        if self.whys.get(block.name) != why_not:
            self._say(Said(block.name, 0.0, why_not))
        return why_not

    def partly(self, block: "CompiledBlock", why: str) -> None:
        """Say once that `block`, compiled or not elsewhere, runs as it is here."""
        if (block.name, why) not in self._partly:
            self._partly.add((block.name, why))
            before = self.whys.get(block.name, why)
            self._say(Said(block.name, 0.0, why))
            self.whys[block.name] = before

    def _say(self, said: Said, aloud: bool = True) -> None:
        self.said.append(said)
        self.whys[said.block] = said.why_not
        if self.tell is not None and not said.why_not:
            self.tell(f"compiled {said.block or 'the model'} in {said.seconds:.0f} s, for all blocks that are equal")
        if not said.why_not or not aloud or said.why_not in self._warned:
            return
        self._warned.add(said.why_not)
        if is_first_rank():
            block = said.block or "the model"
            warnings.warn(f"{block} is not compiled and runs as it is: {said.why_not}", stacklevel=4)


def reason_in(error: Exception) -> str:
    """Why a block is not compiled, of what its capture raised: the first line of it."""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return f"it looks at numbers in a tensor, at {line_of(error.__traceback__)}"
    kind = "" if isinstance(error, NotCapturable) else f"{type(error).__name__}: "
    return kind + (str(error).strip().splitlines() or [""])[0][:300]


class CompiledBlock(PatchedForward):
    """Stands in for a block's forward."""

    def __init__(self, module: nn.Module, name: str, programs: Programs):
        super().__init__(module)
        self.module, self.name, self._programs = module, name, programs
        self.captures = 0
        self._guard: Guard | None = None
        self._known: dict[Any, Any] = {}  # of this block, while the guard holds

    def forget(self) -> None:
        """Look at it again at the next call."""
        self._guard = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._programs.simulated is not None and recorder() is None:
            return self._programs.simulated(self, args, kwargs)
        if _is_watched():
            self._programs.whys.setdefault(self.name, _WATCHED)
            return self.original(*args, **kwargs)
        if why := reason_not_to_compile():
            self._programs.partly(self, why)
            return self.original(*args, **kwargs)
        guard = self._guard
        if guard is None or not guard.holds():
            guard, self._known = Guard(self.module), {}
            self._guard = guard
        if guard.gives_outputs:
            self._programs.whys.setdefault(self.name, GIVES_OUTPUTS)
            return self.original(*args, **kwargs)
        leaves, tree = _flat(args, kwargs)
        own = guard.measures()
        tensors: list[Tensor] = []
        key: list[Any] = [own, tree, *ambient()]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                local = local_or_whole(leaf)
                tensors.append(local)
                key.append((spec_in(leaf), type(leaf), facts(local)))
            elif isinstance(leaf, SIMPLE):
                key.append(simple(leaf))
            else:
                self._programs.refuse(self, f"it is called with a {type(leaf).__name__}")
                return self.original(*args, **kwargs)
        at = [memory(t) for t in tensors]
        if len(set(at)) < len(at) or not own.memory.isdisjoint(at):
            everyone = [*map(memory, guard.tensors), *at]
            key.append(tuple(map(everyone.index, everyone)))
        known = tuple(key)
        program = self._known.get(known)
        if program is None or not (isinstance(program, str) or program.is_current):
            given = tree if not isinstance(tree, int) else tree_flatten((args, kwargs))[1]
            program = self._programs.find((guard.structure, own.facts, *known[1:]), self, guard, leaves, given)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[known] = program
        return self.original(*args, **kwargs) if isinstance(program, str) else program(guard.tensors, tensors)


_FLAT = (Tensor, *SIMPLE)


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Any]:
    """The leaves of what a block is called with, and the tree: of plain positional arguments just their number."""
    if not kwargs and all(isinstance(argument, _FLAT) and not isinstance(argument, tuple) for argument in args):
        return args, len(args)
    return tree_flatten((args, kwargs))


def _is_watched() -> bool:
    """Whether a mode or a hook of torch wants to see each op or module: a simulation, a trace, a capture."""
    return bool(
        recorder() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(_GLOBAL_HOOKS)
    )


def ambient() -> tuple[Any, ...]:
    """What torch's functions read beside their arguments."""
    cast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *cast, torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
    )  # fmt: skip


def compiled_blocks(model: nn.Module, which: bool | str | Sequence[str]) -> "CompiledBlocks":
    """The repeated blocks of `model`, the modules that match the names, or with "all" the model as one program.

    Compiled from now on. Raises StrategyError where there are none.
    """
    if isinstance(which, str):
        if which != "all":
            raise StrategyError(f'compile is {which!r}; give True, "all", or names of modules as a list')
        return CompiledBlocks(model, [""], Programs())
    names = blocks_that_repeat(model) if isinstance(which, bool) else list(matching(model, which, "compile"))
    if not names:
        raise StrategyError(
            f"{class_name(model)} {NONE_REPEAT}, to be compiled; name modules by compile=[...], of {examples(model)}"
        )
    return CompiledBlocks(model, names, Programs())


class CompiledBlocks:
    """The blocks of `model` with these names, compiled from now on; `forward_patch.restore` takes it back."""

    def __init__(self, model: nn.Module, names: Sequence[str], programs: Programs):
        self.names, self.programs = tuple(names), programs
        self.put_on(model)

    def put_on(self, model: nn.Module) -> None:
        """Put them in place, again where they were taken off."""
        for name in self.names:
            module = part(model, name)
            module.forward = CompiledBlock(module, name, self.programs)

    @property
    def summary(self) -> str:
        """Which blocks run compiled so far, and why others do not."""
        said = self.programs.said
        whys = {name: self.programs.whys.get(name, "it was not called") for name in self.names}
        made, seconds = [one for one in said if not one.why_not], sum(one.seconds for one in said)
        whys = {name: why for name, why in whys.items() if why}
        text = f"{len(self.names) - len(whys)} of {len(self.names)} blocks are compiled"
        if made:
            text += f" ({len(made)} programs, made in {seconds:.0f} s)"
        return "; ".join([text, *(f"{block or 'the model'} is not: {why}" for block, why in whys.items())])
