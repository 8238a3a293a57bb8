"""What part a value plays in training: told by where it was imported from, else by what is done with it.

A name is asked last, and only of a parameter or attribute that is also used as its name says.
"""

import ast
from enum import Flag, auto

from fullframe.doctor.lint.expressions import SAME_OBJECT
from fullframe.doctor.lint.values import Origin, Value


class Role(Flag):
    """Parts; a value can play several."""

    NONE = 0
    MODEL = auto()
    PARALLEL = auto()  # a model wrapped by DistributedDataParallel
    SHARDED = auto()  # by FSDP
    CRITERION = auto()
    OPTIMIZER = auto()
    SCHEDULER = auto()
    SCALER = auto()
    LOADER = auto()
    SAMPLER = auto()  # DistributedSampler


_WRAPS = {
    "DistributedDataParallel": Role.PARALLEL,
    "FullyShardedDataParallel": Role.SHARDED,
    "DataParallel": Role.NONE,
    "compile": Role.NONE,
    "convert_sync_batchnorm": Role.NONE,
    "convert_model": Role.NONE,
    "script": Role.NONE,
}
_NAMED = {
    "DataLoader": Role.LOADER,
    "StatefulDataLoader": Role.LOADER,
    "DistributedSampler": Role.SAMPLER,
    "GradScaler": Role.SCALER,
    "ShardedGradScaler": Role.SCALER,
    "Optimizer": Role.OPTIMIZER,
    "DistributedOptimizer": Role.OPTIMIZER,
    "LRScheduler": Role.SCHEDULER,
    "Module": Role.MODEL,
    "PreTrainedModel": Role.MODEL,
    "LightningModule": Role.MODEL,
}
_MODULES = ("Module", "PreTrainedModel", "LightningModule", "Sequential", "ModuleList", "GenerationMixin")
_MODEL_USES = {"parameters", "named_parameters", "eval", "named_modules", "modules", "no_sync", "zero_grad"}
_PREPARES = {"prepare", "setup", "setup_module", "setup_optimizers", "setup_dataloaders", "setup_model"}
_UNSURE = {Origin.PARAMETER, Origin.ATTRIBUTE, Origin.UNKNOWN, Origin.ITEM, Origin.ELEMENT, Origin.CALL}


def of_path(path: str) -> Role:
    """The part that what `path(...)` makes plays, by the path alone."""
    top, _, _ = path.partition(".")
    _, _, last = path.rpartition(".")
    if last in _NAMED and not path.startswith("."):
        return _NAMED[last]
    if path.startswith("torch.optim.lr_scheduler.") or (top == "transformers" and last.endswith("_with_warmup")):
        return Role.SCHEDULER
    if path.startswith(("torch.optim.", "apex.optimizers.", "bitsandbytes.optim.", "torch_optimizer.")):
        return Role.OPTIMIZER if last[:1].isupper() else Role.NONE
    if path.startswith("torch.nn.") and last[:1].isupper() and not path.startswith("torch.nn.parallel."):
        parameter = last in ("Parameter", "Buffer", "UninitializedParameter")
        return Role.NONE if parameter else Role.CRITERION if last.endswith("Loss") else Role.MODEL
    if path.startswith("torchvision.models.") or path.startswith("segmentation_models_pytorch."):
        return Role.MODEL
    if last == "from_pretrained" and top == "transformers":
        return Role.NONE if "Tokenizer" in path or "Processor" in path or "Config" in path else Role.MODEL
    return Role.MODEL if path in ("timm.create_model", "torch.hub.load") else Role.NONE


