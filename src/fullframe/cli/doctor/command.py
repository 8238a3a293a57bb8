"""`fullframe doctor`: its checks, each a command of its own; alone, all that apply."""

from dataclasses import dataclass, field
from typing import Annotated

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, subcommand

from fullframe.cli.doctor.all import DoctorAll
from fullframe.cli.doctor.env import DoctorEnv
from fullframe.cli.doctor.lint import Lint
from fullframe.cli.doctor.run import DoctorRun

Checks = (
    Annotated[DoctorAll, subcommand("all")]
    | Annotated[Lint, subcommand("lint")]
    | Annotated[DoctorRun, subcommand("run")]
    | Annotated[DoctorEnv, subcommand("env")]
)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Find the mistakes that waste memory or break gradients; without a command, all checks that apply here."""

    check: Annotated[Checks, OmitArgPrefixes, OmitSubcommandPrefixes] = field(default_factory=DoctorAll)

    def run(self) -> int:
        """Run the check that was chosen."""
        return self.check.run()
