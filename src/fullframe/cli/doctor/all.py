"""`fullframe doctor` alone: every check that applies here, and what to do first."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fullframe.cli.doctor.env import DoctorEnv
from fullframe.cli.doctor.report import exit_code, print_findings, summary
from fullframe.cli.doctor.run import DoctorRun, is_recipe
from fullframe.wording import plural

if TYPE_CHECKING:
    from fullframe.doctor.finding import Finding

_RECIPE = Path("recipe.py")
_SENTENCES = 3


@dataclass(frozen=True, kw_only=True)
class DoctorAll:
    """Every check that applies to this folder and this machine: env, lint of its *.py files, run of ./recipe.py.

    Ends with the three sentences that are worth most. Exit code: 0 nothing found, 1 something found.
    """

    json: bool = False
    """Print one JSON list of findings on stdout; everything else goes to stderr."""

    def run(self) -> int:
        """Look at the machine, the source text and the recipe."""
        from fullframe.doctor.judgement.judge import by_severity

        console = Console(highlight=False, markup=False, stderr=self.json)
        console.print("env: this machine", style="bold")
        findings = DoctorEnv(json=self.json).findings()
        console.print("lint: the *.py files of this folder", style="bold")
        findings += _linted(console, self.json)
        if _RECIPE.is_file() and is_recipe(_RECIPE):
            console.print(f"run: {_RECIPE}", style="bold")
            findings += DoctorRun(program=_RECIPE, json=self.json).findings()
        else:
            console.print("run: there is no recipe.py here; fullframe doctor run PROGRAM takes any", style="bold")
        findings = by_severity(findings)
        if not self.json:
            for sentence in most_useful(findings):
                console.print(sentence, soft_wrap=True)
        return exit_code(findings, self.json)


def most_useful(findings: "Sequence[Finding]") -> list[str]:
    """At most three sentences, of different kinds, about what is first in `findings`."""
    if not findings:
        return ["Nothing was found; fullframe verify shows whether split ranks compute what one process does."]
    firsts = list({finding.code: finding for finding in reversed(findings)}.values())[::-1]
    return [f"{number}. {_sentence(finding)}" for number, finding in enumerate(firsts[:_SENTENCES], start=1)]


def _sentence(finding: "Finding") -> str:
    where = f"{finding.path}:{finding.line}: " if finding.path else ""
    remedy = (finding.fix or finding.title).removesuffix(".")
    return f"{where}{finding.message} ({finding.code}): {remedy}."


def _linted(console: Console, as_json: bool) -> "list[Finding]":
    from fullframe.doctor.lint.configuration import configured
    from fullframe.doctor.lint.files import check_files

    configuration = configured([Path(".")])
    files = list(configuration.files([Path(".")]))
    findings = check_files(files, configuration.rules())
    if not as_json:
        print_findings(console, findings)
        console.print(summary(findings, plural(len(files), "file")), soft_wrap=True)
    return findings
