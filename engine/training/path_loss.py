"""The M-step's loss over weighted draft paths."""

from dataclasses import dataclass

import torch

from engine.training.path_sampling import SampledPaths
from engine.training.path_weights import (
    RejectionBalance,
    chain_moves,
    importance_weights,
    log_mixture,
    position_weights,
)
from engine.training.recipe import VariationalRecipe
from engine.training.scores import Teacher
from engine.training.utilities import accept_probs, find_utility


@dataclass(frozen=True, slots=True)
class PathReport:
    """Of one M-step batch, means over contexts."""

    loss: float
    utility: float
    effective_share: float


def path_loss(
    logits: torch.Tensor,
    paths: SampledPaths,
    teacher: Teacher,
    recipe: VariationalRecipe,
    balance: RejectionBalance,
    generator: torch.Generator,
) -> tuple[torch.Tensor, PathReport]:
    """The M-step's loss. logits [K, C * S, Vd] float32: the head's, along the paths."""
    num_contexts, num_paths, num_steps = paths.token_ids.shape
    shape = (num_steps, num_contexts, num_paths)
    draft_logprobs_all = torch.log_softmax(logits, dim=-1)
    index = paths.draft_index.permute(2, 0, 1).reshape(num_steps, -1, 1)
    of_path = draft_logprobs_all.gather(-1, index.clamp(min=0)).view(shape).permute(1, 2, 0)
    with torch.no_grad():
        is_draftable = paths.is_draftable
        accept = accept_probs(paths.target_logprobs, of_path.detach()) * is_draftable
        utility = find_utility(recipe.utility)(accept, paths.target_logprobs)
        target_logprobs = paths.target_logprobs.sum(-1)
        proposal = log_mixture(target_logprobs, paths.tempered_logprobs, 1.0 / num_paths)
        weighted = importance_weights(target_logprobs, proposal, utility, clip=recipe.clip)
        weights = weighted.weights
        if recipe.num_chain_moves:
            desired = target_logprobs + utility.clamp(min=1e-12).log()
            weights = chain_moves(desired, proposal, recipe.num_chain_moves, generator)
        imitate, correct = position_weights(accept)
        correct = correct * balance.weights(correct)
        node_logits = torch.matmul(paths.node_states, teacher.output_rows.t()).float()
        target_probs = torch.exp(node_logits - paths.node_normalizers.unsqueeze(1))
        target_probs /= target_probs.sum(1, keepdim=True).clamp(min=1e-9)
        target_probs = target_probs.view(*paths.token_ids.shape, -1).permute(2, 0, 1, 3)
    lesson = -(target_probs.flatten(1, 2) * draft_logprobs_all).sum(-1).view(shape).permute(1, 2, 0)
    per_path = (-imitate * of_path + correct * lesson).sum(-1)  # [C, S]
    loss = (weights * per_path).sum(-1).mean()
    report = PathReport(
        float(loss.detach()),
        float((weights * utility).sum(-1).mean()),
        float(weighted.effective_share.mean()),
    )
    return loss, report
