"""What part a value plays."""

import ast

import pytest

from fullframe.doctor.lint.interpret import interpret
from fullframe.doctor.lint.program import Program
from fullframe.doctor.lint.roles import Role, Roles, of_path


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("torch.optim.AdamW", Role.OPTIMIZER),
        ("torch.optim.lr_scheduler.StepLR", Role.SCHEDULER),
        ("transformers.get_linear_schedule_with_warmup", Role.SCHEDULER),
        ("torch.nn.Linear", Role.MODEL),
        ("torch.nn.CrossEntropyLoss", Role.CRITERION),
        ("torch.nn.Parameter", Role.NONE),
        ("torch.utils.data.DataLoader", Role.LOADER),
        ("torch.utils.data.distributed.DistributedSampler", Role.SAMPLER),
        ("torch.cuda.amp.GradScaler", Role.SCALER),
        ("torch.amp.GradScaler", Role.SCALER),
        ("transformers.AutoModel.from_pretrained", Role.MODEL),
        ("transformers.AutoTokenizer.from_pretrained", Role.NONE),
        (".data.DataLoader", Role.NONE),
    ],
)
def test_by_path(path: str, role: Role) -> None:
    assert of_path(path) == role


def answered(source: str, name: str) -> tuple[Role, Program, Roles]:
    program = interpret(source, ast.parse(source))
    roles = Roles()
    value = [s.new for s in program.stores if s.name == name][-1]
    return roles.of(value), program, roles


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("def f(a):\n    x = a\n    a.zero_grad()\n    a.step()", Role.OPTIMIZER),
        ("def f(a):\n    x = a\n    a.eval()", Role.MODEL),
        ("def f(a):\n    x = a\n    a.train()\n    a(1)", Role.MODEL),
        ("def f(a):\n    x = a\n    a.train()", Role.NONE),
        ("def f(a):\n    x = a\n    a.set_epoch(1)\n    a.step()\n    a.zero_grad()", Role.NONE),
        ("def f(a):\n    x = a\n    a.step()\n    a.get_last_lr()", Role.SCHEDULER),
        ("def f(scheduler):\n    x = scheduler\n    x.step()", Role.SCHEDULER),
        ("class O(torch.optim.Optimizer): ...\nx = O(p)", Role.OPTIMIZER),
        ("x = fabric.setup(torch.nn.Linear(2, 2))", Role.MODEL),
        ("def f(a):\n    x = a\n    a.scale(l)\n    a.update()", Role.SCALER),
        ("def f(a: 'torch.optim.Optimizer'):\n    x = a", Role.OPTIMIZER),
        ("def f(optimizer):\n    x = optimizer\n    x.step()", Role.OPTIMIZER),
        ("def f(optimizer):\n    x = optimizer", Role.NONE),
        ("def f(a):\n    x = a.scaler\n    x.load_state_dict(s)", Role.SCALER),
        ("def f(a):\n    x = a.scaler\n    x.fit(s)", Role.NONE),
        ("class M(torch.nn.Module): ...\nx = M()", Role.MODEL),
        ("class M(torch.nn.Module): ...\nclass N(M): ...\nx = N().to('cuda')", Role.MODEL),
        ("x = torch.nn.parallel.DistributedDataParallel(m)", Role.MODEL | Role.PARALLEL),
        ("x = torch.compile(torch.nn.Linear(2, 2))", Role.MODEL),
        ("m, x = accelerator.prepare(torch.nn.Linear(2, 2), torch.optim.SGD(p))", Role.OPTIMIZER),
        ("x = torch.nn.Linear(2, 2).weight", Role.NONE),
    ],
)
def test_by_use_and_by_making(source: str, role: Role) -> None:
    assert answered("import torch\n" + source, "x")[0] == role


def test_the_model_inside_its_wrappers() -> None:
    source = "import torch\nm = torch.nn.Linear(2, 2)\nx = torch.nn.DataParallel(torch.compile(m.to('cuda'))).module"
    _, program, roles = answered(source, "x")
    m, x = (next(s.new for s in program.stores if s.name == name) for name in "mx")
    assert roles.model_inside(x) is m
