"""FF106 to FF109: losses that train nothing, or not what is meant."""

from collections.abc import Iterator

from fullframe.doctor.lint.program import Call
from fullframe.doctor.lint.rule import ERROR, Found, rule, said
from fullframe.doctor.lint.training import Training
from fullframe.doctor.lint.values import Origin, Value, cone


@rule(
    "FF106", ERROR, "backward pass of a loss that was cut off",
    "A tensor made anew from a loss has no graph: backward fails, or with requires_grad=True does nothing and no "
    "weight is trained.",
    "Call backward on the loss itself.",
    """
      for x, y in loader:
    -     loss = torch.tensor(F.cross_entropy(model(x), y).item(), requires_grad=True)
    +     loss = F.cross_entropy(model(x), y)
          optimizer.zero_grad()
          loss.backward()
          optimizer.step()
    """,
)  # fmt: skip
def cut_off(training: Training) -> Iterator[Found]:
    """`torch.tensor(loss)`, `loss.detach()`, `loss.data` or `loss.requires_grad_()` before `backward`."""
    for backward in training.backwards:
        for loss in backward.losses:
            for member in loss.members():
                how = _cut(member)
                if how:
                    yield Found(backward.call.node, f"{how} has no graph, so no parameter gets a gradient")


def _cut(value: Value) -> str:
    if value.method == "requires_grad_" and value.receiver is not None:
        inner = _cut(value.receiver)
        is_made = any(v.method in ("detach", "item") for v in cone([value.receiver], 50))
        return inner or ("what needs requires_grad_()" if is_made else "")
    if value.path in ("torch.tensor", "torch.as_tensor", "torch.FloatTensor", "torch.autograd.Variable"):
        made_of = cone(value.arguments[:1])
        return f"{value.path}(...)" if any(v.origin is Origin.CALL for v in made_of) else ""
    if value.method in ("detach", "item"):
        return f".{value.method}()"
    return ".data" if value.origin is Origin.ATTRIBUTE and value.text == "data" else ""


@rule(
    "FF107", ERROR, "probabilities given to a loss that takes logits",
    "The loss applies softmax or sigmoid itself; applied twice, gradients shrink and the model trains badly, without "
    "an error.",
    "Give the loss the logits; apply softmax or sigmoid only where probabilities are read.",
    """
      for x, y in loader:
    -     loss = F.cross_entropy(torch.softmax(model(x), dim=1), y)
    +     loss = F.cross_entropy(model(x), y)
          loss.backward()
    """,
)  # fmt: skip
def twice_softmax(training: Training) -> Iterator[Found]:
    """Softmax into cross entropy or NLL, sigmoid into binary cross entropy with logits."""
    for event in training.program.events:
        if not isinstance(event, Call) or not event.value.arguments:
            continue
        function = event.value.function
        name = (function.path or event.value.path).rpartition(".")[2].lower().replace("_", "")
        wants = _TAKES_LOGITS.get(name)
        if wants is None or not (function.path or event.value.path).startswith("torch."):
            continue
        given = event.value.argument(0, "input")
        for member in given.members() if given is not None else ():
            made_by = "" if member.origin is not Origin.CALL else member.method or member.path or member.function.path
            if made_by.rpartition(".")[2].lower() == wants:
                yield Found(event.node, f"{said(event.node.func)} is given what {wants} made, and applies it again")


_TAKES_LOGITS = {
    "crossentropy": "softmax",
    "crossentropyloss": "softmax",
    "nllloss": "softmax",
    "binarycrossentropywithlogits": "sigmoid",
    "bcewithlogitsloss": "sigmoid",
}

RULES = (cut_off, twice_softmax)
