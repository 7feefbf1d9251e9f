"""A run folder, and what its stages share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from engine.drafter.head.tap import default_captured_layers
from engine.loader import LoadedModel, load_model
from engine.training.errors import TrainingError
from engine.training.recipe import Recipe


@dataclass(slots=True)
class Run:
    """A run folder and what its stages share; the target is loaded when it is first needed."""

    folder: Path
    recipe: Recipe
    accelerator: Accelerator
    _target: LoadedModel | None = None
    _makes_alone: bool = False

    @property
    def target(self) -> LoadedModel:
        if self._target is None:
            device = str(self.accelerator.device)
            self._target = load_model(self.recipe.target, dtype=self.recipe.dtype, device=device)
            self._target.model.set_attn_implementation("sdpa")
        return self._target

    @property
    def captured_layers(self) -> tuple[int, ...]:
        num_layers = self.target.model.config.get_text_config().num_hidden_layers
        return self.recipe.head.captured_layers or default_captured_layers(num_layers)

    @property
    def identity(self) -> dict[str, Any]:
        """What features must have been made with."""
        return {
            "target_fingerprint": self.target.fingerprint,
            "dtype": str(self.target.model.dtype).removeprefix("torch."),
            "captured_layers": list(self.captured_layers),
        }

    def on_main(self, make: Callable[[], None]) -> None:
        """Have the main process make files that all read; the others wait until they are there.

        Within make nobody is waited for. What it raises is raised there; in the others
        TrainingError says the same, so that nobody waits for ever.
        """
        if self.accelerator.num_processes == 1 or self._makes_alone:
            make()
            return
        told: list[str | None] = [None]
        failure: Exception | None = None
        if self.accelerator.is_main_process:
            self._makes_alone = True
            try:
                make()
            except Exception as error:
                failure, told = error, [str(error)]
            finally:
                self._makes_alone = False
        broadcast_object_list(told)
        if failure is not None:
            raise failure
        if told[0] is not None:
            raise TrainingError(told[0])
