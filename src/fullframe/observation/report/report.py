"""A run's page for a notebook or a file: `fullframe.report`."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fullframe.arguments import checked
from fullframe.errors import RunError
from fullframe.observation.report.page import names_of, page, write_page
from fullframe.observation.run_files import read_run
from fullframe.observation.summary import Finding, summarize


@dataclass(frozen=True)
class Report:
    """The page of one run, or of several side by side; a notebook shows it as it stands.

    html:     the page, which needs nothing from the network
    findings: what needs a look, by the name of the run, the worst first; each has level, text and remedy
    """

    html: str
    findings: Mapping[str, tuple[Finding, ...]]

    def save(self, path: str | Path) -> Path:
        """Write the page to the file `path`; raises RunError where it cannot be written."""
        try:
            return write_page(self.html, Path(path))
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}; name another file") from error

    def __repr__(self) -> str:
        return f"Report({', '.join(f'{name}: {len(found)} findings' for name, found in self.findings.items())})"

    def _repr_html_(self) -> str:
        # A frame keeps the page's style and the notebook's apart; the page may draw, and reach nothing else.
        return (
            '<iframe sandbox="allow-scripts" title="fullframe report" style="width:100%;height:640px;border:0" '
            f'srcdoc="{escape(self.html)}"></iframe>'
        )


@checked
def report(*run_dirs: str | Path) -> Report:
    """The report of a run directory, or of several `run_dirs` side by side, as `fullframe report` writes it.

        ff.report("runs/first")  # as the last line of a notebook's cell
        ff.report("runs/first", "runs/second").save("comparison.html")

    A run that still goes on is shown as far as it is. Nothing is written and no torch is needed. Raises RunError for a
    folder that holds no run, and without one.
    """
    if not run_dirs:
        raise RunError('name a run directory: ff.report("runs/first")')
    runs = [read_run(Path(folder)) for folder in run_dirs]
    findings = {name: summarize(run).findings for name, run in zip(names_of(runs), runs, strict=True)}
    return Report(page(runs), findings)
