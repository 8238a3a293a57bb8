"""What all commands have in common: what is said of them, and the end of whoever reads what they print."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fullframe
from fullframe.cli.application import COMMANDS, run

WORDS = {
    "rich": ["jobs", "."],
    "json": ["jobs", ".", "--json"],
    "print": ["doctor", "lint", "mistakes.py"],
    "help": ["train", "--help"],
    "version": ["--version"],
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_command_whose_reader_has_gone_ends_without_a_word(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "mistakes.py").write_text("import torch\n\nstate = torch.load('a.pt')\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "fullframe", *words], cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_what_is_closed_from_the_start_takes_what_is_said(closed: str, locale: str, tmp_path: Path) -> None:
    environment = os.environ | {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words, code in (("--version", 0), ("doctor lint .", 0), ("train", 2)):
        script = f'"$0" -m fullframe {words} {closed}'
        done = subprocess.run(["bash", "-c", script, sys.executable], cwd=tmp_path, env=environment)
        assert done.returncode == code, words


def test_another_pipe_that_breaks_is_an_error_as_any(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: object) -> int:
        raise BrokenPipeError("a worker is gone")

    monkeypatch.setattr("fullframe.cli.jobs.Jobs.run", broken)
    assert run(["jobs"]) == 1
    assert "a worker is gone" in capsys.readouterr().err


def test_files_are_utf8_in_any_locale_and_what_is_shown_is_in_the_locales(tmp_path: Path) -> None:
    folder = tmp_path / "größe"
    folder.mkdir()
    (folder / "state.py").write_text("import torch\n\nname = 'größe'\nstate = torch.load('a.pt')\n", encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in (["doctor", "lint", "größe"], ["jobs", "größe"], ["train", "größe/state.py"]):
        done = subprocess.run(
            [sys.executable, "-m", "fullframe", *words], cwd=tmp_path, env=os.environ | locale, capture_output=True
        )
        assert done.returncode == {"doctor": 1, "jobs": 0, "train": 2}[words[0]], done.stderr
        said = (done.stdout + done.stderr).decode("ascii")
        assert "Traceback" not in said and ("gr\\xf6\\xdfe" in said or words[0] == "jobs")


@pytest.mark.parametrize("columns", [80, 200])
def test_help_has_a_sentence_for_each_command(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(["--help"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert max(map(len, lines)) <= min(columns, 120) and len(lines) < 45
    for name, command in COMMANDS.items():
        first = (command.__doc__ or "").strip().partition("\n")[0]
        assert first.endswith((".", ":")) or "." in first, f"{name}: the first line is no sentence"
        assert f"  {name} " in said and " ".join(first.split()[:3]) in " ".join(said.split())
    assert "--version" in said and "--completion" in said


def test_an_interrupt_while_modules_are_loaded_has_no_traceback() -> None:
    interrupted = """
import sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "tyro":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from fullframe.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"fullframe {fullframe.__version__}\n"


def test_an_unknown_command_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["trian"])
    assert ended.value.code == 2 and "train" in capsys.readouterr().err


