"""Structured output: which tokens a JSON schema, a regular expression, a list of choices or
a Lark grammar allows next. The parsing is llguidance's.

A verify step needs the allowed tokens at every draft position. They are computed by letting
the matcher walk along the drafts and back, so a rejected draft leaves it where it was.
"""

import copy
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from llguidance import LLMatcher, LLTokenizer

# Not llguidance.torch: it loads a compiler, which takes two seconds of every start.
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.grammar_trial import GrammarTrials, TrialTimeoutError
from engine.request import RequestError, StructuredOutput, StructuredOutputKind

COMPILE_SECONDS = 2.0
_NUM_KEPT = 128  # compiled grammars


class GrammarCompiler:
    """Compiles grammars for one vocabulary. May be called from any thread.

    The newest ones are kept, so that a grammar that was compiled ahead of its request is only
    copied when the request comes. A grammar that has not been compiled after timeout_seconds is
    refused, and takes nothing of this process with it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        timeout_seconds: float = COMPILE_SECONDS,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._kept: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # guards the kept ones
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer = tokenizer

    @cached_property
    def _tokenizer_json(self) -> str:
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise RequestError("structured_output", "not supported with this model's tokenizer")
        backend = copy.copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return str(backend.to_str())

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return LLTokenizer(
            self._tokenizer_json, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )

    @cached_property
    def _trials(self) -> GrammarTrials:
        return GrammarTrials(
            self._tokenizer_json, self._vocab_size, self._eos_token_ids, self._timeout_seconds
        )

    def compile(self, wanted: StructuredOutput) -> "Grammar":
        """Raises RequestError naming the field when the grammar is not one, too large or too
        slow to compile."""
        with self._lock:
            matcher = self._kept.get(wanted)
            if matcher is not None:
                self._kept.move_to_end(wanted)
        if matcher is None:
            matcher = self._matcher(wanted)
            with self._lock:
                self._kept[wanted] = matcher
                if len(self._kept) > _NUM_KEPT:
                    self._kept.popitem(last=False)
        return Grammar(matcher.deep_copy(), self._vocab_size, frozenset(self._eos_token_ids))

    def _matcher(self, wanted: StructuredOutput) -> LLMatcher:
        field = f"structured_output.{wanted.kind}"
        try:
            grammar = _to_llguidance(wanted)
            problem = self._trials.problem(grammar)
        except ValueError as error:
            raise RequestError(field, str(error)) from error
        except TrialTimeoutError:
            raise RequestError(
                field, f"takes longer than {self._timeout_seconds:g} s to compile"
            ) from None
        if problem:
            raise RequestError(field, problem)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(field, matcher.get_error())
        return matcher


@dataclass(slots=True)
class Grammar:
    """Where one request stands in its grammar: after its committed output tokens."""

    _matcher: LLMatcher
    _vocab_size: int
    _eos_token_ids: frozenset[int]

    def legal_prefix(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens the grammar lets follow; an end token is the last of them."""
        num_before_end = self._num_before_end(token_ids)
        return int(self._matcher.validate_tokens(list(token_ids[: num_before_end + 1])))

    def masks(self, draft_token_ids: Sequence[int]) -> torch.Tensor:
        """[K + 1, V] bool: what may be drawn after draft_token_ids[:j]. After an illegal draft
        or the end of the output nothing is known, and everything is allowed.

        Raises RuntimeError when the grammar turns out too complex to go on.
        """
        # The matcher never consumes an illegal token, which would be an error for ever, nor an
        # end token, which it does not roll back.
        num_legal = self.legal_prefix(draft_token_ids)
        num_legal = min(num_legal, self._num_before_end(draft_token_ids))
        bits = allocate_token_bitmask(len(draft_token_ids) + 1, self._vocab_size)
        for position in range(num_legal + 1):
            fill_next_token_bitmask(self._matcher, bits, position)
            if position < num_legal:
                self._matcher.consume_token(draft_token_ids[position])
            if self._matcher.is_error():
                raise RuntimeError(self._matcher.get_error())
        self._matcher.rollback(num_legal)
        shifts = torch.arange(32, dtype=torch.int32)
        unpacked = (torch.from_numpy(bits).unsqueeze(-1) >> shifts) & 1
        return unpacked.flatten(1)[:, : self._vocab_size].bool()

    def commit(self, token_ids: Sequence[int]) -> None:
        """Move on over emitted tokens."""
        self._matcher.consume_tokens(list(token_ids[: self._num_before_end(token_ids)]))

    def _num_before_end(self, token_ids: Sequence[int]) -> int:
        for index, token_id in enumerate(token_ids):
            if token_id in self._eos_token_ids:
                return index
        return len(token_ids)


def _to_llguidance(wanted: StructuredOutput) -> str:
    text = wanted.text
    if wanted.kind is StructuredOutputKind.JSON_SCHEMA:
        json.loads(text)
        return str(LLMatcher.grammar_from_json_schema(text))
    if wanted.kind is StructuredOutputKind.REGEX:
        return str(LLMatcher.grammar_from_regex(text))
    if wanted.kind is StructuredOutputKind.CHOICE:
        choices = json.loads(text)
        if not (isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices)):
            raise ValueError("must be a JSON array of at least one string")
        alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return str(LLMatcher.grammar_from_lark(f"start: {alternatives}\n"))
    return str(LLMatcher.grammar_from_lark(text))
