"""What each overlay promises: one node with SQLite, GPUs with PostgreSQL, EKS, AKS."""

import json
from typing import Any

import pytest
import yaml

from exports.storage import Target
from tests.k8s.manifests import (
    OVERLAYS,
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
    server_settings,
)

GPU = "nvidia.com/gpu"
PRODUCTION = [name for name in OVERLAYS if name != "dev-cpu"]
OF_THE_LEDGER = {"serve", "migrate", "export", "housekeeping"}


def _component(pod: Pod) -> str:
    return pod.labels["app.kubernetes.io/component"]


def _by_component(resources: list[Resource]) -> dict[str, Pod]:
    return {_component(pod): pod for pod in pods(resources)}


def _claims(pod: Pod) -> set[str]:
    volumes = pod.spec.get("volumes", ())
    return {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in volumes
        if "persistentVolumeClaim" in volume
    }


def _ledger_key(resources: list[Resource], component: str) -> str | None:
    """The key of the Secret that gives the ledger's URL; None where nothing does."""
    (container,) = _by_component(resources)[component].spec["containers"]
    for entry in container.get("env", ()):
        if entry["name"] == "TANDEM_LEDGER_URL":
            reference = entry["valueFrom"]["secretKeyRef"]
            assert reference["name"] == "tandem-ledger"
            return str(reference["key"])
    return None


def _reaching(resources: list[Resource], port: int, *, everywhere: bool) -> set[str]:
    """Components that may call that port: of any address, or of whatever a policy names."""
    found = set()
    for policy in of_kind(resources, "NetworkPolicy"):
        for rule in policy["spec"].get("egress", ()):
            is_open = "to" not in rule or any(
                peer.get("ipBlock", {}).get("cidr") == "0.0.0.0/0" for peer in rule["to"]
            )
            if port in {entry["port"] for entry in rule["ports"]} and (is_open or not everywhere):
                found |= {
                    _component(pod)
                    for pod in pods(resources)
                    if selects(policy["spec"]["podSelector"], pod.labels)
                }
    return found


def test_dev_cpu_needs_one_node_and_nothing_that_a_new_cluster_lacks() -> None:
    resources = build("dev-cpu")
    groups = {resource["apiVersion"].rpartition("/")[0] for resource in resources}
    assert groups <= {"", "apps", "batch", "policy", "networking.k8s.io"}
    assert named(resources, "Deployment", "tandem")["spec"]["replicas"] == 1
    requested = {"cpu": 0.0, "memory": 0.0}
    for pod in pods(resources):
        assert not pod.spec.keys() & {"nodeSelector", "tolerations", "priorityClassName"}
        for container in pod.containers():
            assert GPU not in container["resources"]["limits"]
            requests = container["resources"]["requests"]
            cpu = requests["cpu"]
            requested["cpu"] += float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu)
            requested["memory"] += num_bytes(requests["memory"])
    assert requested["cpu"] <= 4  # minikube and kind on a laptop
    assert requested["memory"] <= 6 * 2**30


def test_dev_cpu_keeps_the_ledger_in_a_file_that_all_its_pods_share() -> None:
    resources = build("dev-cpu")
    for component in OF_THE_LEDGER:
        assert _ledger_key(resources, component) is None
        pod = _by_component(resources)[component]
        (container,) = pod.spec["containers"]
        home = environment(resources, container)["TANDEM_HOME"]
        (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == home]
        (volume,) = [v for v in pod.spec["volumes"] if v["name"] == mount["name"]]
        assert volume["persistentVolumeClaim"]["claimName"] == "tandem-home"
    modes = [c["spec"]["accessModes"] for c in of_kind(resources, "PersistentVolumeClaim")]
    assert modes == [["ReadWriteOnce"]] * len(modes)


@pytest.mark.parametrize("overlay", PRODUCTION)
def test_servers_of_production_get_gpus_on_nodes_that_have_them(
    overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = build(overlay)
    assert server_settings(resources, monkeypatch).device == "cuda"
    serve = serve_pod(resources)
    asked = serve_container(resources)["resources"]
    assert int(asked["limits"][GPU]) >= 1
    assert asked["requests"][GPU] == asked["limits"][GPU]  # GPUs cannot be overcommitted
    assert serve.spec["nodeSelector"] == {f"{GPU}.present": "true"}
    assert {"key": GPU, "operator": "Exists", "effect": "NoSchedule"} in serve.spec["tolerations"]
    for pod in pods(resources):
        if _component(pod) != "serve":
            assert all(GPU not in c["resources"]["limits"] for c in pod.containers()), pod.owner


@pytest.mark.parametrize("overlay", PRODUCTION)
def test_servers_of_production_spread_and_go_before_batch_work(overlay: str) -> None:
    resources = build(overlay)
    serve = serve_pod(resources)
    spread = serve.spec["topologySpreadConstraints"]
    topologies = {constraint["topologyKey"] for constraint in spread}
    assert topologies == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}
    for constraint in spread:
        chosen = [p for p in pods(resources) if selects(constraint["labelSelector"], p.labels)]
        assert chosen == [serve]
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"  # one zone is better than none
    priority = named(resources, "PriorityClass", serve.spec["priorityClassName"])
    assert priority["value"] > 0
    assert not priority.get("globalDefault")
    assert all("priorityClassName" not in p.spec for p in pods(resources) if p != serve)


