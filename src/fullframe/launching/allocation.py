"""The Slurm allocation that this process was started in."""

import re
import subprocess
from collections.abc import Mapping

from fullframe.errors import LaunchError

_PORTS = range(20000, 32000)  # below those that Linux gives to outgoing connections
_SECONDS = 60.0


def rendezvous_of(environment: Mapping[str, str]) -> str:
    """Where the step's first machine is reached, as Slurm itself reaches it, with a port of this job's own.

    Raises LaunchError when Slurm does not say.
    """
    names = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    first = _scontrol("show", "hostnames", names).split()[0]
    found = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", first, "--oneliner"))
    host = first if found is None else found[1]
    return f"{host}:{_PORTS[int(environment['SLURM_JOB_ID']) % len(_PORTS)]}"


def _scontrol(*words: str) -> str:
    try:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"scontrol {' '.join(words)} failed: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"scontrol {' '.join(words)} gave no answer ({error}); give --rendezvous HOST:PORT"
        ) from error
    return done.stdout
