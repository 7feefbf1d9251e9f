"""The package `speculators` reads what is written here, computes the same, and the other way round.

It cannot be installed beside our torch; `make test-speculators` puts it into a folder of its own.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.drafter.head.config import HeadConfig
from engine.drafter.head.files import save_head
from engine.drafter.head.importing import import_head
from engine.drafter.head.model import Eagle3Head
from engine.loader import LoadedModel, load_model
from engine.training.unrolled import unroll
from tests.engine.heads import NUM_LAYERS, batch_of, config_for, random_head, texts
from tests.tiny import save_tiny_model

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "build" / "speculators"
NUM_STEPS = 3
VOCABULARY = list(range(3, 203))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PACKAGE.is_dir(), reason="not there: make test-speculators"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_tiny_model(tmp_path_factory.mktemp("target"), num_layers=NUM_LAYERS)
    return load_model(str(folder), dtype="float32", device="cpu")


def _head(target: LoadedModel, **flags: Any) -> Eagle3Head:
    config = config_for(target, len(VOCABULARY))
    config = replace(config, norm_before_fc=False, target_name=target.name)
    head = random_head(target, replace(config, **flags), VOCABULARY)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 2.0, generator=generator)
        elif name not in ("embed_tokens.weight", "lm_head.weight"):
            parameter.mul_(5)
    return head


@pytest.mark.parametrize(
    "flags",
    [
        {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
        {"norm_before_fc": False, "norm_output": False, "norm_before_residual": False},
        {"fc_norm": True, "norm_output": True, "norm_before_residual": False},
    ],
    ids=["eagle 3.1", "eagle 3", "a norm per layer"],
)
def test_it_computes_what_we_compute_and_writes_what_we_read(
    target: LoadedModel, tmp_path: Path, flags: dict[str, bool]
) -> None:
    head = _head(target, **flags)
    folder = tmp_path / "head"
    folder.mkdir()
    save_head(folder, head, {}, dtype=torch.float32)
    row = texts()[0]
    batch = batch_of(target, head.config, [row])
    length = len(row) - 1
    given = {
        "captured": batch.captured[0, :length].clone(),
        "token_ids": torch.tensor(row[1:]),
        "num_steps": NUM_STEPS,
    }
    torch.save(given, tmp_path / "inputs.pt")
    _run(folder, tmp_path / "inputs.pt", tmp_path / "logits.pt", tmp_path / "written")
    theirs = torch.load(tmp_path / "logits.pt", weights_only=True)
    with torch.no_grad():
        ours = [head.lm_head(output)[0] for output in unroll(head, batch, NUM_STEPS)]
    for step in range(NUM_STEPS):
        count = length - step  # later positions are fed past the end
        expected = ours[step][:count]
        difference = (theirs[step][:count] - expected).abs().max() / expected.abs().max()
        assert difference < 1e-5, f"step {step}"
    found = import_head(tmp_path / "written", target).head
    assert _without_names(found.config) == _without_names(head.config)
    for name, tensor in head.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def _without_names(config: HeadConfig) -> HeadConfig:
    return replace(config, target_name="", target_architecture="")


def _run(*arguments: Path) -> None:
    program = Path(__file__).with_name("speculators_program.py")
    done = subprocess.run(
        [sys.executable, program, *arguments],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
