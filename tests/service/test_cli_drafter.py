"""`tandem drafter` on a tiny target and heads in folders."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from engine.drafter.head.file_names import CARD, CONFIG
from engine.drafter.head.files import load_head, save_head
from engine.loader import LoadedModel, load_model
from service.cli_drafter import app
from service.cli_train import sign_heads
from tests.engine.heads import NUM_LAYERS, config_for, random_head
from tests.tiny import save_tiny_model

_VOCABULARY = list(range(3, 203))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_tiny_model(tmp_path_factory.mktemp("target"), num_layers=NUM_LAYERS)
    return load_model(str(folder), dtype="float32", device="cpu")


@pytest.fixture
def head(target: LoadedModel, tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    folder.mkdir()
    made = random_head(target, config_for(target, len(_VOCABULARY)), _VOCABULARY)
    save_head(folder, made, {"target_fingerprint": target.fingerprint}, dtype=torch.float32)
    return folder


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_inspect_prints_the_card_and_every_mismatch(target: LoadedModel, head: Path) -> None:
    good = _run("inspect", head, "--target", target.name)
    assert good.exit_code == 0, good.output
    assert "no mismatch" in good.output
    assert target.fingerprint in good.output
    (head / CARD).write_text(json.dumps({"target_fingerprint": "another"}))
    content = json.loads((head / CONFIG).read_text())
    content["eagle_aux_hidden_state_layer_ids"] = [2, 4, 99]
    (head / CONFIG).write_text(json.dumps(content))
    bad = _run("inspect", head, "--target", target.name)
    assert bad.exit_code == 1
    assert "refused  target_fingerprint: made for another" in bad.output
    assert "refused  eagle_aux_hidden_state_layer_ids: [2, 4, 99]" in bad.output


def test_export_and_import_come_back_to_the_same_head(
    target: LoadedModel, head: Path, tmp_path: Path
) -> None:
    refused = _run("export", head, tmp_path / "x", "--to", "eagle", "--target", target.name)
    assert refused.exit_code == 1
    assert "cannot be said in the format 'eagle'" in refused.output
    exported = _run("export", head, tmp_path / "out", "--target", target.name)
    assert exported.exit_code == 0, exported.output
    imported = _run("import", tmp_path / "out", tmp_path / "back", "--target", target.name)
    assert imported.exit_code == 0, imported.output
    assert json.loads((tmp_path / "back" / CARD).read_text())["imported_from"] == "speculators"
    first, last = (load_head(tmp_path / name, target.model) for name in ("out", "back"))
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), last.parameters(), strict=True)
    )


def test_probe_lists_what_it_measured_and_writes_the_best(
    target: LoadedModel, head: Path, tmp_path: Path
) -> None:
    result = _run(
        "probe", head, "--target", target.name, "--num-texts", 2, "--num-tokens", 8,
        "--apply", tmp_path / "best",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "as it is" in result.output
    assert "captured_layers" in result.output
    load_head(tmp_path / "best", target.model, target_fingerprint=target.fingerprint)


def _compared(path: Path, ci: list[float], heads: dict[str, Path]) -> None:
    by_source = {"chat": {"num_conversations": 10, "acceptance_length": 2.0}}
    comparison = {"greedy": {"difference": sum(ci) / 2, "ci": ci}}
    evaluation = {
        "heads": {name: {"by_source": by_source} for name in heads},
        "comparisons": {"new - old": comparison},
    }
    sign_heads(evaluation, heads)
    path.write_text(json.dumps(evaluation))


def test_the_registry_from_registering_to_going_back(head: Path, tmp_path: Path) -> None:
    where = ("--registry", tmp_path / "registry")
    assert _run("register", head, "--name", "chat", *where).output.startswith("chat@0001 ")
    old = shutil.copytree(head, tmp_path / "old")
    content = json.loads((head / CONFIG).read_text())
    content["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 5
    (head / CONFIG).write_text(json.dumps(content))
    assert _run("register", head, "--name", "chat", *where).output.startswith("chat@0002 ")
    assert _run("promote", "chat@0001", *where).exit_code == 0
    refused = _run("promote", "chat@0002", *where)
    assert refused.exit_code == 1
    assert "another version is in use" in refused.output
    evaluation = tmp_path / "evaluation.json"
    proof = ("--evaluation", evaluation, "--candidate", "new", "--production", "old")
    _compared(evaluation, [-0.01, 0.2], {"old": old, "new": head})
    refused = _run("promote", "chat@0002", *proof, *where)
    assert refused.exit_code == 1
    assert "not significantly better" in refused.output
    assert _run("promote", "chat@0002", "--force", *where).exit_code == 0
    assert _run("rollback", "chat", *where).exit_code == 0
    _compared(evaluation, [0.05, 0.2], {"old": old, "new": old})
    refused = _run("promote", "chat@0002", *proof, *where)
    assert refused.exit_code == 1
    assert "'new' is the head" in refused.output, "the proof is another head's"
    _compared(evaluation, [0.05, 0.2], {"old": old, "new": head})
    promoted = _run("promote", "chat@0002", *proof, *where)
    assert json.loads(promoted.output)["reason"]["ci"] == [0.05, 0.2]
    assert "* chat@0002" in _run("list", *where).output
    assert json.loads(_run("rollback", "chat", *where).output)["current"] == "0001"
    again = _run("rollback", "chat", *where)
    assert again.exit_code == 1
    assert "no earlier version" in again.output
    assert _run("promote", "chat", *where).exit_code == 2
