"""`python -m tests.docs.notebook [--write]`: run the notebook of the docs, and write what its cells give.

A cell is run as Jupyter runs it: its last expression is its result, shown as HTML where it knows how. No kernel is
needed for that, and none of the twenty packages that one brings.
"""

import ast
import contextlib
import io
import json
import sys
import tempfile
from typing import Any

from tests.docs.page import ROOT

NOTEBOOK = ROOT / "docs" / "start" / "notebook.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of a cell that is run with the names that those before it made."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        result = None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if result is not None:
        data = {"text/plain": [repr(result)]}
        if hasattr(result, "_repr_html_"):
            data = {"text/html": result._repr_html_().splitlines(True), "text/plain": [type(result).__name__]}
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return outputs


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of all code cells, in order."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [run_cell("".join(cell["source"]), names) for cell in code_cells(notebook)]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that are run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(outputs: list[dict[str, Any]]) -> list[str]:
    """What kind of outputs these are; figures differ from run to run."""
    return [next(iter(output.get("data", {"text": ""}))) for output in outputs]


def main() -> int:
    """Run, and compare with what is stored, or store it."""
    notebook = json.loads(NOTEBOOK.read_text())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = run(notebook)
    if "--write" in sys.argv:
        for number, (cell, outputs) in enumerate(zip(code_cells(notebook), found, strict=True), start=1):
            cell["outputs"], cell["execution_count"] = outputs, number
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    for cell, outputs in zip(code_cells(notebook), found, strict=True):
        if kinds(cell["outputs"]) != kinds(outputs):
            print(f"{''.join(cell['source'])}\nstored {kinds(cell['outputs'])}, now {kinds(outputs)}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
