"""From a request to the engine's record of it: what depends on the model is checked here."""

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from engine.grammar import GrammarCompiler
from engine.live_request import LiveRequest
from engine.request import GenerationRequest, RequestError, validate_against_model
from engine.sampler import Sampler, TokenHistory, uses_penalties
from engine.stats import ModelInfo
from engine.stop_strings import StopStringWatcher


def make_live(
    request: GenerationRequest,
    info: ModelInfo,
    tokenizer: PreTrainedTokenizerBase,
    grammars: GrammarCompiler,
    sampler: Sampler,
    known_drafters: Collection[str],
) -> LiveRequest:
    """Raises RequestError naming the field that this model or server cannot serve."""
    validate_against_model(request, info.vocab_size, info.max_model_tokens)
    for index, wanted in enumerate(request.speculation.named_drafters or ()):
        if wanted not in known_drafters:
            is_list = request.speculation.drafter is None
            raise RequestError(
                f"speculation.drafters[{index}]" if is_list else "speculation.drafter",
                f"unknown {wanted!r}; available: {', '.join(info.drafters)}",
            )
    live = LiveRequest(request, list(request.prompt_token_ids))
    eos = () if request.stopping.ignore_eos else info.eos_token_ids
    live.stop_token_ids = frozenset((*eos, *request.stopping.stop_token_ids))
    live.guarded_token_ids = tuple(sorted(live.stop_token_ids))
    if uses_penalties(request.sampling):
        live.history = TokenHistory.of_prompt(
            request.prompt_token_ids, info.vocab_size, sampler.device
        )
    if request.stopping.stop_strings:
        live.watcher = StopStringWatcher(
            tokenizer,
            request.stopping.stop_strings,
            include_stop_string=request.stopping.include_stop_string,
        )
    if request.structured_output is not None:
        live.grammar = grammars.compile(request.structured_output)
    return live
