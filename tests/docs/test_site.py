"""What the site is made of: every link leads somewhere, every page stands in the navigation, every command is one."""

import contextlib
import importlib.util
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tyro

import fullframe
from fullframe.cli.application import COMMANDS, run
from fullframe.cli.horovodrun import separated
from tests.docs.page import ROOT, blocks, commands

DOCS = ROOT / "docs"
OPTIONAL = ("...", "[", "$")
OTHERS = {  # options of torchrun, docker, kubectl, Slurm, the tests, and of fullframe itself that no command has
    *("--nproc-per-node", "--ipc", "--shm-size", "--ulimit", "--tag", "--mem", "--write", "--version", "--completion"),
    "--cpus-per-task",
    *("--local", "--lr", "--training"),  # a script's own --local_rank and --lr; torchtitan's --training.steps
    "--half-activations",  # the worked example of a technique
}


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


gather = module(DOCS / "site" / "gather.py")
PAGES: dict[Path, Path] = gather.pages()
TEXTS = [path for path in PAGES if path.suffix == ".md"]


def named(nav: Any) -> Iterator[str]:
    """The pages that a navigation names."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from named(entry)


def test_links_lead_somewhere() -> None:
    broken = [missing for source in TEXTS for missing in gather.missing((ROOT / source).read_text(), source, PAGES)]
    broken += gather.missing((ROOT / "README.md").read_text(), Path("README.md"), PAGES)
    assert broken == []


def test_a_broken_link_and_a_broken_anchor_are_found() -> None:
    text = "[a](how_to/plan.md) [b](how_to/none.md) [c](how_to/train.md#go-on) [d](how_to/train.md#nowhere)\n"
    text += "```text\n[e](f.md)\n```\n"
    found = gather.missing(text, Path("docs/index.md"), PAGES)
    assert found == ["docs/index.md: how_to/none.md", "docs/index.md: how_to/train.md#nowhere"]


def test_every_page_stands_in_the_navigation() -> None:
    nav = set(named(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    shown = {target.as_posix() for target in PAGES.values() if target.suffix == ".md"} | {"measured/index.md"}
    listed = gather.index_of_measurements(PAGES) + (ROOT / "examples" / "README.md").read_text()
    reached = nav | {f"measured/{name}" for name in re.findall(r"\((\w+\.md)\)", listed)}
    reached |= {f"examples/{name}.md" for name in re.findall(r"\]\((\w+)\)", listed)}
    assert shown == reached


def test_every_public_name_has_its_place_in_the_reference() -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    assert sorted(re.findall(r"^::: fullframe\.(\w+)$", text, re.MULTILINE)) == sorted(fullframe.__all__)


def commands_of(text: str) -> Iterator[str]:
    """The command lines of fullframe that a page names, in console blocks and in indented ones."""
    for block in blocks(text):
        if block.language == "console":
            yield from (shown.command.replace("\\\n", " ") for shown in commands(block.text))
    indented = re.sub(r"\\\n +", " ", gather.FENCE.sub("", text))
    yield from re.findall(r"^    (fullframe .*)$", indented, re.MULTILINE)


@pytest.mark.parametrize("source", [*TEXTS, Path("README.md")], ids=str)
def test_commands_are_understood(source: Path) -> None:
    """Their options exist, and their values are of the right kind; they are run by `test_pages`, or are not."""
    for command in commands_of((ROOT / source).read_text()):
        words = shlex.split(re.split(r" [|>]| 2>", command)[0], comments=True)
        if words[:1] == ["fullframe"] and not any(word.startswith(OPTIONAL) for word in words):
            understood(words[1:])


@pytest.fixture(scope="module")
def options() -> set[str]:
    """All that --help of the commands tells of."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        for words in [*([name] for name in COMMANDS), *(["doctor", name] for name in ("all", "env", "lint", "run"))]:
            with contextlib.suppress(SystemExit):
                run([*words, "--help"])
    return set(re.findall(r"--[a-z][a-z0-9-]+", told.getvalue()))


def test_options_that_are_spoken_of_are_there(options: set[str]) -> None:
    """In tables and sentences too, which no command line shows."""
    assert {"--width", "--min-np", "--sweep", "--select"} < options
    for source in [path for path in TEXTS if path.parts[0] == "docs" and path.name != "log.md"] + [Path("README.md")]:
        spoken = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / source).read_text()))
        assert spoken <= options | OTHERS, f"{source}: {sorted(spoken - options - OTHERS)}"


def understood(words: list[str]) -> None:
    """Leaves by SystemExit where the command line does not hold."""
    if words[:1] == ["horovodrun"]:
        words = ["horovodrun", *separated(words[1:])]
    if words[:1] not in (["--version"], ["--completion"]):
        tyro.extras.subcommand_cli_from_dict(COMMANDS, args=words, config=(tyro.conf.FlagCreatePairsOff,))


def test_an_option_that_is_none_is_found() -> None:
    with pytest.raises(SystemExit):
        understood(["train", "recipe.py", "--wide", "2"])
