"""An experiment is changed by its ConfigMap alone: no pod is made anew."""

from pathlib import Path

import pytest

from service.experiments.specification import read_experiment
from tests.k8s.manifests import Resource, build, environment, serve_container, serve_pod


def test_the_config_map_is_what_servers_mount_and_keeps_its_name(
    resources: list[Resource], tmp_path: Path
) -> None:
    (made,) = build("experiment")
    path = Path(environment(resources, serve_container(resources))["TANDEM_EXPERIMENT_FILE"] or "")
    (mount,) = [
        m for m in serve_container(resources)["volumeMounts"] if m["mountPath"] == str(path.parent)
    ]
    assert "subPath" not in mount  # what is mounted so is never updated
    (volume,) = [v for v in serve_pod(resources).spec["volumes"] if v["name"] == mount["name"]]
    assert volume["configMap"] == {"name": made["metadata"]["name"], "optional": True}
    assert made["metadata"]["namespace"] == "tandem"
    (tmp_path / path.name).write_text(made["data"][path.name], encoding="utf-8")
    assert len(read_experiment(tmp_path / path.name).variants) == 2


def test_servers_look_for_changed_files(resources: list[Resource]) -> None:
    wait = environment(resources, serve_container(resources))["TANDEM_RELOAD_SECONDS"]
    assert wait is not None
    assert 0 < float(wait) <= 60


@pytest.mark.parametrize("kind", ["configMap", "secret"])
def test_nothing_that_is_read_again_is_mounted_by_a_sub_path(
    resources: list[Resource], kind: str
) -> None:
    changing = {v["name"] for v in serve_pod(resources).spec["volumes"] if kind in v}
    for mount in serve_container(resources)["volumeMounts"]:
        assert mount["name"] not in changing or "subPath" not in mount
