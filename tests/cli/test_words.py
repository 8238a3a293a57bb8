"""The command line has an option for every technique, and a command can be said again in words."""

import dataclasses
import typing
from pathlib import Path

import pytest
import tyro

from fullframe.cli.application import COMMANDS, run
from fullframe.cli.calibrate import Calibrate
from fullframe.cli.doctor.run import DoctorRun
from fullframe.cli.plan import Plan
from fullframe.cli.simulate import Simulate
from fullframe.cli.train import Train
from fullframe.cli.verify import Verify
from fullframe.cli.words import TechniqueOptions, changed, words
from fullframe.strategy import TECHNIQUES, Strategy

RECIPE = Path("job.py")
SPOKEN = [
    Train(recipe=RECIPE),
    Train(
        recipe=RECIPE,
        processes=4,
        height=2,
        run_dir=Path("runs/a b"),
        auto_resume=True,
        hang_timeout=0.1,
        strict_memory=1e-9,
        techniques=TechniqueOptions(precision="fp16", recompute="blocks", recompute_modules=("a.*", "b"), offload=True),
    ),
    *(Train(recipe=RECIPE, techniques=TechniqueOptions(compile=value)) for value in (True, "all", ("a.*", "b"))),
    Verify(recipe=RECIPE, set=("height=96", "lr=1e-3"), data=2, unsupported="gather", tolerance=1e-7, all=True),
    Calibrate(processes=2, out=Path("rates.json")),
    Simulate(recipe=RECIPE, gpus="2xcpu", strategy=Path("/dev/stdin"), benchmark=True, json=True),
    Plan(recipe=RECIPE, gpus="4xT4", precision=("bf16", "fp32"), seconds=3.5),
]


def test_every_technique_is_an_option_with_its_default() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Strategy)}
    rows = {technique.name for technique in TECHNIQUES}
    assert {field.name: field.default for field in dataclasses.fields(TechniqueOptions)} == {
        name: default for name, default in fields.items() if name in rows
    }
    types = typing.get_type_hints(Strategy)
    assert {name: typing.get_type_hints(TechniqueOptions)[name] for name in rows} == {n: types[n] for n in rows}


@pytest.mark.parametrize("command", ["train", "simulate"])
def test_the_help_lists_every_technique(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([command, "--help"])
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for technique in TECHNIQUES:
        assert f"--{technique.name.replace('_', '-')}" in printed and technique.help in printed


@pytest.mark.parametrize("command", SPOKEN, ids=lambda command: type(command).__name__)
def test_words_are_parsed_back(command: object) -> None:
    config = (tyro.conf.FlagCreatePairsOff,)
    assert tyro.cli(type(command), args=words(command), config=config) == command
    assert type(command) in COMMANDS.values()


def test_what_is_not_asked_for_is_not_said() -> None:
    assert words(Train(recipe=RECIPE)) == ["job.py"] and words(TechniqueOptions()) == []
    program = DoctorRun(program=Path("train.py"), processes=2, arguments=("--lr", "0.1"))
    assert words(program) == ["train.py", "--processes", "2", "--", "--lr", "0.1"]
    assert changed(TechniqueOptions(clip_norm=0.5)) == {"clip_norm": 0.5}