def test_doctor_of_a_file_says_which_checks_take_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "my/recipe.py"]) == 2
    assert "fullframe doctor run my/recipe.py runs it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--set", ["train", "recipe.py", "--set", "a=1", "--width", "2", "--set", "b=2"]),
        ("--recompute-modules", ["train", "recipe.py", "--recompute-modules", "a", "--recompute-modules", "b"]),
        ("--match", ["jobs", "--match", "a", "--match", "b"]),
    ],
)
def test_values_of_an_option_that_is_given_twice_are_not_dropped(
    option: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert f"{option} is given twice; give all its values to one" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train", __file__, "--run-dir", "", "--steps", "1"], ["report", ""]])
def test_an_empty_word_is_not_this_folder(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    assert f"error: {words[words.index('') - 1]} is given an empty word; is a var" in capsys.readouterr().err
    assert run(["horovodrun", "-np", "1", "true", ""]) == 0


@contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """Where this user, or for root another one, may not read `folder`."""
    folder.chmod(0)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)
        folder.chmod(0o755)


def test_what_may_not_be_read_is_named_and_hides_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text('{"state": "finished"}')
    assert run(["jobs", "."]) == 0 and run(["watch", "mine", "--once"]) == 0  # all is loaded
    assert "2 runs: 2 finished" in capsys.readouterr().out
    with as_nobody(tmp_path / "theirs"):
        assert run(["jobs", "."]) == 0
        assert run(["watch", "theirs", "--once"]) == 2
    said = capsys.readouterr()
    assert "1 run: 1 finished" in said.out and said.err == "error: theirs/run.json: Permission denied\n"


def test_an_unknown_option_points_to_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["train", "recipe.py", "--workers", "2"])
    assert ended.value.code == 2 and "fullframe train --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "recipe.py", "--steps", "ten"], "parsing --steps: invalid literal for int() with base 10: 'ten'"),
        (["train", "recipe.py", "--clip-norm", "None"], "parsing --clip-norm: could not convert string to float"),
        (["evaluate", "runs/a", "--precision", "bf17"], "one of ('fp32', 'tf32', 'bf16', 'fp16')."),
        (["verify", "recipe.py", "--unsupported", "no"], "one of ('error', 'gather')."),
        (["launch", "recipe.py", "--on", "slurm", "--nodes", "x"], "--nodes: invalid literal for int()"),
    ],
)
def test_a_wrong_value_is_told_what_may_be_given(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(words)
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == 2 and said in told and "None'," not in told and "NoneType" not in told


@pytest.mark.parametrize("words", [["verify", "gone.py"], ["train", "gone.py"], ["jobs", "--every", "0"]])
def test_what_is_asked_for_json_says_in_json_why_it_ends(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words, "--json"]) == 2
    said = capsys.readouterr()
    assert said.err == f"error: {json.loads(said.out)['error']}\n"


@pytest.mark.parametrize("words", [["calibrate", "--processes", "2"], ["verify", __file__], ["train", __file__]])
def test_why_ranks_failed_is_said_in_json_too(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(ranks: int, *_: object, on_failure: Callable[[str], None], **__: object) -> int:
        on_failure("rank 1 died")
        return 1

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fullframe.processes.launch.launch", launch)
    assert run([*words, *["--width", "2"] * (words[0] != "calibrate"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"error": "rank 1 died"}


@pytest.mark.parametrize("place", ["a folder", "a file/rates.json"])
def test_nothing_is_measured_where_it_cannot_be_written(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a file").touch()
    monkeypatch.setattr("fullframe.cli.calibrate.Calibrate._measure", lambda command, ranks: pytest.fail("measured"))
    assert run(["calibrate", "--out", str(tmp_path / place)]) == 2
    assert "name another file with --out" in (said := capsys.readouterr().err) or "name a file with --out" in said


def test_wrong_words_are_said_in_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["jobs", "--match", "a", "--match", "b", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"].startswith("--match is given twice")
    with pytest.raises(SystemExit):
        run(["jobs", "--nothing", "--json"])
    said = capsys.readouterr()
    assert "--nothing" in said.err and "fullframe jobs --help" in json.loads(said.out)["error"]


def test_without_a_word_the_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("usage: fullframe COMMAND ...") and "  verify " in said.err


@pytest.mark.parametrize("command", ["train", "verify", "evaluate", "launch"])
def test_help_names_no_default_that_is_none(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([command, "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "(default: 1e-09)" in said if command == "verify" else "--set NAME=VALUE" in said
    assert "None" not in said and ("{error,gather}" in said if command == "verify" else "{fp32," in said)
    assert "several machines options" in said or command not in ("train", "launch")
    assert not any(f"(default: {nothing})" in said for nothing in ("None", "False", ""))
