"""The training Job goes on after an eviction, and what it makes is where servers look for it."""

from pathlib import Path
from typing import Any

import pytest

import service.cli_train
from engine.training.errors import EXIT_STOPPED
from engine.training.recipe import load_recipe
from tests.k8s.manifests import (
    TRAINING,
    Pod,
    Resource,
    build,
    environment,
    expand,
    named,
    of_kind,
    pods,
    serve_container,
    serve_pod,
)

_REFUSED = 2  # what service.cli_train ends with


@pytest.fixture(params=TRAINING)
def training(request: pytest.FixtureRequest) -> list[Resource]:
    return build(request.param)


def _job(training: list[Resource]) -> dict[str, Any]:
    found: dict[str, Any] = named(training, "Job", "tandem-train")["spec"]
    return found


def _pod(training: list[Resource]) -> Pod:
    (pod,) = pods(training)
    return pod


def _claim_at(pod: Pod, container: str, folder: str) -> tuple[str, bool]:
    """The claim that a container sees there, and whether it may write."""
    (found,) = [c for c in pod.containers() if c["name"] == container]
    (mount,) = [m for m in found["volumeMounts"] if folder.startswith(m["mountPath"])]
    (volume,) = [v for v in pod.spec["volumes"] if v["name"] == mount["name"]]
    claim = volume["persistentVolumeClaim"]
    return claim["claimName"], not (mount.get("readOnly") or claim.get("readOnly"))


def _options(training: list[Resource], name: str) -> dict[str, str]:
    """--name=value of a container."""
    (found,) = [c for c in _pod(training).containers() if c["name"] == name]
    arguments = expand(found["args"], environment(training, found))
    return dict(a.removeprefix("--").split("=", 1) for a in arguments if a.startswith("--"))


def test_an_eviction_is_no_failure_and_a_refusal_is_final(training: list[Resource]) -> None:
    job = _job(training)
    disrupted, stopped, refused = job["podFailurePolicy"]["rules"]
    assert disrupted["action"] == "Ignore"  # the first rule that fits decides
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert (stopped["action"], refused["action"]) == ("Ignore", "FailJob")
    for rule, code in ((stopped, EXIT_STOPPED), (refused, _REFUSED)):
        expected = {"containerName": "train", "operator": "In", "values": [code]}
        assert rule["onExitCodes"] == expected
    assert _pod(training).spec["restartPolicy"] == "Never"  # or the policy would not be asked
    assert job["backoffLimit"] > 0


def test_the_next_pod_finds_the_run_and_is_alone_with_it(training: list[Resource]) -> None:
    assert _job(training)["podReplacementPolicy"] == "Failed"
    assert _job(training).get("parallelism", 1) == 1
    assert _claim_at(_pod(training), "train", _options(training, "train")["out"]) == (
        "tandem-training",
        True,
    )
    # Longer than a step with its evaluation and checkpoint; the default is half a minute.
    assert _pod(training).spec["terminationGracePeriodSeconds"] >= 60


def test_the_deadline_leaves_room_for_evictions(training: list[Resource]) -> None:
    budget = service.cli_train._seconds(_options(training, "train")["budget"])
    assert 2 * budget <= _job(training)["activeDeadlineSeconds"] <= 4 * budget


def test_the_recipe_is_one_and_its_prompts_are_mounted(
    training: list[Resource], tmp_path: Path
) -> None:
    pod = _pod(training)
    (volume,) = [v for v in pod.spec["volumes"] if v["name"] == "recipe"]
    path = Path(_options(training, "train")["recipe"])
    data = named(training, "ConfigMap", volume["configMap"]["name"])["data"]
    (tmp_path / path.name).write_text(data[path.name], encoding="utf-8")
    recipe = load_recipe(tmp_path / path.name, {"target": '"x"'})
    assert recipe.data.prompts
    for prompts in recipe.data.prompts:
        assert _claim_at(pod, "train", prompts) == ("tandem-prompts", False)
    (claim,) = of_kind(training, "PersistentVolumeClaim")
    size = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))
    assert size >= 4 * recipe.features.max_gigabytes


def test_the_head_goes_from_the_run_into_the_registry_of_the_servers(
    training: list[Resource],
) -> None:
    pod = _pod(training)
    assert [c["name"] for c in pod.spec["initContainers"]][-1] == "train"
    (register,) = pod.spec["containers"]  # begins once the head is there
    variables = environment(training, register)
    arguments = expand(register["args"], variables)
    assert arguments[:2] == ["drafter", "register"]
    assert arguments[2] == f"{_options(training, 'train')['out']}/head"
    assert _claim_at(pod, "register", arguments[2]) == ("tandem-training", False)
    for overlay in ("dev-cpu", "prod-gpu"):
        serving = build(overlay)
        registry = environment(serving, serve_container(serving))["TANDEM_REGISTRY"]
        assert registry is not None
        claim, _ = _claim_at(serve_pod(serving), "serve", registry)
        assert _claim_at(pod, "register", variables["TANDEM_REGISTRY"] or "") == (claim, True)


def test_servers_take_a_gpu_from_training_and_not_the_other_way() -> None:
    training, serving = build("training/gpu"), build("prod-gpu")
    low, high = (
        named(resources, "PriorityClass", pod.spec["priorityClassName"])
        for resources, pod in ((training, _pod(training)), (serving, serve_pod(serving)))
    )
    assert low["value"] < high["value"]
    assert low["preemptionPolicy"] == "Never"
    (train,) = [c for c in _pod(training).containers() if c["name"] == "train"]
    assert train["resources"]["limits"]["nvidia.com/gpu"] == "1"
