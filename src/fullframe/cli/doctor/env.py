"""`fullframe doctor env`: whether this machine is fit for ranks."""

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from tyro.conf import arg

from fullframe.cli.doctor.report import exit_code, print_findings, summary
from fullframe.cli.words import require_counts

if TYPE_CHECKING:
    from fullframe.doctor.environment.examine import Examined
    from fullframe.doctor.finding import Finding

_LINK_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class DoctorEnv:
    """Look at the machine: versions, driver, GPUs, limits, launchers' variables, what earlier runs left, links.

    Reads only. Without a GPU it says what it could not check. Exit code: 0 nothing found, 1 something found.
    """

    processes: Annotated[int | None, arg(metavar="N")] = None
    """Ranks between which bandwidth is measured: all GPUs, or 2, unless given; 1 leaves it out."""
    json: bool = False
    """Print one JSON list of findings on stdout; everything else goes to stderr."""

    def run(self) -> int:
        """Look, measure, print."""
        return exit_code(self.findings(), self.json)

    def findings(self) -> "list[Finding]":
        """What was found, the worst first; printed unless it is to be JSON."""
        require_counts(self, ["processes"])
        examined, rates, problem = self._examined()
        from fullframe.doctor.environment.links import judged_links, said_of_links
        from fullframe.doctor.judgement.judge import by_severity
        from fullframe.ranks import device

        findings = by_severity([*examined.findings, *judged_links(rates)])
        if self.json:
            return findings
        console = Console(highlight=False, markup=False)
        for line in (*examined.seen, *said_of_links(rates, "NCCL" if device.count() > 1 else "gloo")):
            console.print(line, soft_wrap=True)
        for line in (*examined.unchecked, *([f"links: {problem}"] if problem else [])):
            console.print(f"not checked: {line}", soft_wrap=True)
        print_findings(console, findings)
        console.print(summary(findings, "this machine"), soft_wrap=True)
        return findings

    def _examined(self) -> "tuple[Examined, Mapping[str, float], str]":
        """The machine, and bytes a second by pair of ranks, which are started first; or why there are none."""
        ranks = self.processes or max(len(list(Path("/dev").glob("nvidia[0-9]*"))), 2)
        if ranks == 1:
            from fullframe.doctor.environment.examine import examine

            return examine(), {}, "one rank has no link"
        from fullframe.processes.rank_processes import Ranks

        with tempfile.TemporaryDirectory(prefix="fullframe-links-") as folder:
            file, deadline = Path(folder) / "rates.json", time.monotonic() + _LINK_SECONDS
            arguments = ["-m", "fullframe.cli.doctor.links", str(file)]
            with Ranks(ranks, arguments, Path(folder) / "output", {"TORCHELASTIC_RUN_ID": "links"}) as processes:
                from fullframe.doctor.environment.examine import examine

                examined = examine()
                while processes.running() and time.monotonic() < deadline and not processes.deaths():
                    time.sleep(0.05)
                deaths = processes.deaths()
            if file.exists():
                return examined, json.loads(file.read_text()), ""
        return examined, {}, str(deaths[0]) if deaths else f"the ranks did not meet within {_LINK_SECONDS:g} s"
