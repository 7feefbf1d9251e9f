"""What the ledger and the spans keep of a request's parameters and results. Pure."""

from collections.abc import Mapping

from engine.request import MAX_LABEL_CHARACTERS, MAX_LABELS, GenerationRequest
from engine.stats import RequestStats
from telemetry import names
from telemetry.ledger.records import RequestCost, SamplingSummary


def sampling_summary(request: GenerationRequest) -> SamplingSummary:
    """The sampling parameters that the ledger has columns for."""
    sampling = request.sampling
    return SamplingSummary(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        acceptance_rule=str(sampling.acceptance_rule),
        seed=sampling.seed,
        speculation_mode=str(request.speculation.mode),
        max_tokens=request.stopping.max_tokens,
    )


def span_attributes(stats: RequestStats, cost: RequestCost) -> dict[str, str | int | list[str]]:
    """Attributes of the generation span; energy is left out where it is not known."""
    attributes: dict[str, str | int | list[str]] = {
        names.ATTR_GEN_AI_INPUT_TOKENS: stats.num_prompt_tokens,
        names.ATTR_GEN_AI_CACHED_TOKENS: stats.num_cached_prompt_tokens,
        names.ATTR_GEN_AI_OUTPUT_TOKENS: stats.num_output_tokens,
        names.ATTR_GEN_AI_FINISH_REASONS: [str(stats.finish_reason)],
        names.ATTR_GEN_AI_REQUEST_SEED: stats.seed,
        names.ATTR_GEN_AI_RESPONSE_ID: stats.request_id,
        names.ATTR_DRAFT_TOKENS: stats.num_draft_tokens,
        names.ATTR_ACCEPTED_TOKENS: stats.num_accepted_tokens,
        names.ATTR_VERIFY_STEPS: stats.num_verify_steps,
        names.ATTR_DRAFTER: stats.drafter,
        names.ATTR_COST_NANO_USD: cost.cost_nano_usd,
        names.ATTR_ENERGY_SOURCE: cost.energy_source,
    }
    if cost.energy_microjoules is not None:
        attributes[names.ATTR_ENERGY_MICROJOULES] = cost.energy_microjoules
    return attributes


def bounded_text(text: str, max_characters: int) -> str:
    """What a column of that length takes from a caller that may send anything."""
    return text.replace("\x00", "").encode(errors="replace").decode()[:max_characters]


def bounded_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels as the ledger can keep them, also of a request that was refused because of them."""
    return {
        bounded_text(key, MAX_LABEL_CHARACTERS): bounded_text(value, MAX_LABEL_CHARACTERS)
        for key, value in list(labels.items())[:MAX_LABELS]
    }
