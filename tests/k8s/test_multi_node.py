"""Groups of pods on several machines: their processes meet, and only leaders get requests."""

from typing import Any

import pytest
import torch.distributed.run

from tests.k8s.manifests import (
    MULTI_NODE,
    Pod,
    Resource,
    build,
    environment,
    launched,
    named,
    of_kind,
    pods,
    selects,
)

_NAME = "tandem-group"
_OF_A_GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader"}


@pytest.fixture
def groups() -> list[Resource]:
    return build(MULTI_NODE)


def _pod(groups: list[Resource], role: str) -> Pod:
    (found,) = [pod for pod in pods(groups) if pod.owner == f"LeaderWorkerSet/{_NAME}/{role}"]
    return found


def _template(groups: list[Resource]) -> dict[str, Any]:
    found: dict[str, Any] = named(groups, "LeaderWorkerSet", _NAME)["spec"]["leaderWorkerTemplate"]
    return found


def test_the_deployment_has_given_way_and_the_autoscaler_follows(groups: list[Resource]) -> None:
    assert "tandem" not in [r["metadata"]["name"] for r in of_kind(groups, "Deployment")]
    target = named(groups, "HorizontalPodAutoscaler", "tandem")["spec"]["scaleTargetRef"]
    found = named(groups, target["kind"], target["name"])
    assert found["apiVersion"] == target["apiVersion"]
    assert "replicas" not in found["spec"]


def test_the_service_that_the_controller_makes_is_no_other(groups: list[Resource]) -> None:
    assert _NAME not in {service["metadata"]["name"] for service in of_kind(groups, "Service")}


@pytest.mark.parametrize("role", ["leader", "worker"])
def test_the_processes_of_a_group_are_as_many_as_the_shards(
    groups: list[Resource], role: str
) -> None:
    (container,) = _pod(groups, role).spec["containers"]
    options, arguments = launched(container)
    for name, value in _OF_A_GROUP.items():
        options = [text.replace(f"$({name})", value) for text in options]
    parsed = torch.distributed.run.get_args_parser().parse_args([*options, "tandem", *arguments])
    assert (parsed.node_rank, parsed.master_addr) == (1, "leader")
    assert int(parsed.nnodes) == _template(groups)["size"]
    variables = environment(groups, container)
    num_processes = int(parsed.nnodes) * int(parsed.nproc_per_node)
    assert variables["TANDEM_TENSOR_PARALLEL"] == str(num_processes)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == parsed.nproc_per_node
    assert "lo" not in (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"])
    # Who is gone takes the group with it: the others cannot go on.
    assert _template(groups)["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_workers_get_no_request_and_have_no_probe(groups: list[Resource]) -> None:
    leader, worker = (_pod(groups, role) for role in ("leader", "worker"))
    for service in of_kind(groups, "Service"):
        assert not selects({"matchLabels": service["spec"]["selector"]}, worker.labels)
    serving = named(groups, "Service", "tandem-headless")["spec"]["selector"]
    assert selects({"matchLabels": serving}, leader.labels)
    (container,) = worker.spec["containers"]
    assert not [key for key in container if key.endswith("Probe")]
    assert "readinessProbe" in leader.spec["containers"][0]


def test_the_processes_may_talk_among_each_other_alone(groups: list[Resource]) -> None:
    policy = named(groups, "NetworkPolicy", "shards")["spec"]
    chosen = {pod.owner for pod in pods(groups) if selects(policy["podSelector"], pod.labels)}
    assert chosen == {f"LeaderWorkerSet/{_NAME}/{role}" for role in ("leader", "worker")}
    (ingress,), (egress,) = policy["ingress"], policy["egress"]
    assert ingress["from"] == egress["to"] == [{"podSelector": policy["podSelector"]}]


def test_config_maps_keep_the_names_of_their_content(groups: list[Resource]) -> None:
    made = {r["metadata"]["name"] for r in of_kind(groups, "ConfigMap")}
    for role in ("leader", "worker"):
        for source in _pod(groups, role).spec["containers"][0]["envFrom"]:
            assert source["configMapRef"]["name"] in made
