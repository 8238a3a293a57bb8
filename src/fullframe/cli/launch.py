"""`fullframe launch`: describe a job, submit it, and remember where its runs are."""

import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, arg

from fullframe.cli.train import Train, name_of, new_run_dir
from fullframe.cli.words import changed, option, require_counts, words
from fullframe.errors import LaunchError
from fullframe.launching.docker import command_of
from fullframe.launching.job import Job, make_folders, read_launch, runs_of, slug, write_launch
from fullframe.launching.kubernetes import MANIFEST, KubernetesOptions, apply, manifest_of
from fullframe.launching.slurm import ENDED, SCRIPT, SlurmOptions, ids_of, queue, script_of, submit
from fullframe.recipe import require_file, require_names, values_of

_NO_COMMAND = 127  # as a shell says it
_OURS = ("node_rank", "rendezvous")  # what the allocation says
_ONLY_ON: dict[str, tuple[str, ...]] = {  # options that say nothing on others
    **dict.fromkeys(("time", "partition", "account", "qos", "after", "parallel", "sbatch"), ("slurm",)),
    **dict.fromkeys(("volume", "kind", "runtime", "namespace", "queue", "memory"), ("kubernetes",)),
    **dict.fromkeys(("signal_seconds", "requeues"), ("slurm", "kubernetes")),
    **dict.fromkeys(("image", "shared_memory"), ("kubernetes", "docker")),
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Start a training on a cluster, or a sweep of hundreds: every option of `fullframe train` may follow.

    A run that is preempted or reaches its time limit writes a checkpoint, is queued again and goes on. `fullframe jobs`
    shows how all runs stand.
    """

    train: Annotated[Train, OmitArgPrefixes]
    on: Literal["slurm", "kubernetes", "docker"]
    """Where to start it."""
    dry_run: bool = False
    """Print what would be submitted, and write nothing; with --json in an object, under the name of its file."""
    name: str | None = None
    """The job's name: the recipe's unless given."""
    sweep: Annotated[tuple[str, ...], arg(metavar="NAME=A,B")] = ()
    """A run for each combination of these values, as in lr=1e-3,3e-4 seed=1,2: the recipe is called with them."""
    gpus_per_node: Annotated[int | None, arg(metavar="N")] = None
    """GPUs of each machine, with a rank for each."""
    cpus_per_node: Annotated[int | None, arg(metavar="N")] = None
    """Processors of each machine, for all its ranks and loader workers."""
    plan_for: Annotated[str | None, arg(metavar="NxNAME")] = None
    """Ask `fullframe plan` once, for these devices, and train with the first plan: 2x4xA100-80GB."""
    time: Annotated[str | None, arg(metavar="LIMIT")] = None
    """Slurm's time limit, as in 24:00:00; a run that reaches it goes on in another job."""
    partition: str | None = None
    """Slurm's partition."""
    account: str | None = None
    """Slurm's account."""
    qos: str | None = None
    """Slurm's quality of service."""
    after: Annotated[tuple[str, ...], arg(metavar="JOB")] = ()
    """Start when these have ended well: ids of jobs, or run directories that were launched."""
    parallel: Annotated[int | None, arg(metavar="N")] = None
    """How many runs of a sweep may run at a time."""
    signal_seconds: Annotated[int, arg(metavar="S")] = 120
    """How long before the time limit a run is asked to write its checkpoint."""
    requeues: Annotated[int, arg(metavar="N")] = 100
    """How often a run may be queued again."""
    sbatch: Annotated[tuple[str, ...], arg(metavar="OPTION")] = ()
    """More options for sbatch, as in mem=64G exclusive."""

    image: str = "fullframe"
    """Kubernetes, docker: the image, with the recipe in it or, for docker, in this directory."""
    volume: Annotated[str | None, arg(metavar="CLAIM")] = None
    """Kubernetes: the PersistentVolumeClaim for run directories, which all machines can write."""
    kind: Literal["job", "trainjob"] = "job"
    """Kubernetes: a plain indexed Job with its Service, or Kubeflow Trainer's TrainJob."""
    runtime: str = "torch-distributed"
    """Kubernetes: the runtime of a TrainJob."""
    namespace: str | None = None
    """Kubernetes: the namespace."""
    queue: str | None = None
    """Kubernetes: the queue of Kueue."""
    memory: str | None = None
    """Kubernetes: host memory of each machine, as in 64Gi."""
    shared_memory: str = "16Gi"
    """Kubernetes, docker: the size of /dev/shm, through which loader workers hand on their samples."""

    def run(self) -> int:
        """Write, submit and say where it is; the exit code."""
        self._check()
        job = self._job()
        if self.on == "docker":
            return self._docker(job)
        text = self._described(job)
        self._tell_of_cores()
        if self.dry_run:
            self._print_dry(job, text, SCRIPT if self.on == "slurm" else MANIFEST)
            return 0
        self._require_free(job)
        make_folders(job)
        if self.plan_for is not None:
            self._plan(job)
        (job.folder / (SCRIPT if self.on == "slurm" else MANIFEST)).write_text(text)
        self._remember(job, None)
        identity = submit(job) if self.on == "slurm" else apply(job.folder / MANIFEST)
        self._remember(job, identity)
        self._say(job, identity)
        return 0

    def _described(self, job: Job) -> str:
        """The batch script, or the manifest."""
        if self.on == "slurm":
            return script_of(job, self._slurm())
        if self.volume is None:
            raise LaunchError("--on kubernetes needs --volume, the claim of a volume for checkpoints")
        options = KubernetesOptions(
            image=self.image,
            volume=self.volume,
            kind=self.kind,
            runtime=self.runtime,
            namespace=self.namespace,
            queue=self.queue,
            shared_memory=self.shared_memory,
            memory=self.memory,
            grace_seconds=self.signal_seconds,
            retries=self.requeues,
        )
        return manifest_of(job, options)

    def _tell_of_cores(self) -> None:
        """Slurm's own default is one core a task, and all ranks of a machine are one task."""
        asked = any(word.startswith(("cpus-per-", "exclusive")) for word in self.sbatch)
        if self.on == "slurm" and self.cpus_per_node is None and not asked:
            print(
                "note: --cpus-per-node is not given, and Slurm then gives all ranks and loader workers of a machine "
                "one core, where the cluster has no other default (DefCpuPerGPU)",
                file=sys.stderr,
            )

    def _docker(self, job: Job) -> int:
        """Run the container and wait for it; its exit code."""
        command = command_of(job, self.image, os.getuid(), os.getgid(), self.shared_memory.replace("i", ""))
        if self.dry_run:
            self._print_dry(job, f"{shlex.join(command)}\n", "command")
            return 0
        make_folders(job)
        here = {"pid": os.getpid(), "host": socket.gethostname(), "changed": datetime.now().timestamp()}
        self._remember(job, None, launcher={"state": "running", **here})
        try:
            code = subprocess.run(command).returncode
            self._remember(job, None, exit_code=code)
            return code
        except FileNotFoundError:
            self._remember(job, None, exit_code=_NO_COMMAND)
            raise LaunchError("there is no docker here; install it, or train without by fullframe train") from None

    def _print_dry(self, job: Job, text: str, name: str) -> None:
        """What would be submitted; as JSON under the name of its file."""
        if self.train.json:
            print(json.dumps({"job_id": None, **_places(job), name: text}))
        else:
            print(text, end="")

    def _remember(self, job: Job, identity: str | None, **more: Any) -> None:
        from fullframe.training.run_file import commit_of

        now = datetime.now().astimezone().isoformat(timespec="seconds")
        facts = {"on": self.on, "submitted": now, "commit": commit_of(job.directory), "job_id": identity, **more}
        write_launch(job, facts)

    def _check(self) -> None:
        train = self.train
        require_file(train.recipe)
        given = [name for name in _OURS if getattr(train.over, name) is not None]
        if given:
            options = ", ".join(map(option, given))
            raise LaunchError(f"leave out {options}: the machines are known when the job starts")
        require_counts(train.over, ["nodes"], LaunchError)
        require_counts(train, ["processes"], LaunchError)
        require_counts(self, ("gpus_per_node", "cpus_per_node", "parallel", "signal_seconds"), LaunchError)
        if self.plan_for is not None and self.on != "slurm":
            raise LaunchError(f"--plan-for is for Slurm; on {self.on} give a file of fullframe plan that is there")
        for name in changed(self):
            if self.on not in (places := _ONLY_ON.get(name, (self.on,))):
                raise LaunchError(f"{option(name)} is for --on {' and '.join(places)}, and says nothing on {self.on}")
        if self.kind == "job" and "runtime" in changed(self):
            raise LaunchError("--runtime is of --kind trainjob, and says nothing of a job")
        if self.plan_for is not None and train.plan is not None:
            raise LaunchError("--plan and --plan-for are both given; leave one out")
        on_a_node = train.processes or self.gpus_per_node
        if on_a_node and train.plan is None and self.plan_for is None:
            train.strategy_on(on_a_node * (train.over.nodes or 1))

    def _job(self) -> Job:
        train = self.train
        name = slug(self.name or name_of(train.recipe))
        folder = (train.run_dir or new_run_dir(name)).absolute()
        odd = self.on == "slurm" and next((character for character in "%\\\n\r" if character in str(folder)), None)
        if odd:
            raise LaunchError(f"Slurm reads {odd!r} in {str(folder)!r} in a way of its own; name another --run-dir")
        if set_twice := {word.partition("=")[0] for word in train.set} & {w.partition("=")[0] for w in self.sweep}:
            raise LaunchError(f"{', '.join(sorted(set_twice))} is given by --set and by --sweep; leave one out")
        runs = runs_of(self.sweep)
        require_names(train.recipe, values_of((*train.set, *runs[0].values)))
        if self.sweep:  # one --set says it all
            runs = tuple(replace(run, values=(*train.set, *run.values)) for run in runs)
        nodes = train.over.nodes or 1
        cut = replace(train, run_dir=None, resume=False, auto_resume=False, stopped_code=0, json=False)
        cut = replace(cut, over=replace(train.over, nodes=None), set=() if self.sweep else train.set)
        if self.gpus_per_node is not None and train.processes is None:
            cut = replace(cut, processes=self.gpus_per_node)
        if self.plan_for is not None:
            cut = replace(cut, plan=folder / "plan.json")
        if self.on != "slurm":
            cut = replace(cut, recipe=self._as_in_container(train.recipe))
        if self.on == "docker" and train.plan is not None:
            cut = replace(cut, plan=self._as_in_container(train.plan))
        return Job(
            name=name,
            folder=folder,
            directory=Path.cwd(),
            options=tuple(words(cut)),
            runs=runs,
            nodes=nodes,
            gpus_per_node=self.gpus_per_node,
            cpus_per_node=self.cpus_per_node,
            python=sys.executable,
        )

    def _as_in_container(self, path: Path) -> Path:
        """A file's path from the directory that a container has: mounted, or as it lies in the image."""
        here = Path.cwd().resolve()
        if not path.resolve().is_relative_to(here):
            raise LaunchError(
                f"{path} is not in {here}, and the container has no other files of this machine; start from a "
                "directory that holds it"
            )
        return path.resolve().relative_to(here)

    def _slurm(self) -> SlurmOptions:
        return SlurmOptions(
            time=self.time,
            partition=self.partition,
            account=self.account,
            qos=self.qos,
            after=ids_of(self.after),
            parallel=self.parallel,
            signal_seconds=self.signal_seconds,
            requeues=self.requeues,
            extra=self.sbatch,
        )

    def _require_free(self, job: Job) -> None:
        """Raises LaunchError where a job is on its way that writes into the same folder."""
        known = read_launch(job.folder)
        before = known.get("job_id") if known.get("on") == "slurm" else None
        if before is None:
            return
        there = [found.job for found in queue() if before in (found.job, found.array) and found.state not in ENDED]
        if there:
            raise LaunchError(f"job {before} of {job.folder} is still queued or running; end it by scancel {before}")

    def _plan(self, job: Job) -> None:
        """Ask the planner once for all runs, with the values of the first."""
        train, file = self.train, job.folder / "plan.json"
        values = [*train.set, *(v for v in job.runs[0].values if v not in train.set)]
        command = [sys.executable, "-m", "fullframe.cli", "plan", str(train.recipe), "--gpus", str(self.plan_for)]
        command += ["--out", str(file)] + (["--set", *values] if values else [])
        command += [] if train.batch_size is None else ["--batch-size", str(train.batch_size)]
        code = subprocess.run(command, stdout=sys.stderr).returncode
        if code:
            raise LaunchError(f"fullframe plan found nothing to train with (exit code {code}); nothing was submitted")

    def _say(self, job: Job, identity: str) -> None:
        if self.train.json:
            print(json.dumps({"job_id": identity, **_places(job)}))
            return
        count = f"{len(job.runs)} runs" if job.is_sweep else "1 run"
        shown = os.path.relpath(job.folder)
        print(f"submitted job {identity}, {count} in {shown}; see fullframe jobs {shown}")


def _places(job: Job) -> dict[str, object]:
    return {"folder": str(job.folder), "runs": [str(job.folder / run.place) for run in job.runs]}
