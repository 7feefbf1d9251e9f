"""Names in the manifests are names that the code knows, and that other manifests define."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from exports.errors import ExportError
from service.cli import app
from service.health import SERVICE_NAME
from service.settings import ServiceSettings
from telemetry.prices import read_price_book, schedule_of
from tests.k8s.manifests import (
    K8S,
    Resource,
    environment,
    expand,
    launched,
    named,
    num_bytes,
    num_gpus,
    of_kind,
    pods,
    references,
    selects,
    serve_container,
    serve_pod,
    server_settings,
)

SETTINGS = {f"TANDEM_{name.upper()}" for name in ServiceSettings.model_fields}
OF_A_GROUP = {"LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"}  # by its controller
FOREIGN = {
    "AWS_REGION",
    "HF_HUB_OFFLINE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
}  # of the platform and of libraries


def test_every_variable_is_a_setting_or_part_of_an_argument(workloads: list[Resource]) -> None:
    for pod in pods(workloads):
        used = {name for container in pod.ours() for name in references(container)}
        for container in pod.ours():
            variables = set(environment(workloads, container))
            if pod.owner.startswith("LeaderWorkerSet/"):
                variables |= OF_A_GROUP
            assert references(container) <= variables, f"{pod.owner} {container['name']}"
            unknown = variables - SETTINGS - FOREIGN - OF_A_GROUP - used
            assert not unknown, f"{pod.owner} {container['name']}"


def test_the_server_accepts_the_values(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(resources, monkeypatch)
    settings.engine_config(settings.target, settings.draft)
    assert settings.prometheus_port is not None
    assert settings.host == settings.prometheus_host == "0.0.0.0"  # noqa: S104 - a pod's own
    assert settings.health_without_token  # a probe of the kubelet carries none


def test_every_command_exists_with_its_options(workloads: list[Resource], tmp_path: Path) -> None:
    commands = set()
    for pod in pods(workloads):
        for container in pod.ours():
            _, arguments = launched(container)
            arguments = expand(arguments, environment(workloads, container))
            if arguments[:2] == ["drafter", "register"]:  # asks whether the folder exists
                arguments[2] = str(tmp_path)
            _parse(arguments)
            commands.add(arguments[0])
    assert commands >= {"serve", "export", "ledger"} or commands >= {"train", "drafter"}


def _parse(arguments: list[str]) -> None:
    """Raises click's UsageError for a command or an option that does not exist."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("tandem", list(arguments))
    while hasattr(command, "get_command"):
        name, command, arguments = command.resolve_command(context, arguments)
        context = command.make_context(name, list(arguments), parent=context)


