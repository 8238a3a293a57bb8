"""A run in a container on this machine, by the image that the repository's Dockerfile makes."""

from fullframe.errors import LaunchError
from fullframe.launching.job import Job

_PROJECT, _RUNS = "/workspace", "/runs"


def command_of(job: Job, image: str, user: int, group: int, shared_memory: str) -> list[str]:
    """The words of `docker run`: the project is mounted read-only, the run's directory is the only thing written.

    Raises LaunchError for what one machine cannot do, and for folders that docker's option cannot name.
    """
    if job.is_sweep or job.nodes > 1:
        raise LaunchError("--on docker starts one run on this machine; leave out --sweep and --nodes")
    for folder in (job.directory, job.folder):
        if any(character in str(folder) for character in ',"\n'):
            raise LaunchError(f"docker cannot mount {str(folder)!r}, which has a comma, a quote or a line break")
    gpus = [] if job.gpus_per_node is None else ["--gpus", str(job.gpus_per_node)]
    cpus = [] if job.cpus_per_node is None else ["--cpus", str(job.cpus_per_node)]
    mounts = [
        f"type=bind,source={job.directory},target={_PROJECT},readonly",
        f"type=bind,source={job.folder},target={_RUNS}",
    ]
    words = ["docker", "run", "--rm", "--init", *gpus, *cpus, "--user", f"{user}:{group}", "--shm-size", shared_memory]
    words += [word for mount in mounts for word in ("--mount", mount)]
    # A container that is stopped has time to write its checkpoint.
    words += ["--workdir", _PROJECT, "--stop-timeout", "120", image]
    return [*words, "train", *job.options, "--run-dir", _RUNS, "--auto-resume"]
