"""The training loop: steps, held-out evaluation, checkpoints, a clean stop.

Runs as one process or as several under `accelerate launch` or torchrun. A step is made of
`batches_per_step` batches, shared out over the processes; their gradients are averaged, so
that the number of processes does not change what is learned.
"""

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from engine.training.batches import BatchOrder
from engine.training.checkpoints import CheckpointStore, TrainingState
from engine.training.distillation import Distillation
from engine.training.errors import StoppedError, TrainingError
from engine.training.evaluation import (
    ConversationScore,
    greedy_acceptance_length,
    sampled_acceptance_length,
    served_acceptance_length,
)
from engine.training.feature_cache import CachedRow, FeatureCache
from engine.training.status import StatusLog, duration
from engine.training.unrolled import make_batch


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What decides the result of a run, the processes apart.

    learning_rate falls by a cosine to final_rate_share of itself over num_steps, after
    warmup_steps. batch_tokens: padded positions of one batch. sampled_share of what is served is
    sampled: the best checkpoint is the best at that mixture.
    """

    num_steps: int
    objective: str = "kl"
    learning_rate: float = 1e-3
    final_rate_share: float = 0.05
    warmup_steps: int = 20
    batch_tokens: int = 2048
    batches_per_step: int = 1
    num_draft_steps: int = 4
    clip_norm: float = 1.0
    seed: int = 0
    evaluate_every: int = 200
    num_drafts_served: int = 4
    has_prompt_anchors: bool = False
    sampled_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_tokens", "batches_per_step", "num_draft_steps"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < 1:
            raise TrainingError(f"learning_rate: must be in (0, 1), got {self.learning_rate}")


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Of a step counted from 0."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    share = (step - settings.warmup_steps) / max(1, settings.num_steps - settings.warmup_steps)
    low = settings.final_rate_share
    return settings.learning_rate * (
        low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    )


class Trainer:
    """Trains one head on cached features."""

    def __init__(
        self,
        module: Distillation,
        cache: FeatureCache,
        rows: Sequence[CachedRow],
        evaluate: Callable[[], list[ConversationScore]],
        settings: TrainSettings,
        folder: Path,
        card: dict[str, Any],
        accelerator: Accelerator,
    ) -> None:
        if settings.batches_per_step % accelerator.num_processes:
            raise TrainingError(
                f"batches_per_step: {settings.batches_per_step} cannot be shared out evenly over "
                f"{accelerator.num_processes} processes"
            )
        self._accelerator = accelerator
        self._module = module
        self._cache = cache
        self._order = BatchOrder(rows, batch_tokens=settings.batch_tokens, seed=settings.seed)
        self._evaluate = evaluate
        self._settings = settings
        self._card = card
        self._store = CheckpointStore(folder)
        self._status = StatusLog(folder, is_main=accelerator.is_main_process)
        parameters = [p for p in module.head.parameters() if p.requires_grad]
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(
            parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._wrapped = accelerator.prepare(module) if accelerator.num_processes > 1 else module
        self._is_stopping = False

    def run(self, *, max_seconds: float | None = None) -> TrainingState:
        """Train to the end, or until max_seconds of this stage were spent in all.

        Raises StoppedError after SIGTERM or SIGINT, once the step is saved.
        """
        settings = self._settings
        state = self._store.resume(self._module.head, self._optimizer, asdict(settings))
        if state is None:
            state = TrainingState(0, 0.0, 0, 0.0, asdict(settings))
            state = self._checkpoint(state, time.monotonic())
        previous = [signal.signal(s, self._stop) for s in (signal.SIGTERM, signal.SIGINT)]
        begun = time.monotonic() - state.seconds
        is_over = _is_over(state.seconds, max_seconds)
        try:
            while state.step < settings.num_steps and not is_over:
                self._step(state.step, begun)
                seconds = time.monotonic() - begun
                state = replace(state, step=state.step + 1, seconds=seconds)
                is_over, is_stopping = self._any(_is_over(seconds, max_seconds), self._is_stopping)
                is_last = state.step == settings.num_steps or is_over or is_stopping
                if is_last or state.step % settings.evaluate_every == 0:
                    state = self._checkpoint(state, begun)
                if is_stopping:
                    raise StoppedError
        finally:
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), previous, strict=True):
                signal.signal(number, handler)
        self._status.line(
            f"done at step {state.step}: best tau {state.best_acceptance_length:.3f}"
            f"@{state.best_step}",
            is_final=True,
        )
        return state

    @property
    def best_folder(self) -> Path | None:
        return self._store.find("best")

    def _stop(self, *_: object) -> None:
        if self._is_stopping:
            raise SystemExit(1)
        self._is_stopping = True

    def _any(self, *flags: bool) -> list[bool]:
        """What one process says holds for all: each has a clock and hears signals of its own, and
        one that took no further step would leave the others waiting for it."""
        if self._accelerator.num_processes == 1:
            return list(flags)
        told = torch.tensor(flags, dtype=torch.int32, device=self._accelerator.device)
        return [count > 0 for count in self._accelerator.reduce(told, "sum").tolist()]

    def _step(self, step: int, begun: float) -> None:
        settings, accelerator = self._settings, self._accelerator
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        self._optimizer.zero_grad()
        first = step * settings.batches_per_step
        share = settings.batches_per_step // accelerator.num_processes
        for number in range(share):
            index = first + number * accelerator.num_processes + accelerator.process_index
            batch = make_batch(
                [self._cache.read(row) for row in self._order[index]],
                has_prompt_anchors=settings.has_prompt_anchors,
            ).to(self._module.head.device)
            is_last = number == share - 1
            if is_last or accelerator.num_processes == 1:
                (self._wrapped(batch) / share).backward()
            else:
                with accelerator.no_sync(self._wrapped):
                    (self._wrapped(batch) / share).backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, settings.clip_norm)
        self._optimizer.step()
        self._show(step, begun)

    def _show(self, step: int, begun: float) -> None:
        report = self._module.report
        if report is None:
            return
        settings = self._settings
        seconds = time.monotonic() - begun
        left = seconds / (step + 1) * (settings.num_steps - step - 1)
        cond = " ".join(f"{value:.2f}" for value in report.greedy_accept_cond)
        self._status.line(
            f"{settings.objective} {100 * (step + 1) / settings.num_steps:.0f}% | "
            f"tau(batch) {report.acceptance_length:.2f} | step {step + 1}/{settings.num_steps} | "
            f"accept {cond} | loss {report.loss:.3f} | ETA {duration(left)}"
        )

    def _checkpoint(self, state: TrainingState, begun: float) -> TrainingState:
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            scores = self._evaluate()
            length = greedy_acceptance_length(scores, self._settings.num_drafts_served)
            sampled = sampled_acceptance_length(scores, self._settings.num_drafts_served)
            served = served_acceptance_length(length, sampled, self._settings.sampled_share)
            is_best = served > state.best_acceptance_length
            if is_best:
                state = TrainingState(state.step, served, state.step, state.seconds, state.settings)
            card = self._card | {
                "step": state.step,
                "held_out": {"acceptance_length": length, "acceptance_length_sampled": sampled},
            }
            self._store.save(self._module.head, self._optimizer, state, card, is_best=is_best)
            report = self._module.report
            self._status.event(
                "evaluation",
                step=state.step,
                acceptance_length=round(length, 4),
                acceptance_length_sampled=round(sampled, 4),
                loss=report.loss if report else None,
                seconds=round(state.seconds, 1),
            )
            self._status.line(
                f"step {state.step}: held-out tau {length:.3f} (T=0), {sampled:.3f} (T=1); "
                f"best {state.best_acceptance_length:.3f}@{state.best_step}",
                is_final=True,
            )
        self._accelerator.wait_for_everyone()
        return state


def _is_over(seconds: float, max_seconds: float | None) -> bool:
    return max_seconds is not None and seconds >= max_seconds
