"""The files on the page about several processes are what Slurm and Kubernetes read, and agree with themselves."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "scaling.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
SLURM = next(text for _kind, text in BLOCKS if text.startswith("#!/bin/bash"))
JOB, SERVICE = yaml.safe_load_all(next(text for kind, text in BLOCKS if kind == "yaml"))

# Of the API reference of Kubernetes: batch/v1 Job, core/v1 PodSpec, Container and ServiceSpec. What is not here is
# not known to this test: look it up and add it.
FIELDS = {
    "job": {"completions", "parallelism", "completionMode", "backoffLimit", "backoffLimitPerIndex", "template",
            "suspend", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "podFailurePolicy"},
    "pod": {"subdomain", "restartPolicy", "containers", "volumes", "nodeSelector", "tolerations", "hostNetwork"},
    "container": {"name", "image", "command", "args", "env", "resources", "volumeMounts", "ports", "workingDir"},
    "service": {"clusterIP", "selector", "ports", "publishNotReadyAddresses"},
}  # fmt: skip


def options(words: list[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)


def container() -> dict[str, Any]:
    (found,) = JOB["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_the_manifest_has_no_field_that_kubernetes_does_not_have() -> None:
    assert (JOB["apiVersion"], JOB["kind"]) == ("batch/v1", "Job")
    assert (SERVICE["apiVersion"], SERVICE["kind"]) == ("v1", "Service")
    assert set(JOB) == {"apiVersion", "kind", "metadata", "spec"} == set(SERVICE)
    assert set(JOB["spec"]) <= FIELDS["job"]
    assert set(JOB["spec"]["template"]["spec"]) <= FIELDS["pod"]
    assert set(container()) <= FIELDS["container"]
    assert set(SERVICE["spec"]) <= FIELDS["service"]


def test_pods_of_the_job_find_the_first_one_by_its_name() -> None:
    """A pod of an indexed job is called after the job and its index; a headless service gives it a name in DNS."""
    spec, name = JOB["spec"], JOB["metadata"]["name"]
    host, _, port = options(container()["command"])["rdzv-endpoint"].partition(":")
    assert spec["completionMode"] == "Indexed"
    assert host == f"{name}-0.{spec['template']['spec']['subdomain']}"
    assert port.isdigit()
    assert SERVICE["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
    assert SERVICE["spec"]["clusterIP"] == "None"  # the word, which makes it headless
    assert SERVICE["spec"]["selector"] == {"job-name": name}


def test_the_job_starts_as_many_processes_as_it_asks_for_cards() -> None:
    spec, given = JOB["spec"], options(container()["command"])
    assert int(given["nnodes"]) == spec["completions"] == spec["parallelism"]
    assert int(given["nproc-per-node"]) == container()["resources"]["limits"]["nvidia.com/gpu"]
    assert spec["template"]["spec"]["restartPolicy"] in ("Never", "OnFailure")
    mounted = {mount["name"] for mount in container()["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    words = container()["command"]
    assert words[words.index("-m") + 1 :][:2] == ["stillroom", "distill"]


def test_the_slurm_script_is_a_script_and_agrees_with_its_own_request() -> None:
    subprocess.run(["bash", "-n"], input=SLURM, text=True, check=True)
    asked = dict(re.findall(r"--([\w-]+)=(\d+)", " ".join(re.findall(r"^#SBATCH (.*)$", SLURM, flags=re.MULTILINE))))
    assert asked["ntasks-per-node"] == "1", "torchrun starts the processes of a node"
    (started,) = re.findall(r"--nproc-per-node (\d+)", SLURM)
    assert started == asked["gpus-per-node"]
    body = SLURM.replace("\\\n", " ")
    used = set(re.findall(r"\$\{?(\w+)", body))
    assert used <= {"head", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_JOB_ID", "SLURM_CPUS_PER_TASK"}
    assert "-m stillroom distill" in body


@pytest.mark.parametrize(
    "word", ["torchrun --standalone --nproc-per-node 2", "Kaggle", "Nothing on it was ever run on GPUs"]
)
def test_the_page_says_what_a_reader_with_two_cards_needs(word: str) -> None:
    assert word in " ".join(PAGE.replace("**", "").split())
