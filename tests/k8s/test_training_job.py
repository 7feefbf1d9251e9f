"""The training Jobs' own commands, ended in the middle, go on and fill the registry."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import service.models
from engine.drafter.head.files import read_card
from engine.drafter.registry import HeadRegistry
from engine.training.errors import EXIT_STOPPED
from service.models import CATALOGUE, model_path
from tests.k8s.kubelet import publish
from tests.k8s.manifests import build, environment, expand, pods
from tests.tiny import save_tiny_model

_RECIPE = """
dtype = "float32"
[data]
prompts = ["PROMPTS/train.jsonl"]
max_prompt_tokens = 64
max_output_tokens = 24
held_out_share = 0.2
[head]
draft_vocab_size = 256
[variational]
num_rounds = 1
num_paths = 2
contexts_per_batch = 8
control_objectives = ["kl"]
"""
_BUDGET = "20s"
_DEADLINE_SECONDS = 400

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Node:
    """Runs containers of the Job with its volumes as folders here."""

    def __init__(self, folder: Path, job: str) -> None:
        self.folder = folder
        self._resources = build(job)
        (pod,) = pods(self._resources)
        self._containers = {c["name"]: c for c in pod.containers()}
        self.names = list(self._containers)

    def at(self, path: str) -> Path:
        """Where a path of a container lies on this machine."""
        return self.folder / path.removeprefix("/")

    def start(self, name: str) -> subprocess.Popen[str]:
        container = self._containers[name]
        variables = environment(self._resources, container) | {"BUDGET": _BUDGET, "THREADS": "1"}
        arguments = [self._here(text, container) for text in expand(container["args"], variables)]
        given = {n: self._here(v, container) for n, v in variables.items() if v is not None}
        outside = {n: v for n, v in os.environ.items() if not n.startswith("TANDEM_")}
        return subprocess.Popen(
            [Path(sys.executable).with_name("tandem"), *arguments],
            env={**outside, **given, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, name: str) -> str:
        """What it printed; it must have ended well."""
        process = self.start(name)
        printed, _ = process.communicate(timeout=_DEADLINE_SECONDS)
        assert process.returncode == 0, printed
        return printed

    def _here(self, text: str, container: Mapping[str, Any]) -> str:
        mounts = "|".join(mount["mountPath"] for mount in container["volumeMounts"])
        return re.sub(rf"(^|=)({mounts})(?=/|$)", lambda m: f"{m[1]}{self.at(m[2])}", text)


@pytest.fixture
def node(tmp_path: Path, job: str) -> Node:
    """With a tiny target in the place of the one that the Job names."""
    found = Node(tmp_path, job)
    for folder in ("/runs", "/registry", "/prompts", "/tmp"):  # noqa: S108 - below tmp_path
        found.at(folder).mkdir(exist_ok=True)
    if job == "training/gpu":
        save_tiny_model(found.at("/models/target"), num_layers=8)
    else:  # of the catalogue, and pulled by an earlier pod
        (entry,) = CATALOGUE.values()
        folder = save_tiny_model(model_path(entry.name, found.at("/runs/home")), num_layers=8)
        service.models._write_manifest(entry, folder)
    lines = [json.dumps({"prompt": f"the quick brown fox number {i}"}) for i in range(40)]
    (found.at("/prompts") / "train.jsonl").write_text("\n".join(lines))
    recipe = _RECIPE.replace("PROMPTS", str(found.at("/prompts")))
    publish(found.at("/etc/tandem/recipe"), "recipe.toml", recipe, "..1")
    return found


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(_DEADLINE_SECONDS * 10):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError(f"{path} was never written")


@pytest.mark.parametrize(
    ("job", "before", "sent", "expected"),
    [
        ("training/gpu", [], signal.SIGTERM, EXIT_STOPPED),  # evicted
        ("training/cpu", ["pull"], signal.SIGKILL, -signal.SIGKILL),  # its node is gone
    ],
)
def test_a_job_that_was_ended_goes_on_and_registers_its_head_once(
    node: Node, before: list[str], sent: signal.Signals, expected: int
) -> None:
    assert node.names == [*before, "train", "register"]
    for name in before:
        node.run(name)
    ended = node.start("train")
    try:
        _wait_for(node.at("/runs/chat-1/distill/latest"), ended)
        ended.send_signal(sent)
        printed, _ = ended.communicate(timeout=120)
    finally:
        ended.kill()
    assert ended.returncode == expected, printed
    answers = sorted(node.at("/runs/chat-1/data").glob("*.jsonl"))
    written_at = [path.stat().st_mtime_ns for path in answers]
    assert answers

    for name in [*before, "train"]:
        node.run(name)
    assert [path.stat().st_mtime_ns for path in answers] == written_at, "answered anew"
    head = node.at("/runs/chat-1/head")
    assert read_card(head)["evaluation"]

    for _ in range(2):  # a pod that is evicted while it registers is run again
        assert node.run("register").startswith("chat@0001 ")
    registry = HeadRegistry(node.at("/registry"))
    (registered,) = registry.versions("chat")
    assert registered.note == "chat-1"
    weights = registry.folder_of("chat", "0001") / "model.safetensors"
    assert weights.read_bytes() == (head / "model.safetensors").read_bytes()


@pytest.mark.parametrize("job", ["training/cpu"])
def test_a_recipe_that_is_refused_ends_with_the_code_that_fails_the_job(node: Node) -> None:
    publish(node.at("/etc/tandem/recipe"), "recipe.toml", "[data]\nprompt = 1\n", "..2")
    process = node.start("train")
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 2, printed
    assert "data.prompt" in printed
