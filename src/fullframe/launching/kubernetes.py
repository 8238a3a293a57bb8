"""Jobs on Kubernetes, as manifests for kubectl: Kubeflow Trainer's TrainJob, or a plain indexed Job with its Service.

Nothing is run by a shell: words are lists, in which Kubernetes itself would expand `$(NAME)`, which is escaped.
Written as JSON, which kubectl takes as it takes YAML.
"""

import hashlib
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fullframe.errors import LaunchError
from fullframe.launching.job import Job, RunOfJob
from fullframe.processes.exit_reasons import STOPPED

MANIFEST = "manifest.json"
_PORT = 29400
_RUNS = "/runs"  # where the volume is mounted
_JOBS_ERRORS = (1, 2)  # an exception of the recipe, wrong use: another attempt would meet them again
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE]|m)?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NAME_LENGTH = 48  # of 63: a TrainJob's pods get -node-0-0-xxxxx


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """What Kubernetes is told beside the machines.

    kind:   "job", or "trainjob" for Kubeflow Trainer v2 with its runtime `runtime`
    volume: a PersistentVolumeClaim that all machines may write, for checkpoints
    """

    image: str
    volume: str
    kind: Literal["job", "trainjob"] = "job"
    runtime: str = "torch-distributed"
    namespace: str | None = None
    queue: str | None = None
    shared_memory: str = "16Gi"
    memory: str | None = None
    grace_seconds: int = 120
    retries: int = 100


def manifest_of(job: Job, options: KubernetesOptions) -> str:
    """One JSON document with the objects of all runs; raises LaunchError for an option that Kubernetes would refuse."""
    for name in ("shared_memory", "memory"):
        value = getattr(options, name)
        if value is not None and not _QUANTITY.fullmatch(value):
            raise LaunchError(f"--{name.replace('_', '-')} {value!r} is no quantity of Kubernetes; write it as in 16Gi")
    for name in ("volume", "namespace", "queue", "runtime"):
        value = getattr(options, name)
        if value is not None and not _NAME.fullmatch(value):
            raise LaunchError(f"--{name} {value!r} is no name of Kubernetes: lower-case letters, digits and '-'")
    objects: list[dict[str, Any]] = []
    for number, run in enumerate(job.runs):
        name = dns_name(job.name, f"-{number}" if job.is_sweep else "")
        make = _train_job if options.kind == "trainjob" else _plain_job
        objects += make(name, job, run, options)
    found = objects[0] if len(objects) == 1 else {"apiVersion": "v1", "kind": "List", "items": objects}
    return json.dumps(found, indent=2) + "\n"


def apply(manifest: Path) -> str:
    """Hand the manifest to kubectl; the names of the objects it made. Raises LaunchError where it could not.

    And where a job is there already, also one that has ended: kubectl would change nothing, and nothing would start.
    """
    found = _kubectl(manifest, "get", "--ignore-not-found").split()
    there = [name for name in found if not name.startswith("service/")]
    if there:
        raise LaunchError(
            f"{', '.join(there)} is there already, running or ended, so that nothing would start; let it end and "
            f"remove it by kubectl delete --filename {manifest}, or give another --name"
        )
    return " ".join(_kubectl(manifest, "apply").split())


def _kubectl(manifest: Path, *words: str) -> str:
    """What it says, of names alone."""
    command = ["kubectl", *words, "--filename", str(manifest), "--output", "name"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise LaunchError(f"there is no kubectl here; elsewhere: kubectl apply --filename {manifest}") from None
    if done.returncode:
        raise LaunchError(f"kubectl: {done.stderr.strip()}; the manifest is {manifest}")
    return done.stdout


def dns_name(text: str, end: str) -> str:
    """`text` and `end` as the name of an object, also of a Service: a DNS label that begins with a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() else f"job-{name}"
    return name[: _NAME_LENGTH - len(end)].strip("-") + end


def _plain_job(name: str, job: Job, run: RunOfJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    """The service gives machine 0 a name that the others find."""
    selector = {"fullframe/job": name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(name, options),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector},
    }
    rendezvous = ("--rendezvous", f"{name}-0.{name}:{_PORT}") if job.nodes > 1 else ()
    container = {
        "name": "train",
        "image": options.image,
        "command": ["fullframe"],
        "args": _arguments(job, run, *rendezvous),
        "volumeMounts": _mounts(),
        "resources": _resources(job, options),
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_seconds,
        "containers": [container],
        "volumes": _volumes(options),
    }
    failures = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(_JOBS_ERRORS)}},
    ]
    indexed = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(name, options, queued=True),
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": options.retries,
            "podFailurePolicy": {"rules": failures},
            "template": {"metadata": {"labels": selector}, "spec": pod},
        },
    }
    return [service, indexed]


def _train_job(name: str, job: Job, run: RunOfJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Its runtime tells each machine its number and where the first one is."""
    trainer: dict[str, Any] = {
        "image": options.image,
        "command": ["fullframe"],
        "args": _arguments(job, run),
        "numNodes": job.nodes,
        "resourcesPerNode": _resources(job, options),
    }
    mounts = {"name": "node", "volumeMounts": _mounts()}
    patch: dict[str, Any] = {"volumes": _volumes(options), "containers": [mounts]}
    for _ in ("the pod's template", "the job's"):
        patch = {"template": {"spec": patch}}
    jobs = {"replicatedJobs": [{"name": "node", **patch}]}
    patches = [{"manager": "fullframe", "trainingRuntimeSpec": {"template": {"spec": jobs}}}]
    spec = {"runtimeRef": {"name": options.runtime}, "trainer": trainer, "runtimePatches": patches}
    metadata = _metadata(name, options, queued=True)
    return [{"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}]


def _metadata(name: str, options: KubernetesOptions, queued: bool = False) -> dict[str, Any]:
    namespace = {"namespace": options.namespace} if options.namespace else {}
    queue = {"labels": {"kueue.x-k8s.io/queue-name": options.queue}} if queued and options.queue else {}
    return {"name": name, **namespace, **queue}


def _arguments(job: Job, run: RunOfJob, *more: str) -> list[str]:
    where = f"{_RUNS}/{_directory(job.folder)}" + (f"/{run.place}" if job.is_sweep else "")
    words = ["train", *job.options, *(("--nodes", str(job.nodes)) if job.nodes > 1 else ()), *more]
    words += ["--run-dir", where, "--auto-resume", "--stopped-code", str(STOPPED)]
    words += ["--set", *run.values] if run.values else []
    return [word.replace("$", "$$") for word in words]


def _directory(folder: Path) -> str:
    """On the volume: other folders of that name, of this user or another, are other runs."""
    return f"{folder.name}-{hashlib.sha256(str(folder).encode(errors='surrogateescape')).hexdigest()[:8]}"


def _resources(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    found = {"nvidia.com/gpu": job.gpus_per_node, "cpu": job.cpus_per_node, "memory": options.memory}
    limits = {name: str(value) for name, value in found.items() if value is not None}
    return {"limits": limits, "requests": limits}


def _mounts() -> list[dict[str, str]]:
    return [{"name": "runs", "mountPath": _RUNS}, {"name": "shared-memory", "mountPath": "/dev/shm"}]


def _volumes(options: KubernetesOptions) -> list[dict[str, Any]]:
    return [
        {"name": "runs", "persistentVolumeClaim": {"claimName": options.volume}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}},
    ]
