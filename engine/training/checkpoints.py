"""Checkpoints of a training run: each one a head that can be served, and all that resumes.

A checkpoint is a folder that appears whole. `latest` and `best` are small text files that name
one. Nothing random is kept: what is drawn in a step depends on the seed and the step alone.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.drafter.head.files import save_head
from engine.drafter.head.model import Eagle3Head
from engine.training import atomic_files
from engine.training.errors import TrainingError

_OPTIMIZER = "optimizer.safetensors"
_MASTER = "master.safetensors"
_STATE = "state.json"
_KEPT = 2


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Where a run is. best_acceptance_length is of held-out conversations at the served
    mixture of temperatures; num_failures counts rounds that were undone."""

    step: int
    best_acceptance_length: float
    best_step: int
    seconds: float
    settings: dict[str, Any]
    num_failures: int = 0


class CheckpointStore:
    """The checkpoints of one stage of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self,
        head: Eagle3Head,
        optimizer: torch.optim.Optimizer,
        state: TrainingState,
        card: Mapping[str, Any],
        *,
        is_best: bool,
    ) -> Path:
        name = f"step-{state.step:06d}"

        def fill(folder: Path) -> None:
            save_head(folder, head, card, is_slim=True)
            trained = {n: p.detach().cpu().contiguous() for n, p in _trained(head)}
            save_file(trained, folder / _MASTER)
            save_file(_optimizer_tensors(head, optimizer), folder / _OPTIMIZER)
            content = {name: getattr(state, name) for name in TrainingState.__slots__}
            (folder / _STATE).write_text(json.dumps(content, indent=2) + "\n")

        path = self.folder / name
        atomic_files.write_folder(path, fill)
        atomic_files.write_bytes(self.folder / "latest", name.encode())
        if is_best:
            atomic_files.write_bytes(self.folder / "best", name.encode())
        self._prune()
        return path

    def find(self, which: str) -> Path | None:
        """The folder that `latest` or `best` names."""
        pointer = self.folder / which
        if not pointer.exists():
            return None
        path = self.folder / pointer.read_text().strip()
        return path if path.is_dir() else None

    def resume(
        self, head: Eagle3Head, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
    ) -> TrainingState | None:
        """Bring head and optimizer to the latest checkpoint; None if there is none.

        Raises TrainingError naming a setting that differs from the run's own.
        """
        path = self.find("latest")
        if path is None:
            return None
        content = json.loads((path / _STATE).read_text())
        for name, value in settings.items():
            kept = content["settings"].get(name)
            if json.loads(json.dumps(value)) != kept:
                raise TrainingError(
                    f"{name}: the run in {self.folder} was begun with {kept!r}, not {value!r}; "
                    "resume it as it was, or begin another"
                )
        master = load_file(path / _MASTER)
        tensors = load_file(path / _OPTIMIZER)
        state: dict[int, dict[str, torch.Tensor]] = {}
        with torch.no_grad():
            for index, (name, parameter) in enumerate(_trained(head)):
                parameter.copy_(master[name])
                state[index] = {
                    key.rpartition("/")[2]: value
                    for key, value in tensors.items()
                    if key.rpartition("/")[0] == name
                }
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        return TrainingState(**content)

    def _prune(self) -> None:
        kept = {path.name for which in ("latest", "best") if (path := self.find(which))}
        steps = sorted(self.folder.glob("step-*"))
        for path in steps[:-_KEPT]:
            if path.name not in kept:
                shutil.rmtree(path)


def _trained(head: Eagle3Head) -> list[tuple[str, torch.nn.Parameter]]:
    return [(n, p) for n, p in head.named_parameters() if p.requires_grad]


def _optimizer_tensors(
    head: Eagle3Head, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """name/key -> tensor; moments stay float32, or a resumed run would drift."""
    states = optimizer.state_dict()["state"]
    names = [name for name, _ in _trained(head)]
    return {
        f"{names[index]}/{key}": torch.as_tensor(value).cpu().contiguous().clone()
        for index, entries in states.items()
        for key, value in entries.items()
    }
