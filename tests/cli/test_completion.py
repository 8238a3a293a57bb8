"""The completion scripts, asked by the shells themselves."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullframe.cli.application import COMMANDS, run
from fullframe.cli.completion import SHELLS, script


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "fullframe.bash"
    path.write_text(script("bash", COMMANDS))
    return path


def completed(bash_script: Path, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    asked = f"""
        source {bash_script}
        COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
        COMP_CWORD={len(words) - 1}
        spec=$(complete -p fullframe)
        function=${{spec##*-F }}
        ${{function%% *}} fullframe
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", asked], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if line]


def test_commands_and_options_are_offered(bash_script: Path, tmp_path: Path) -> None:
    assert set(COMMANDS) <= set(completed(bash_script, tmp_path, "fullframe", ""))
    assert completed(bash_script, tmp_path, "fullframe", "ver") == ["verify"]
    assert "--width" in completed(bash_script, tmp_path, "fullframe", "train", "--wi")
    assert {"lint", "run", "env"} <= set(completed(bash_script, tmp_path, "fullframe", "doctor", ""))
    assert "bf16" in completed(bash_script, tmp_path, "fullframe", "train", "--precision", "b")


@pytest.mark.parametrize("typed", ["fullframe verify rec", "fullframe train recipe.py --run-dir rec"])
def test_files_are_offered_for_paths(typed: str, bash_script: Path, tmp_path: Path) -> None:
    """In a terminal: where the function offers nothing, bash offers files."""
    (tmp_path / "recipe_of_mine.py").touch()
    pid, terminal = pty.fork()
    if pid == 0:  # the terminal's side
        os.chdir(tmp_path)
        os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "-i"], {"PATH": "/usr/bin:/bin", "TERM": "dumb"})
    shown, end = b"", time.monotonic() + 60
    try:
        os.write(terminal, f"source {bash_script}\necho re''ady\n".encode())
        while b"recipe_of_mine.py" not in shown and time.monotonic() < end:
            if select.select([terminal], [], [], 1.0)[0]:
                before, new = shown, os.read(terminal, 4096)
                shown += new
                if b"ready" in shown and b"ready" not in before:
                    os.write(terminal, f"{typed}\t".encode())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert b"recipe_of_mine.py" in shown, shown.decode()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_can_read_its_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--completion", shell]) == 0
    written = capsys.readouterr().out
    assert "fullframe" in written and "verify" in written
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    path = tmp_path / "script"
    path.write_text(written)
    done = subprocess.run([shell, "-n", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"]])
def test_another_shell_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--completion", *words]) == 2
    assert capsys.readouterr().err == "error: --completion takes one of bash, zsh, fish\n"
