"""Where all traffic is denied, what a pod cannot do without is let through."""

from typing import Any

from tests.k8s.manifests import Pod, Resource, build, of_kind, pods, selects

COMPONENT = "app.kubernetes.io/component"


def _rules(resources: list[Resource], pod: Pod, way: str) -> list[dict[str, Any]]:
    """The ingress or egress rules of all policies that choose the pod."""
    return [
        rule
        for policy in of_kind(resources, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], pod.labels)
        for rule in policy["spec"].get(way, ())
    ]


def _ports(rules: list[dict[str, Any]]) -> set[tuple[str, object]]:
    return {(port.get("protocol", "TCP"), port["port"]) for rule in rules for port in rule["ports"]}


def test_every_pod_may_ask_for_names(workloads: list[Resource]) -> None:
    # A training Job is applied beside an overlay, whose policies hold in its namespace, too.
    beside = [] if of_kind(workloads, "Deployment") else build("dev-cpu")
    for pod in pods(workloads):
        allowed = _ports(_rules([*workloads, *beside], pod, "egress"))
        assert {("UDP", 53), ("TCP", 53)} <= allowed, pod.owner


def test_callers_reach_servers_and_servers_the_collector(resources: list[Resource]) -> None:
    by_component = {pod.labels[COMPONENT]: pod for pod in pods(resources)}
    serve, collector = by_component["serve"], by_component.get("collector")
    callers = {"namespaceSelector": {"matchLabels": {"tandem/client": "true"}}}
    incoming = _rules(resources, serve, "ingress")
    assert [rule["ports"] for rule in incoming if rule["from"] == [callers]] == [[{"port": "grpc"}]]
    if collector is None:
        return
    (opened,) = (c["ports"] for c in collector.spec["containers"])
    (port,) = (p["containerPort"] for p in opened if p["name"] == "otlp")
    for pod, way, other, peers in (
        (serve, "egress", collector, "to"),
        (collector, "ingress", serve, "from"),
    ):
        to_it = [
            rule
            for rule in _rules(resources, pod, way)
            for peer in rule.get(peers, ())
            if peer.keys() == {"podSelector"} and selects(peer["podSelector"], other.labels)
        ]
        assert ("TCP", port) in _ports(to_it), f"{pod.owner} {way}"


def test_a_training_job_that_pulls_its_target_reaches_the_index() -> None:
    resources = build("training/cpu")
    (pod,) = pods(resources)
    assert any(container["args"][0] == "models" for container in pod.containers())
    assert ("TCP", 443) in _ports(_rules(resources, pod, "egress"))
