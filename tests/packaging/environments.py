"""Virtual environments that a test makes and throws away; versions are those of constraints.txt."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SECONDS = 600
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RANK", "WORLD_SIZE", "LOCAL_RANK")


class Environment:
    """One virtual environment; each call fails with what the command printed."""

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def made(cls, folder: Path, python: str = sys.executable) -> "Environment":
        """A new one, empty but for pip."""
        _output([python, "-m", "venv", folder], cwd=folder)
        return cls(folder)

    def pip(self, *words: object) -> str:
        """Run pip; whatever it installs, or builds with, has the version that constraints.txt says."""
        return self.python("-m", "pip", *words, cwd=self.folder)

    def python(self, *words: object, cwd: Path) -> str:
        """What its Python prints."""
        return _output([self.folder / "bin/python", *words], cwd)

    def fullframe(self, *words: object, cwd: Path) -> str:
        """What its `fullframe` prints on stdout."""
        return _output([self.folder / "bin/fullframe", *words], cwd)

    def refused(self, *words: object, cwd: Path) -> str:
        """What its `fullframe` prints on stderr where it refuses to do something."""
        done = _run([self.folder / "bin/fullframe", *words], cwd)
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stderr


def _run(command: list[object], cwd: Path) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    constraints = str(ROOT / "constraints.txt")
    kept |= {"PIP_CONSTRAINT": constraints, "PIP_BUILD_CONSTRAINT": constraints, "OMP_NUM_THREADS": "1"}
    words = list(map(str, command))
    return subprocess.run(words, cwd=cwd, env=kept, capture_output=True, text=True, timeout=_SECONDS)


def _output(command: list[object], cwd: Path) -> str:
    done = _run(command, cwd)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