class Roles:
    """Answers for the values of one program, remembered."""

    def __init__(self) -> None:
        self._known: dict[int, Role] = {}

    def of(self, value: Value) -> Role:
        """All parts that `value` may play."""
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = Role.NONE  # a value made of itself, while it is looked at
            known = self._known[id(value)] = self._found(value)
        return known

    def model_inside(self, value: Value) -> Value:
        """The model itself, without `.to(...)`, wrappers and `.module`."""
        for _ in range(20):
            if value.origin is Origin.CALL and value.method in SAME_OBJECT:
                value = value.function.inputs[0]
            elif value.origin is Origin.CALL and value.path.rpartition(".")[2] in _WRAPS and value.arguments:
                value = value.arguments[0]
            elif value.origin is Origin.ATTRIBUTE and value.text == "module":
                value = value.inputs[0]
            else:
                inner = prepared(value)
                if inner is None:
                    return value
                value = inner
        return value

    def _found(self, value: Value) -> Role:
        if value.origin is Origin.EITHER:
            found = Role.NONE
            for member in value.inputs:
                found |= self.of(member)
            return found
        if value.origin is Origin.INSTANCE:
            return self._of_instance(value)
        found = Role.NONE
        if value.origin is Origin.CALL:
            found = self._of_call(value)
        if not found:
            inner = prepared(value)
            found = Role.NONE if inner is None else self.of(inner)
        if not found and value.origin in _UNSURE and not value.path.startswith(("torch.", "builtins.")):
            found = _by_use(value) or _by_annotation(value) or _by_name(value)
        return found

    def _of_instance(self, value: Value) -> Role:
        assert value.definition is not None
        found = Role.NONE
        for path in value.definition.base_paths():
            last = path.rpartition(".")[2]
            if path.startswith("torch.nn.") or last in _MODULES or last.endswith(("PreTrainedModel", "Module")):
                found |= Role.MODEL
            elif not path.startswith("torch.utils.data.Dataset"):
                found |= of_path(path)
        return found

    def _of_call(self, value: Value) -> Role:
        path = value.path
        if path:
            last = path.rpartition(".")[2]
            if last in _WRAPS and path.startswith(("torch.", "apex.", "fairscale.")) and value.arguments:
                return _WRAPS[last] | Role.MODEL
            return of_path(path)
        if value.method in SAME_OBJECT:
            base = self.of(value.function.inputs[0])
            return base if Role.MODEL in base else Role.NONE
        return Role.NONE


def prepared(value: Value) -> Value | None:
    """What was handed to `accelerator.prepare(...)` or `fabric.setup(...)` in the place that `value` comes from."""
    if value.origin is Origin.CALL and value.method in _PREPARES and len(value.arguments) == 1:
        return value.arguments[0]
    if value.origin is Origin.ITEM and value.inputs[0].method in _PREPARES:
        position = value.inputs[1].constant
        given = value.inputs[0].arguments
        return given[position] if isinstance(position, int) and position < len(given) else None
    return None


def _by_use(value: Value) -> Role:
    uses = value.uses
    if "unscale_" in uses or ("scale" in uses and uses & {"step", "update"}):
        return Role.SCALER
    if "set_epoch" in uses and "()" not in uses:
        return Role.NONE
    if "step" in uses and uses & {"zero_grad", "param_groups"}:
        return Role.OPTIMIZER
    if "step" in uses and uses & {"get_last_lr", "get_lr"}:
        return Role.SCHEDULER
    if uses & _MODEL_USES or {"train", "()"} <= uses:
        return Role.NONE if "fit" in uses else Role.MODEL
    return Role.NONE


def _by_annotation(value: Value) -> Role:
    if not isinstance(value.node, ast.arg) or value.node.annotation is None:
        return Role.NONE
    annotation = value.node.annotation
    words = ast.unparse(annotation).replace("'", "").replace("|", " ").replace("[", " ").replace("]", " ").split()
    for word in words:
        found = _NAMED.get(word.rpartition(".")[2], Role.NONE)
        if found:
            return found
    return Role.NONE


def _by_name(value: Value) -> Role:
    if value.origin not in (Origin.PARAMETER, Origin.ATTRIBUTE, Origin.UNKNOWN):
        return Role.NONE
    name, uses = value.text.lower().strip("_"), value.uses
    if "step" in uses and name.endswith(("optimizer", "optim", "opt")):
        return Role.OPTIMIZER
    if "step" in uses and name.endswith(("scheduler", "sched")):
        return Role.SCHEDULER
    if name.endswith("scaler") and uses & {"load_state_dict", "state_dict", "update"}:
        return Role.SCALER
    if "()" in uses and name.endswith(("model", "net", "network")):
        return Role.MODEL
    return Role.NONE
