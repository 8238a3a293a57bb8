"""Gathers the pages of the site: docs, the READMEs of benchmarks and examples, the change log, the notebook.

`python docs/site/gather.py` writes build/docs, from which zensical builds the site. Links between what is gathered are
rewritten; a link to any other file of the repository becomes the file's name, for the site holds no source text.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "docs"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
KINDS = (".md", ".png", ".svg", ".css")


def pages() -> dict[Path, Path]:
    """Files of the repository -> where they stand on the site, both relative."""
    found = {
        path.relative_to(ROOT): path.relative_to(ROOT / "docs")
        for path in sorted((ROOT / "docs").rglob("*"))
        if path.suffix in KINDS
    }
    found[Path("docs/start/notebook.ipynb")] = Path("start/notebook.md")
    found[Path("examples/README.md")] = Path("examples/index.md")
    for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"):
        found[Path(f"{name}.md")] = Path(f"{name.lower()}.md")
    for folder, target in (("benchmarks", "measured"), ("examples", "examples")):
        for readme in sorted((ROOT / folder).glob("*/README.md")):
            found[readme.relative_to(ROOT)] = Path(target) / f"{readme.parent.name}.md"
            for picture in sorted(readme.parent.glob("*.png")) + sorted(readme.parent.glob("*.svg")):
                found[picture.relative_to(ROOT)] = Path(target) / picture.name
    return found


def linked(text: str, source: Path, found: dict[Path, Path]) -> str:
    """`text` of the page `source` with its links as the site has them."""

    def rewritten(match: re.Match[str]) -> str:
        picture, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        meant = meant_by(target, source)
        if meant is None:
            return match[0]
        if meant in found:
            return f"{picture}[{words}]({os.path.relpath(found[meant], found[source].parent)}{anchor})"
        page = {"README.md": "index.md", "benchmarks": "measured/index.md"}
        if meant.as_posix() in page:
            return f"[{words}]({os.path.relpath(page[meant.as_posix()], found[source].parent)})"
        return words

    return "".join(LINK.sub(rewritten, part) if prose else part for prose, part in parts_of(text))


def missing(text: str, source: Path, found: dict[Path, Path]) -> list[str]:
    """The links of the page `source` that lead nowhere: no such file, or no such heading in it."""
    bad = []
    for link in (m for prose, part in parts_of(text) if prose for m in LINK.finditer(part)):
        meant, anchor = (source if not link[3] else meant_by(link[3], source)), link[4]
        if meant is None:
            continue
        is_page = meant.suffix == ".md" and meant in found and found[meant] != Path("reference/api.md")
        if not (ROOT / meant).exists() or (
            anchor and is_page and anchor[1:] not in headings((ROOT / meant).read_text())
        ):
            bad.append(f"{source}: {link[3]}{anchor or ''}")
    return bad


def meant_by(target: str, source: Path) -> Path | None:
    """The file that a link of the page `source` names, from the root of the repository; None: no file of it."""
    if not target or "://" in target or target.startswith(("/", "mailto:")):
        return None
    meant = Path(os.path.normpath(source.parent / target))
    return meant / "README.md" if (ROOT / meant / "README.md").is_file() and meant != Path(".") else meant


def parts_of(text: str) -> Iterator[tuple[bool, str]]:
    """A page in pieces, and of each whether it is prose; the others are code, which has no links."""
    start = 0
    for code in FENCE.finditer(text):
        yield True, text[start : code.start()]
        yield False, code[0]
        start = code.end()
    yield True, text[start:]


def headings(text: str) -> set[str]:
    """The anchors of a page's headings."""
    prose = "".join(part for is_prose, part in parts_of(text) if is_prose)
    lines = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", line).strip().lower()) for line in lines}


def index_of_measurements(found: dict[Path, Path]) -> str:
    """A page that lists the benchmarks by their titles."""
    lines = ["# Measured", "", "A page a question: how to run it, the result, the machine, and what did not work.", ""]
    for source, target in found.items():
        if source.parts[0] == "benchmarks" and source.name == "README.md":
            title = (ROOT / source).read_text().partition("\n")[0].lstrip("# ")
            lines.append(f"- [{title}]({target.name})")
    return "\n".join(lines) + "\n"


def of_notebook(path: Path) -> str:
    """A notebook that was executed, as a page: its cells, and their outputs as they are stored."""
    return "\n\n".join(part for cell in json.loads(path.read_text())["cells"] for part in _of_cell(cell)) + "\n"


def _of_cell(cell: dict) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "text/html" in data:
            yield '<div class="output">' + "".join(data["text/html"]) + "</div>"
        elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
            yield f"```text\n{text}\n```"


def gather() -> None:
    """Write build/docs anew."""
    shutil.rmtree(OUT, ignore_errors=True)
    found = pages()
    for source, target in found.items():
        (OUT / target).parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".ipynb":
            (OUT / target).write_text(linked(of_notebook(ROOT / source), source, found))
        elif source.suffix == ".md":
            (OUT / target).write_text(linked((ROOT / source).read_text(), source, found))
        else:
            shutil.copyfile(ROOT / source, OUT / target)
    (OUT / "measured" / "index.md").write_text(index_of_measurements(found))


if __name__ == "__main__":
    gather()
