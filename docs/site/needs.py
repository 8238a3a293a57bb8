"""Prints what the site is built with: the extra `docs` of pyproject.toml, without fullframe and so without torch."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
print(*project["optional-dependencies"]["docs"], sep="\n")
