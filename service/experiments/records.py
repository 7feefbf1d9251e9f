"""What was rolled back or promoted, kept on disk, so that a restart does not bring it back."""

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from service.experiments.specification import Experiment


@dataclass(frozen=True, slots=True)
class RollbackRecord:
    """started_at: of the experiment, so that a new start of the same name begins anew.
    at: UTC. rule: the sentence that decided. is_promoted: that it ended by being promoted: the
    name that the control drafts with stands for it now."""

    experiment: str
    started_at: str
    variant: str
    rule: str
    at: str
    is_promoted: bool = False


class RollbackStore:
    """A folder with one file per experiment, replaced by a rename."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, name: str) -> list[RollbackRecord]:
        """Raises OSError or ValueError for a file that is there and cannot be read."""
        path = self._path(name)
        if not path.exists():
            return []
        try:
            return [RollbackRecord(**entry) for entry in json.loads(path.read_text())]
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from error

    def rolled_back(self, experiment: Experiment) -> frozenset[str]:
        """Candidates of this very start of an experiment that have no share any more."""
        started_at = experiment.started_at.isoformat()
        records = self.of(experiment.name)
        return frozenset(r.variant for r in records if r.started_at == started_at)

    def add(self, record: RollbackRecord) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        records = [*self.of(record.experiment), record]
        descriptor, staged = tempfile.mkstemp(prefix=".rollback-", dir=self._folder)
        with os.fdopen(descriptor, "w") as handle:
            json.dump([asdict(r) for r in records], handle, indent=2)
            handle.flush()
            os.fsync(handle.fileno())
        Path(staged).replace(self._path(record.experiment))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"
