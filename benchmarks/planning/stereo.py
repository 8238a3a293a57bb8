"""The stereo example without its evaluation and pictures, which are not part of a step."""

import dataclasses
import sys
from pathlib import Path

import fullframe as ff
from fullframe.recipe import load_recipe

EXAMPLE = Path(__file__).parents[2] / "examples" / "stereo_depth" / "recipe.py"


def recipe() -> ff.Recipe:
    """What `fullframe train` asks for."""
    sys.path.insert(0, str(EXAMPLE.parent))
    return dataclasses.replace(load_recipe(EXAMPLE), evaluate=None, evaluation_data=None, finish=None)
