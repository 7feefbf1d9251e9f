"""The variational stage: rounds of expectation and maximisation over sampled draft paths.

A draft path z given its context is a latent variable; what is maximised is
E_q[log U(z)] - KL(q(z) || p(z)), q the head, p the target, U the path's utility (see
engine.training.path_weights). In a round the E-step draws paths from a snapshot of the head
and has the target score them all in one forward; the M-step raises the weighted likelihood of
the paths, teaches the target's own distribution where a path is first rejected, keeps the
head close to the target on the conversation itself, and holds its confidence to account.

A round is kept only if the held-out acceptance length at the served mixture of temperatures
rises. The first that does not is undone and the learning rate halved; the second ends the
stage. After Variational Speculative Decoding (arXiv 2602.05774), whose exact weighting and
regularisers are unpublished: ours here.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.drafter.head.model import Eagle3Head
from engine.training.batches import BatchOrder
from engine.training.capture import Features
from engine.training.checkpoints import CheckpointStore, TrainingState
from engine.training.distillation import Distillation
from engine.training.evaluation import (
    ConversationScore,
    greedy_acceptance_length,
    sampled_acceptance_length,
    served_acceptance_length,
)
from engine.training.feature_cache import CachedRow, FeatureCache
from engine.training.objectives import Objective, expected_accepted
from engine.training.path_loss import PathReport, path_loss
from engine.training.path_sampling import SampledPaths, choose_contexts, sample_paths
from engine.training.path_weights import RejectionBalance, confidence_penalty
from engine.training.precision import mixed_precision
from engine.training.recipe import VariationalRecipe
from engine.training.scores import DraftScores, Teacher
from engine.training.status import StatusLog
from engine.training.unrolled import make_batch, unroll

_MAX_FAILURES = 2


class VariationalTrainer:
    """Runs the rounds; everything drawn depends on seed, round and step alone."""

    def __init__(
        self,
        head: Eagle3Head,
        teacher: Teacher,
        model: PreTrainedModel,
        cache: FeatureCache,
        rows: list[CachedRow],
        evaluate: Callable[[], list[ConversationScore]],
        recipe: VariationalRecipe,
        objective: Objective,
        num_steps: int,
        batch_tokens: int,
        autocast_dtype: torch.dtype | None,
        folder: Path,
        card: dict[str, Any],
        sampled_share: float,
    ) -> None:
        """sampled_share of what is served is sampled: rounds are judged at that mixture."""
        self._sampled_share = sampled_share
        self._head = head
        self._teacher = teacher
        self._model = model
        self._cache = cache
        usable = [row for row in rows if row.num_output_tokens > num_steps + 2]
        self._order = BatchOrder(usable, batch_tokens=batch_tokens, seed=recipe.seed)
        self._evaluate = evaluate
        self._recipe = recipe
        self._num_steps = num_steps
        self._autocast_dtype = autocast_dtype
        self._teacher_path = _TeacherPath(head, teacher, objective, num_steps, autocast_dtype)
        self._balance = RejectionBalance(num_steps)
        self._store = CheckpointStore(folder)
        self._status = StatusLog(folder)
        self._card = card
        self._parameters = [p for p in head.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    @property
    def best_folder(self) -> Path | None:
        return self._store.find("best")

    def run(self) -> TrainingState:
        """All rounds, or until two of them brought nothing."""
        recipe = self._recipe
        settings = asdict(recipe)
        state = self._store.resume(self._head, self._optimizer, settings)
        if state is None:
            state = self._end_of_round(TrainingState(0, 0.0, 0, 0.0, settings), None)
        for number in range(state.step // recipe.steps_per_round, recipe.num_rounds):
            if state.num_failures == _MAX_FAILURES:
                break
            begun = time.monotonic()
            before = copy.deepcopy(self._head.state_dict())
            snapshot = copy.deepcopy(self._head).eval().requires_grad_(False)
            learning_rate = recipe.learning_rate * 0.5**state.num_failures
            # Learnt anew in each round: a resumed stage has nothing of the rounds before.
            self._balance = RejectionBalance(self._num_steps)
            for step in range(recipe.steps_per_round):
                self._step(snapshot, number, step, learning_rate, state.best_acceptance_length)
            state = replace(
                state,
                step=(number + 1) * recipe.steps_per_round,
                seconds=state.seconds + time.monotonic() - begun,
            )
            state = self._end_of_round(state, before)
        return state

    def _step(
        self, snapshot: Eagle3Head, number: int, step: int, learning_rate: float, best: float
    ) -> None:
        """best: the held-out length so far, to be shown."""
        recipe = self._recipe
        index = number * recipe.steps_per_round + step
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + index)
        conversations = [self._cache.read(row) for row in self._order[index]]
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad()
        teacher_loss, scores = self._teacher_path(conversations)
        paths = self._expectation(snapshot, conversations, scores, generator)
        loss, report = self._maximisation(paths, generator)
        penalty = _confidence_loss(scores)
        total = recipe.path_weight * loss + recipe.kl_weight * teacher_loss
        total = total + recipe.confidence_weight * penalty
        torch.autograd.backward(total)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        length = 1 + expected_accepted(scores.overlap, scores.is_valid)
        share = (index + 1) / (recipe.num_rounds * recipe.steps_per_round)
        self._status.line(
            f"variational {100 * share:.0f}% | "
            f"tau(batch) {length:.2f} | best tau {best:.3f} | round {number + 1}"
            f"/{recipe.num_rounds} step {step + 1}/{recipe.steps_per_round} | "
            f"utility {report.utility:.2f} | ESS {100 * report.effective_share:.0f}% | "
            f"loss {float(total.detach()):.3f}"
        )
        if step % 25 == 0:
            self._status.event(
                "step", round=number, step=step, acceptance_length=length, **asdict(report)
            )

    def _expectation(
        self,
        snapshot: Eagle3Head,
        conversations: list[Features],
        scores: DraftScores,
        generator: torch.Generator,
    ) -> SampledPaths:
        recipe = self._recipe
        batch = make_batch(conversations).to(self._head.device)
        is_match = torch.zeros_like(batch.anchors, dtype=torch.bool)
        is_match[batch.depth_limits > 0] = scores.is_match[0]
        per_row = max(1, recipe.contexts_per_batch // len(conversations))
        columns = choose_contexts(batch, is_match, per_row, self._num_steps, generator)
        with mixed_precision(self._head.device, self._autocast_dtype):
            return sample_paths(
                snapshot,
                self._teacher,
                self._model,
                conversations,
                columns,
                num_paths=recipe.num_paths,
                num_steps=self._num_steps,
                temperature=recipe.temperature,
                generator=generator,
            )

    def _maximisation(
        self, paths: SampledPaths, generator: torch.Generator
    ) -> tuple[torch.Tensor, PathReport]:
        flat = paths.token_ids.view(*paths.batch.anchors.shape, self._num_steps)
        with mixed_precision(self._head.device, self._autocast_dtype):
            outputs = unroll(self._head, paths.batch, self._num_steps, flat)
            states = torch.stack([output.flatten(0, 1) for output in outputs])  # [K, R, H]
            logits = torch.matmul(states, self._head.lm_head.weight.t())
        return path_loss(
            logits.float(), paths, self._teacher, self._recipe, self._balance, generator
        )

    def _end_of_round(
        self, state: TrainingState, before: dict[str, torch.Tensor] | None
    ) -> TrainingState:
        """Keep the round if the served acceptance length rose, else go back to `before`."""
        scores = self._evaluate()
        length = greedy_acceptance_length(scores, self._num_steps)
        sampled = sampled_acceptance_length(scores, self._num_steps)
        served = served_acceptance_length(length, sampled, self._sampled_share)
        is_best = served > state.best_acceptance_length
        if is_best:
            state = replace(state, best_acceptance_length=served, best_step=state.step)
        elif before is not None:
            self._head.load_state_dict(before)
            state = replace(state, num_failures=state.num_failures + 1)
        card = self._card | {
            "step": state.step,
            "held_out": {"acceptance_length": length, "acceptance_length_sampled": sampled},
        }
        self._store.save(self._head, self._optimizer, state, card, is_best=is_best)
        self._status.event(
            "evaluation",
            step=state.step,
            acceptance_length=round(length, 4),
            acceptance_length_sampled=round(sampled, 4),
            is_kept=is_best,
            seconds=round(state.seconds, 1),
        )
        self._status.line(
            f"round ends at step {state.step}: held-out tau {length:.3f} (T=0), {sampled:.3f} "
            f"(T=1), {'kept' if is_best else 'undone'}; best "
            f"{state.best_acceptance_length:.3f}@{state.best_step}",
            is_final=True,
        )
        return state


class _TeacherPath:
    """The loss on the conversations themselves, and the scores it was made of."""

    def __init__(
        self,
        head: Eagle3Head,
        teacher: Teacher,
        objective: Objective,
        num_steps: int,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        self._module = Distillation(head, teacher, objective, num_steps, autocast_dtype)

    def __call__(self, conversations: list[Features]) -> tuple[torch.Tensor, DraftScores]:
        batch = make_batch(conversations).to(self._module.head.device)
        scores = self._module.scores(batch, needs_confidence_gradient=True)
        return self._module.objective.loss(scores), scores


def _confidence_loss(scores: DraftScores) -> torch.Tensor:
    """Along the conversation: accepted means that the head's best token is the target's."""
    accepted = scores.is_match.float()
    before = torch.ones_like(accepted)
    before[1:] = accepted[:-1].cumprod(0)
    return confidence_penalty(scores.confidence, accepted, before * scores.is_valid)
