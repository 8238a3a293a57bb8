"""Manifests for Kubernetes, held against the schemas of what they use; no cluster is there to take them.

The schemas are our own, of the fields that are used; others are refused. That of the TrainJob was compared with the
types of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1) as of 2026, that of the Job with Kubernetes' OpenAPI (batch/v1
JobSpec); those of Pod and Service were written from the documentation.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullframe.errors import LaunchError
from fullframe.launching.job import Job, runs_of
from fullframe.launching.kubernetes import KubernetesOptions, apply, dns_name, manifest_of

JOB = Job(
    name="Stereo_depth",
    folder=Path("/home/me/runs/depth"),
    directory=Path("/home/me"),
    options=("recipe.py", "--width", "4", "--processes", "4"),
    runs=runs_of([]),
    nodes=2,
    gpus_per_node=4,
    cpus_per_node=16,
    python="python",
)
OPTIONS = KubernetesOptions(image="registry/fullframe:1", volume="runs", queue="team", memory="64Gi", namespace="ml")


def an_object(required: list[str], **fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": fields, "additionalProperties": False}


def a_list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 1}
LABEL = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}
NAME = {"type": "string", "pattern": "^[a-z]([a-z0-9-]*[a-z0-9])?$", "maxLength": 63}  # of a Service, of a TrainJob
LABELS = {"type": "object", "additionalProperties": {"type": "string", "pattern": "^[A-Za-z0-9]([A-Za-z0-9_.-]*)$"}}
QUANTITY = {"type": "string", "pattern": "^[0-9.]+(k|[KMGTPE]i|[MGTPE]|m)?$"}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
RESOURCES = an_object([], limits=QUANTITIES, requests=QUANTITIES)
MOUNTS = a_list(an_object(["name", "mountPath"], name=LABEL, mountPath={"type": "string", "pattern": "^/"}))
CLAIM = an_object(["claimName"], claimName=LABEL)
VOLUME = an_object(["name"], name=LABEL, persistentVolumeClaim=CLAIM, emptyDir=an_object([], medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY))  # fmt: skip # noqa: E501
METADATA = an_object(["name"], name=NAME, namespace=LABEL, labels=LABELS)
SERVICE_SPEC = an_object(["selector"], clusterIP={"const": "None"}, publishNotReadyAddresses={"type": "boolean"}, selector=LABELS)  # fmt: skip # noqa: E501
CONTAINER = an_object(
    ["name", "image"],
    name=LABEL,
    image=TEXT,
    command=a_list(TEXT),
    args=a_list(TEXT),
    volumeMounts=MOUNTS,
    resources=RESOURCES,
)
POD = an_object(
    ["containers", "restartPolicy"],
    subdomain=LABEL,
    restartPolicy={"enum": ["Never"]},  # what a podFailurePolicy asks for
    terminationGracePeriodSeconds=COUNT,
    containers={**a_list(CONTAINER), "minItems": 1},
    volumes=a_list(VOLUME),
)
CONDITION = an_object(["type", "status"], type={"const": "DisruptionTarget"}, status={"enum": ["True", "False"]})
EXITS = an_object(
    ["operator", "values"], operator={"enum": ["In", "NotIn"]}, values={**a_list(COUNT), "uniqueItems": True}
)
RULE = an_object(
    ["action"], action={"enum": ["FailJob", "Ignore", "Count"]}, onExitCodes=EXITS, onPodConditions=a_list(CONDITION)
)
JOB_SPEC = an_object(
    ["template"],
    completionMode={"enum": ["Indexed"]},
    completions=COUNT,
    parallelism=COUNT,
    backoffLimit=COUNT,
    podFailurePolicy=an_object(["rules"], rules={**a_list(RULE), "maxItems": 20}),
    template=an_object(["spec"], metadata=an_object([], labels=LABELS), spec=POD),
)
WORDS = {**a_list({"type": "string", "maxLength": 65536}), "maxItems": 128}
TRAINER = an_object(
    [],
    image={"type": "string", "maxLength": 500},
    command=WORDS,
    args=WORDS,
    numNodes=COUNT,
    resourcesPerNode=RESOURCES,
)
PATCHED_POD = an_object(
    [], volumes=a_list(VOLUME), containers=a_list(an_object(["name"], name=LABEL, volumeMounts=MOUNTS))
)
PATCHED_JOB = an_object(
    ["name"], name=LABEL, template=an_object([], spec=an_object([], template=an_object([], spec=PATCHED_POD)))
)
PATCHED_SET = an_object([], spec=an_object([], replicatedJobs=a_list(PATCHED_JOB)))
PATCH = an_object(["manager"], manager=TEXT, trainingRuntimeSpec=an_object([], template=PATCHED_SET))
TRAIN_SPEC = an_object(
    ["runtimeRef"],
    runtimeRef=an_object(["name"], name=LABEL),
    trainer=TRAINER,
    runtimePatches={**a_list(PATCH), "maxItems": 16},
)
SCHEMAS = {
    ("v1", "Service"): SERVICE_SPEC,
    ("batch/v1", "Job"): JOB_SPEC,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): TRAIN_SPEC,
}


def objects(text: str) -> list[dict[str, Any]]:
    """The objects of a manifest, each held against its schema."""
    found = json.loads(text)
    listed = found["items"] if found["kind"] == "List" else [found]
    for one in listed:
        spec = SCHEMAS[one["apiVersion"], one["kind"]]
        whole = an_object(["metadata", "spec"], apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=spec)
        jsonschema.validate(one, whole)
    return listed


def expanded(words: list[str]) -> list[str]:
    """What Kubernetes makes of a container's words where no variable is known: `$$` is `$`."""
    return [re.sub(r"\$\$", "$", word) for word in words]