@pytest.mark.parametrize("overlay", PRODUCTION)
def test_the_ledger_of_production_is_postgresql_which_the_export_only_reads(overlay: str) -> None:
    resources = build(overlay)
    keys = {component: _ledger_key(resources, component) for component in OF_THE_LEDGER}
    assert keys.pop("export") == "export-url"
    assert set(keys.values()) == {"url"}
    assert _reaching(resources, 5432, everywhere=False) == OF_THE_LEDGER
    (scaler,) = [r for r in resources if r["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    fewest = scaler["spec"].get("minReplicas", scaler["spec"].get("minReplicaCount"))
    assert fewest == (1 if scaler["kind"] == "ScaledObject" else 2)


@pytest.mark.parametrize("overlay", PRODUCTION)
def test_claims_of_pods_on_several_nodes_can_be_written_from_all_of_them(overlay: str) -> None:
    resources = build(overlay)
    using = [claim for pod in pods(resources) for claim in _claims(pod)]
    scaled = _claims(serve_pod(resources))
    for claim in of_kind(resources, "PersistentVolumeClaim"):
        name = claim["metadata"]["name"]
        is_shared = using.count(name) > 1 or name in scaled
        expected = ["ReadWriteMany"] if is_shared else ["ReadWriteOnce"]
        assert claim["spec"]["accessModes"] == expected, name


@pytest.mark.parametrize(
    ("overlay", "expected"),
    [
        ("dev-cpu", {"serve"}),  # pulls the model; private networks are left out
        ("prod-gpu", {"collector"}),
        ("prod-gpu-keda", {"collector"}),
        ("prod-gpu-tp", {"collector"}),
        ("aws", {"collector", "export"}),
        ("azure", {"collector", "export"}),
    ],
)
def test_few_pods_reach_the_world(overlay: str, expected: set[str]) -> None:
    assert _reaching(build(overlay), 443, everywhere=True) == expected


@pytest.mark.parametrize("overlay", PRODUCTION)
def test_production_is_watched(overlay: str) -> None:
    resources = build(overlay)
    assert [found["metadata"]["name"] for found in of_kind(resources, "ServiceMonitor")]
    rules = [
        rule
        for found in of_kind(resources, "PrometheusRule")
        for group in found["spec"]["groups"]
        for rule in group["rules"]
    ]
    assert {"TandemDivergence", "TandemLedgerLost"} <= {rule.get("alert") for rule in rules}
    dashboard = named(resources, "ConfigMap", "tandem-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"  # its sidecar looks for it
    (content,) = dashboard["data"].values()
    assert json.loads(content)["panels"]
    scraping = [
        rule
        for policy in of_kind(resources, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], serve_pod(resources).labels)
        for rule in policy["spec"].get("ingress", ())
        if {"port": "metrics"} in rule["ports"]
    ]
    labels = [peer["namespaceSelector"]["matchLabels"] for r in scraping for peer in r["from"]]
    assert labels == [{"tandem/metrics": "true"}]


@pytest.mark.parametrize("overlay", PRODUCTION)
def test_traces_that_failed_or_were_slow_are_kept_and_of_the_others_a_share(
    overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = build(overlay)
    assert server_settings(resources, monkeypatch).trace_sample_ratio == 1
    (collector,) = [p for p in pods(resources) if _component(p) == "collector"]
    (volume,) = [v for v in collector.spec["volumes"] if "configMap" in v]
    source = named(resources, "ConfigMap", volume["configMap"]["name"])
    config: dict[str, Any] = yaml.safe_load(source["data"]["config.yaml"])
    sampling = config["processors"]["tail_sampling"]
    kept = {policy["type"]: policy[policy["type"]] for policy in sampling["policies"]}
    assert kept["status_code"] == {"status_codes": ["ERROR"]}
    assert kept["latency"]["threshold_ms"] > 0
    assert 0 < kept["probabilistic"]["sampling_percentage"] < 100
    assert len(kept) == len(sampling["policies"]) == 3
    order = config["service"]["pipelines"]["traces"]["processors"]
    assert order == ["memory_limiter", "tail_sampling", "batch"]
    (container,) = collector.spec["containers"]
    limiter = config["processors"]["memory_limiter"]
    assert limiter["limit_mib"] * 2**20 < num_bytes(container["resources"]["limits"]["memory"])
    # Spans of one trace that went to two replicas would be decided upon apart.
    assert named(resources, "Deployment", "tandem-collector")["spec"]["replicas"] == 1


def test_aws_lets_only_the_export_write_to_s3() -> None:
    resources = build("aws")
    role = "eks.amazonaws.com/role-arn"
    roles = {
        account["metadata"]["name"]: account["metadata"].get("annotations", {}).get(role)
        for account in of_kind(resources, "ServiceAccount")
    }
    assert roles.pop("tandem-export").startswith("arn:aws:iam::")
    assert set(roles.values()) == {None}
    export = _by_component(resources)["export"]
    assert export.spec["serviceAccountName"] == "tandem-export"
    users = [p.owner for p in pods(resources) if p.spec["serviceAccountName"] == "tandem-export"]
    assert users == [export.owner]
    variables = environment(resources, export.spec["containers"][0])
    assert str(variables["TABLES"]).startswith("s3://")
    assert variables["AWS_REGION"]
    assert "tandem-tables" not in _claims(export)


@pytest.mark.parametrize(
    ("overlay", "provisioner"),
    [("aws", "efs.csi.aws.com"), ("azure", "file.csi.azure.com")],
)
def test_shared_claims_of_a_cloud_lie_on_nfs(overlay: str, provisioner: str) -> None:
    resources = build(overlay)
    (storage,) = of_kind(resources, "StorageClass")
    assert storage["provisioner"] == provisioner
    assert storage["parameters"].get("protocol", "nfs") == "nfs"  # EFS speaks nothing else
    assert storage["reclaimPolicy"] == "Retain"  # the journals outlive a claim
    claims = of_kind(resources, "PersistentVolumeClaim")
    shared = {c["metadata"]["name"]: c["spec"].get("storageClassName") for c in claims}
    name = storage["metadata"]["name"]
    assert shared == dict.fromkeys(("tandem-home", "tandem-registry", "tandem-models"), name)


def test_aws_balances_grpc_with_a_network_load_balancer(monkeypatch: pytest.MonkeyPatch) -> None:
    resources = build("aws")
    service = named(resources, "Service", "tandem-nlb")
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["loadBalancerClass"] == "service.k8s.aws/nlb"
    prefix = "service.beta.kubernetes.io/aws-load-balancer-"
    said = {n.removeprefix(prefix): v for n, v in service["metadata"]["annotations"].items()}
    assert said["nlb-target-type"] == "ip"  # pods themselves, so that draining ones are forgotten
    assert said["scheme"] == "internal"
    assert said["ssl-cert"].startswith("arn:aws:acm:")
    assert said["ssl-ports"] == str(service["spec"]["ports"][0]["port"])
    assert said["alpn-policy"] == "HTTP2Only"
    attributes = dict(p.split("=") for p in said["target-group-attributes"].split(","))
    grace = server_settings(resources, monkeypatch).grace_seconds
    assert int(attributes["deregistration_delay.timeout_seconds"]) >= grace
    assert attributes["deregistration_delay.connection_termination.enabled"] == "false"
    policy = named(resources, "NetworkPolicy", "allow-balancer")["spec"]
    assert selects(policy["podSelector"], serve_pod(resources).labels)
    assert of_kind(resources, "GRPCRoute") == []


def test_azure_exports_with_workload_identity_to_adls() -> None:
    resources = build("azure")
    for account in of_kind(resources, "ServiceAccount"):
        assert "azure.workload.identity/client-id" in account["metadata"]["annotations"]
    export = _by_component(resources)["export"]
    assert export.labels["azure.workload.identity/use"] == "true"
    tables = environment(resources, export.spec["containers"][0])["TABLES"] or ""
    assert ".dfs.core.windows.net/" in tables  # the endpoint of Data Lake Gen2
    assert not Target(tables).is_local  # pyarrow itself opens it, with no extra installed
    assert "tandem-tables" not in _claims(export)


def test_azure_takes_every_secret_from_a_mounted_vault() -> None:
    resources = build("azure")
    provider = named(resources, "SecretProviderClass", "tandem")
    assert provider["spec"]["provider"] == "azure"
    # The driver makes the Secrets once a pod mounts the vault: whoever may be the first does.
    for component in ("serve", "migrate", "export"):
        pod = _by_component(resources)[component]
        assert pod.labels["azure.workload.identity/use"] == "true"
        (volume,) = [v for v in pod.spec["volumes"] if "csi" in v]
        assert volume["csi"]["driver"] == "secrets-store.csi.k8s.io"
        assert volume["csi"]["volumeAttributes"] == {"secretProviderClass": "tandem"}
        (container,) = pod.spec["containers"]
        assert [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