@pytest.mark.parametrize("wrong", [["serv"], ["export", "--output", "x"], ["ledger", "migrat"]])
def test_a_command_that_does_not_exist_is_found(wrong: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such (command|option)"):
        _parse(wrong)


def test_exit_codes_of_the_export_are_its_own(resources: list[Resource]) -> None:
    job = named(resources, "CronJob", "tandem-export")["spec"]["jobTemplate"]["spec"]
    codes = {
        code for rule in job["podFailurePolicy"]["rules"] for code in rule["onExitCodes"]["values"]
    }
    assert codes <= {error.exit_code for error in ExportError.__subclasses__()}


def test_ports_and_probes_are_the_servers(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(resources, monkeypatch)
    container = serve_container(resources)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": settings.port, "metrics": settings.prometheus_port}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"] == {"port": settings.port, "service": SERVICE_NAME}
    liveness = container["livenessProbe"]
    # A restart is the last resort: later than the server's own word that it hangs.
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > settings.stall_seconds


def test_probes_ask_ports_that_their_container_opens(workloads: list[Resource]) -> None:
    for pod in pods(workloads):
        for container in pod.containers():
            ports = container.get("ports", ())
            opened = {port[key] for port in ports for key in ("name", "containerPort")}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                for asked in container.get(probe, {}).values():
                    if isinstance(asked, dict):
                        assert asked["port"] in opened, f"{pod.owner} {probe}"


def test_batch_work_does_what_it_is_named_after(resources: list[Resource]) -> None:
    first = {
        pod.owner: container["args"][:2]
        for pod in pods(resources)
        for container in pod.spec["containers"]
        if pod.owner.startswith(("Job/", "CronJob/"))
    }
    assert first == {
        "Job/tandem-migrate": ["ledger", "migrate"],
        "CronJob/tandem-housekeeping": ["ledger", "prune"],
        "CronJob/tandem-export": ["export", "--out"],
    }


def test_the_age_of_a_connection_cuts_no_stream(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(resources, monkeypatch)
    assert settings.max_connection_age_seconds is not None  # or new pods would get no traffic
    assert settings.max_connection_age_grace_seconds >= settings.max_deadline_seconds


def test_services_reach_the_port_of_a_pod(resources: list[Resource]) -> None:
    services = of_kind(resources, "Service")
    assert named(resources, "Service", "tandem-headless")["spec"]["clusterIP"] == "None"
    for entry in services:
        selector = {"matchLabels": entry["spec"]["selector"]}
        (pod,) = [pod for pod in pods(resources) if selects(selector, pod.labels)]
        names = {p["name"] for c in pod.spec["containers"] for p in c.get("ports", ())}
        for port in entry["spec"]["ports"]:
            assert port["targetPort"] in names
    for monitor in of_kind(resources, "ServiceMonitor"):
        (entry,) = [
            found
            for found in services
            if selects(monitor["spec"]["selector"], found["metadata"].get("labels", {}))
        ]
        ports = {port["name"] for port in entry["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


def test_a_route_leads_to_our_service(resources: list[Resource]) -> None:
    for route in of_kind(resources, "GRPCRoute"):
        assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
        for rule in route["spec"]["rules"]:
            served = {match["method"]["service"] for match in rule["matches"]}
            assert served == {SERVICE_NAME, "grpc.health.v1.Health"}
            for backend in rule["backendRefs"]:
                target = named(resources, "Service", backend["name"])
                assert backend["port"] in {p["port"] for p in target["spec"]["ports"]}


def test_traces_go_to_the_collector_by_a_port_that_it_opens(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = server_settings(resources, monkeypatch).otlp_endpoint
    if endpoint is None:
        assert not [r for r in resources if r["metadata"]["name"] == "tandem-collector"]
        return
    host, port = re.fullmatch(r"http://([\w-]+):(\d+)", endpoint).groups()  # type: ignore[union-attr]
    assert int(port) in {p["port"] for p in named(resources, "Service", host)["spec"]["ports"]}
    (config,) = [
        yaml.safe_load(r["data"]["config.yaml"])
        for r in of_kind(resources, "ConfigMap")
        if r["metadata"]["name"].startswith("tandem-collector-")
    ]
    listening = config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert listening.endswith(f":{port}")
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= config[kind].keys()
    assert "tail_sampling" in config["service"]["pipelines"]["traces"]["processors"]
    (pod,) = [p for p in pods(resources) if p.owner.endswith("/tandem-collector")]
    (health,) = [p for p in pod.spec["containers"][0]["ports"] if p["name"] == "health"]
    (extension,) = config["service"]["extensions"]  # which answers the probes
    assert config["extensions"][extension]["endpoint"].endswith(f":{health['containerPort']}")


def test_the_cache_fits_into_the_memory(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(resources, monkeypatch)
    if settings.device == "cuda":
        assert settings.kv_cache_memory < 1
        return
    # On a CPU a share would be taken of what the node has free, not of the container's limit.
    assert settings.kv_cache_memory > 1
    memory = num_bytes(serve_container(resources)["resources"]["requests"]["memory"])
    assert settings.kv_cache_memory <= memory / 2


def test_the_price_book_knows_the_machine(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = server_settings(resources, monkeypatch)
    (book,) = [
        r
        for r in of_kind(resources, "ConfigMap")
        if r["metadata"]["name"].startswith("tandem-prices-")
    ]
    assert settings.price_book is not None
    path = tmp_path / settings.price_book.name
    path.write_text(book["data"][path.name], encoding="utf-8")
    schedule_of(read_price_book(path), settings.machine_type, settings.purchase)
    # A replica of several GPUs or machines costs what all of them cost together.
    gpus = num_gpus(resources)
    expected = f"gpu-{gpus}" if gpus else "cpu-4"
    assert settings.machine_type == expected
    for pod in pods(resources):
        for container in pod.ours():
            priced = environment(resources, container).get("TANDEM_MACHINE_TYPE", expected)
            assert priced == expected, pod.owner


def test_files_that_settings_name_are_mounted(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(resources, monkeypatch)
    mounts = {Path(m["mountPath"]): m for m in serve_container(resources)["volumeMounts"]}
    assert settings.home in mounts
    volumes = {v["name"]: v for v in serve_pod(resources).spec["volumes"]}
    home = volumes[mounts[settings.home]["name"]]  # journals and pulled models outlive a pod
    assert home["persistentVolumeClaim"]["claimName"] == "tandem-home"
    assert settings.registry in mounts
    for path in (settings.price_book, settings.access_file, settings.experiment_file):
        assert path is None or mounts[path.parent]["readOnly"]
    if Path(settings.target).is_absolute():
        assert mounts[Path(settings.target).parent]["readOnly"]
    else:
        (pull,) = serve_pod(resources).spec["initContainers"]
        assert pull["args"] == ["models", "pull", "$(TANDEM_TARGET)"]


def test_volumes_claims_and_config_maps_exist(workloads: list[Resource]) -> None:
    claims = {r["metadata"]["name"] for r in of_kind(workloads, "PersistentVolumeClaim")}
    maps = {r["metadata"]["name"] for r in of_kind(workloads, "ConfigMap")}
    given = {"tandem-models", "tandem-prompts"}  # filled by hand beforehand
    assert all(f"`{name}`" in (K8S / "README.md").read_text(encoding="utf-8") for name in given)
    if not of_kind(workloads, "Deployment"):
        given.add("tandem-registry")  # of the overlay that the Job is applied beside
    for pod in pods(workloads):
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", ())}
        mounted = {m["name"] for c in pod.containers() for m in c.get("volumeMounts", ())}
        assert mounted == volumes.keys(), pod.owner
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims | given
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps or volume["configMap"].get("optional")
    used = {v["persistentVolumeClaim"]["claimName"] for p in pods(workloads)
            for v in p.spec.get("volumes", ()) if "persistentVolumeClaim" in v}  # fmt: skip
    assert claims <= used


def test_secrets_are_documented_or_come_from_a_vault(resources: list[Resource]) -> None:
    wanted = set()
    for pod in pods(resources):
        for container in pod.containers():
            for entry in container.get("env", ()):
                if key := entry.get("valueFrom", {}).get("secretKeyRef"):
                    wanted.add((key["name"], key["key"]))
        for volume in pod.spec.get("volumes", ()):
            if "secret" in volume:
                wanted.add((volume["secret"]["secretName"], "access.toml"))
    readme = (K8S / "README.md").read_text(encoding="utf-8")
    for name, key in wanted:
        assert f"`{name}`" in readme, name
        assert f"`{key}`" in readme, key
    for provider in of_kind(resources, "SecretProviderClass"):
        objects = {
            yaml.safe_load(item)["objectName"]
            for item in yaml.safe_load(provider["spec"]["parameters"]["objects"])["array"]
        }
        made = {
            (secret["secretName"], item["key"])
            for secret in provider["spec"]["secretObjects"]
            for item in secret["data"]
        }
        sources = {
            item["objectName"] for s in provider["spec"]["secretObjects"] for item in s["data"]
        }
        assert made == wanted
        assert sources == objects


def test_the_dashboard_and_the_alerts_are_the_generated_ones() -> None:
    folder = K8S / "components" / "monitoring"
    generate: dict[str, Any] = {"__file__": str(folder / "generate.py"), "__name__": "generate"}
    source = (folder / "generate.py").read_text(encoding="utf-8")
    exec(compile(source, "generate.py", "exec"), generate)  # noqa: S102 - our own file
    for name, content in generate["manifests"]().items():
        assert (folder / name).read_text(encoding="utf-8") == content, (
            f"{name} is old: python -m k8s.components.monitoring.generate"
        )