def test_a_plain_job_has_a_name_for_its_first_machine() -> None:
    service, job = objects(manifest_of(JOB, OPTIONS))
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == "stereo-depth"
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"] == [
        *("train", "recipe.py", "--width", "4", "--processes", "4", "--nodes", "2"),
        *("--rendezvous", "stereo-depth-0.stereo-depth:29400"),
        *("--run-dir", "/runs/depth-14148d01", "--auto-resume", "--stopped-code", "85"),
    ]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4", "cpu": "16", "memory": "64Gi"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"runs": "/runs", "shared-memory": "/dev/shm"}


def test_a_train_job_is_told_by_its_runtime_where_to_meet() -> None:
    (job,) = objects(manifest_of(JOB, replace(OPTIONS, kind="trainjob")))
    assert job["spec"]["trainer"]["numNodes"] == 2
    assert "--rendezvous" not in job["spec"]["trainer"]["args"]
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert (node["name"], pod["containers"][0]["name"]) == ("node", "node"), "as in the runtime torch-distributed"
    assert [volume["name"] for volume in pod["volumes"]] == ["runs", "shared-memory"]


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_a_sweep_is_a_job_a_run(kind: str) -> None:
    job = replace(JOB, runs=runs_of(["lr=1e-3,3e-4", "seed=1,2"]))
    found = [one for one in objects(manifest_of(job, replace(OPTIONS, kind=kind))) if one["kind"] != "Service"]
    assert [one["metadata"]["name"] for one in found] == [f"stereo-depth-{number}" for number in range(4)]
    last = json.dumps(found[3])
    assert '"/runs/depth-14148d01/0003-lr=3e-4,seed=2"' in last and '"--set", "lr=3e-4", "seed=2"' in last


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_what_a_user_names_is_no_variable(text: str) -> None:
    job = replace(JOB, options=("$(HOSTNAME)", text), runs=runs_of([]))
    _, made = json.loads(manifest_of(job, OPTIONS))["items"]
    words = made["spec"]["template"]["spec"]["containers"][0]["args"]
    assert expanded(words)[1:3] == ["$(HOSTNAME)", text]
    assert "$(" not in words[1].replace("$$", "")
    name = dns_name(text, "-7")
    assert re.fullmatch(NAME["pattern"], name) and len(name) <= 48 and name.endswith("-7")


def test_long_names_of_a_sweep_stay_different_and_begin_with_a_letter() -> None:
    job = replace(JOB, name="3d" * 40, runs=runs_of(["seed=1,2,3"]))
    for kind in ("job", "trainjob"):
        names = [one["metadata"]["name"] for one in objects(manifest_of(job, replace(OPTIONS, kind=kind)))]  # type: ignore[arg-type]
        assert len(set(names)) == 3 and all(name.startswith("job-3d") for name in names)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory": "64 GB"}, "no quantity"),
        ({"memory": "64K"}, "no quantity"),
        ({"shared_memory": "lots"}, "no quantity"),
        ({"volume": "My Runs"}, "no name"),
        ({"queue": "a;b"}, "no name"),
        ({"namespace": "A"}, "no name"),
    ],
)
def test_what_kubernetes_would_refuse_is_said(changes: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        manifest_of(JOB, replace(OPTIONS, **changes))


def test_the_schemas_refuse_what_they_do_not_know() -> None:
    text = manifest_of(JOB, OPTIONS)
    for good, bad in (
        ('"Indexed"', '"indexed"'),
        ('"claimName"', '"claim"'),
        ('"64Gi"', '"64 GB"'),
        ('"parallelism"', '"p"'),
    ):
        assert good in text
        with pytest.raises(jsonschema.ValidationError):
            objects(text.replace(good, bad))


def test_folders_of_one_name_are_directories_of_their_own() -> None:
    folders = [Path("/home/me/a/first"), Path("/home/me/b/first"), Path("/home/me/b/first")]
    words = [manifest_of(replace(JOB, folder=folder), OPTIONS) for folder in folders]
    first, second, again = (re.findall(r"/runs/first[^\"]*", found) for found in words)
    assert first != second == again and len(first) == 1


KUBECTL = """#!/bin/bash
case $1 in
    get) cat {folder}/there ;;
    apply) echo "$@" >> {folder}/applied; echo service/depth; echo job.batch/depth ;;
esac
"""


def test_a_job_that_is_there_is_not_said_to_be_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kubectl").write_text(KUBECTL.format(folder=tmp_path))
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "there").write_text("service/depth\n")  # as kubectl delete job leaves it
    assert apply(tmp_path / "manifest.json") == "service/depth job.batch/depth"
    for name in ("job.batch/depth", "trainjob.trainer.kubeflow.org/depth"):
        (tmp_path / "there").write_text(f"service/depth\n{name}\n")
        with pytest.raises(LaunchError, match=rf"{name} is there already.* kubectl delete --filename .*manifest\.json"):
            apply(tmp_path / "manifest.json")
    assert (tmp_path / "applied").read_text().count("\n") == 1
