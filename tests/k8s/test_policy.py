"""What a cluster under the restricted profile and a careful operator ask for."""

import re

import service.app
from tests.k8s.manifests import (
    K8S,
    Pod,
    Resource,
    build,
    environment,
    named,
    num_bytes,
    of_kind,
    pods,
    selects,
    serve_container,
    serve_pod,
    serve_workload,
)

VOLUME_KINDS = {"configMap", "csi", "emptyDir", "ephemeral", "persistentVolumeClaim", "secret"}
# Statuses on their way, rows that end, the engine's last step, the ledger's and telemetry's flush.
FLUSH_SECONDS = service.app._LAST_WRITES_SECONDS + 2 * service.app._ENGINE_STOP_SECONDS + 20


def violations(pod: Pod) -> list[str]:
    """Breaches of the Pod Security Standard `restricted`, and a writable root."""
    found = []
    of_pod = pod.spec.get("securityContext", {})
    if not of_pod.get("runAsNonRoot") or of_pod.get("runAsUser", 0) == 0:
        found.append("may run as root")
    if of_pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.append("no seccomp profile")
    found += [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.spec.get(key)]
    for volume in pod.spec.get("volumes", ()):
        found += [f"volume {kind}" for kind in volume.keys() - {"name"} - VOLUME_KINDS]
    for container in pod.containers():
        context = container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False:
            found.append(f"{container['name']}: privilege escalation")
        if context.get("capabilities") != {"drop": ["ALL"]}:
            found.append(f"{container['name']}: capabilities")
        if not context.get("readOnlyRootFilesystem"):
            found.append(f"{container['name']}: writable root")
        if context.get("privileged") or context.get("runAsUser", 1) == 0:
            found.append(f"{container['name']}: privileged")
        found += [
            f"{container['name']}: host port" for p in container.get("ports", ()) if "hostPort" in p
        ]
    return found


def test_the_namespace_enforces_the_restricted_profile(resources: list[Resource]) -> None:
    labels = named(resources, "Namespace", "tandem")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_pods_keep_to_the_restricted_profile(workloads: list[Resource]) -> None:
    assert {pod.owner: violations(pod) for pod in pods(workloads) if violations(pod)} == {}


def test_a_breach_of_the_profile_is_found(resources: list[Resource]) -> None:
    container = serve_container(resources)
    container["securityContext"].pop("readOnlyRootFilesystem")  # type: ignore[attr-defined]
    container["securityContext"]["capabilities"] = {"drop": ["NET_RAW"]}  # type: ignore[index]
    assert violations(serve_pod(resources)) == ["serve: capabilities", "serve: writable root"]


def test_nobody_gets_a_token_or_the_variables_of_services(workloads: list[Resource]) -> None:
    accounts = {a["metadata"]["name"] for a in of_kind(build("dev-cpu"), "ServiceAccount")}
    for pod in pods(workloads):
        assert pod.spec["serviceAccountName"] in accounts
        assert pod.spec["automountServiceAccountToken"] is False
        # A Service named tandem would set TANDEM_PORT=tcp://..., which is a setting's name.
        assert pod.spec["enableServiceLinks"] is False


def test_containers_have_requests_and_a_memory_limit(workloads: list[Resource]) -> None:
    for pod in pods(workloads):
        for container in pod.containers():
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert {"cpu", "memory", "ephemeral-storage"} <= requests.keys()
            assert num_bytes(requests["memory"]) <= num_bytes(limits["memory"])
            assert "cpu" not in limits  # throttling would stretch single steps


def test_images_have_a_version(workloads: list[Resource]) -> None:
    for pod in pods(workloads):
        for container in pod.containers():
            tag = re.fullmatch(r"[\w./-]+:([\w.-]+)", container["image"])
            assert tag, container["image"]
            assert tag[1] != "latest"


def test_no_secret_is_in_the_repository(resources: list[Resource]) -> None:
    assert of_kind(resources, "Secret") == []
    text = "".join(p.read_text("utf-8", errors="replace") for p in K8S.rglob("*") if p.is_file())
    assert not re.search(r"(postgres\w*://\w|BEGIN [A-Z ]*PRIVATE KEY)", text)


def test_traffic_is_denied_unless_it_is_allowed(resources: list[Resource]) -> None:
    policies = of_kind(resources, "NetworkPolicy")
    deny = named(resources, "NetworkPolicy", "default-deny")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for policy in policies:
        spec, name = policy["spec"], policy["metadata"]["name"]
        assert any(selects(spec["podSelector"], pod.labels) for pod in pods(resources)), name
        for rule in spec.get("ingress", []):
            assert rule.get("from"), f"{name} lets everybody in"
            assert rule.get("ports"), f"{name} opens every port"
        for rule in spec.get("egress", []):
            assert rule.get("ports"), f"{name} opens every port"
    serve = serve_pod(resources)
    for policy in policies:
        if selects(policy["spec"]["podSelector"], serve.labels):
            for rule in policy["spec"].get("egress", []):
                assert rule.get("to"), "a server may call the whole world"


def test_disruptions_and_updates_leave_enough_servers(resources: list[Resource]) -> None:
    budget = named(resources, "PodDisruptionBudget", "tandem")["spec"]
    assert selects(budget["selector"], serve_pod(resources).labels)
    assert budget["maxUnavailable"] == 1
    spec = serve_workload(resources)["spec"]
    rolling = (
        spec["strategy"]["rollingUpdate"]
        if "strategy" in spec
        else spec["rolloutStrategy"]["rollingUpdateConfiguration"]
    )
    assert rolling["maxUnavailable"] == 0
    assert rolling["maxSurge"] >= 1


def test_the_drain_fits_into_the_termination_grace_period(resources: list[Resource]) -> None:
    container = serve_container(resources)
    grace = environment(resources, container)["TANDEM_GRACE_SECONDS"]
    assert grace is not None
    pre_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    readiness = container["readinessProbe"]
    assert pre_stop >= readiness["periodSeconds"] * readiness["failureThreshold"]
    needed = pre_stop + float(grace) + FLUSH_SECONDS
    assert serve_pod(resources).spec["terminationGracePeriodSeconds"] >= needed


def test_what_reads_the_clock_never_piles_up(resources: list[Resource]) -> None:
    for job in of_kind(resources, "CronJob"):
        assert job["spec"]["concurrencyPolicy"] == "Forbid"
        assert job["spec"]["startingDeadlineSeconds"] >= 10  # less is never scheduled
        assert job["spec"]["timeZone"] == "Etc/UTC"
        assert job["spec"]["jobTemplate"]["spec"]["activeDeadlineSeconds"] > 0
    migrate = named(resources, "Job", "tandem-migrate")["spec"]
    assert migrate["ttlSecondsAfterFinished"] > 0  # a Job that stays blocks the next release


def test_one_autoscaler_owns_the_replicas(resources: list[Resource]) -> None:
    autoscalers = [
        *of_kind(resources, "HorizontalPodAutoscaler"),
        *of_kind(resources, "ScaledObject"),
    ]
    workload = serve_workload(resources)
    replicas = workload["spec"].get("replicas")
    if not autoscalers:
        assert replicas == 1
        return
    (autoscaler,) = autoscalers
    assert replicas is None
    target = autoscaler["spec"]["scaleTargetRef"]
    assert target["name"] == workload["metadata"]["name"]
    assert target.get("kind", "Deployment") == workload["kind"]
