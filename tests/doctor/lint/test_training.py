"""Backward passes, updates, loops and graphs."""

import ast

import pytest

from fullframe.doctor.lint.interpret import interpret
from fullframe.doctor.lint.training import Training
from tests.doctor.lint.samples import training as loop


def read(source: str) -> Training:
    source = "import torch, torch.nn.functional as F\n" + source
    return Training(interpret(source, ast.parse(source)))


def has_graph(source: str) -> bool:
    training = read(source)
    return training.has_graph([s.new for s in training.program.stores if s.name == "v"][-1])


@pytest.mark.parametrize(
    "made",
    [
        "loss",
        "out",
        "out[0] * 2",
        "[1, loss]",
        "{'a': out}",
        "out.logits",
        "sum([loss])",
        "F.relu(out)",
        "loss.view(-1)",
        "torch.stack([loss])",
    ],
)
def test_what_holds_a_graph(made: str) -> None:
    assert has_graph(loop(f"v = {made}"))


@pytest.mark.parametrize(
    "made",
    [
        *("loss.item()", "out.detach()", "loss.data", "float(loss)", "x", "y * 2", "out.argmax(1)", "out.shape"),
        *(
            "out > 0",
            "f'{loss}'",
            "accuracy(out, y)",
            "torch.tensor(loss)",
            "len(out)",
            "[loss.item()]",
            "x.to('cuda')",
        ),
    ],
)
def test_what_holds_none(made: str) -> None:
    assert not has_graph(loop(f"v = {made}"))


def test_nothing_that_is_made_without_autograd_holds_a_graph() -> None:
    assert not has_graph(loop("with torch.no_grad():\n    v = model(x)"))
    assert not has_graph("m = torch.nn.Linear(2, 2)\nwith torch.inference_mode():\n    v = m(x).mean()")


@pytest.mark.parametrize(
    "call",
    ["loss.backward()", "scaler.scale(loss).backward()", "accelerator.backward(loss)", "self.manual_backward(loss)",
     "torch.autograd.backward(loss)"],
)  # fmt: skip
def test_every_way_of_a_backward_pass(call: str) -> None:
    training = read(f"for x in data:\n    loss = f(x)\n    {call}\n")
    (backward,) = training.backwards
    assert [v.node.lineno for m in backward.losses for v in [m] if v.node] in ([3], [4])
    assert (backward.scaler is not None) is call.startswith("scaler")


def test_updates_are_those_of_optimizers() -> None:
    source = "o = torch.optim.SGD(p)\ns = torch.optim.lr_scheduler.StepLR(o, 1)\nscaler = torch.amp.GradScaler()\n"
    training = read(source + "o.step()\ns.step()\nscaler.step(o)\nenv.step()\n")
    assert [u.call.node.lineno for u in training.updates] == [5, 7]
    assert [u.scaler is not None for u in training.updates] == [False, True]
    assert training.updates[0].optimizer is training.updates[1].optimizer


def test_the_loop_of_a_step_holds_backward_pass_and_update() -> None:
    source = "for e in es:\n    for x in xs:\n        for part in x:\n            model(part).mean().backward()\n"
    training = read(source + "        optimizer.step()\n")
    frame = training.backwards[0].call.frame
    inner, step = training.in_loop(frame), training.step_loop(frame)
    assert inner is not None and step is not None
    assert (inner.node.lineno, step.node.lineno) == (4, 3)  # type: ignore[attr-defined]


def test_what_is_handed_to_unknown_code_escapes() -> None:
    training = read(loop("update(optimizer)\nprint(model)"))
    (frame,) = {id(b.call.frame): b.call.frame for b in training.backwards}.values()
    given = next(iter(training.program.calls("update"))).value.arguments[0]
    other = next(iter(training.program.calls("print"))).value.arguments[0]
    assert training.escapes([given], frame) and not training.escapes([other], frame)
