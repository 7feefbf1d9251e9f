"""The program that engine.grammar_trial runs: one JSON value a line in, one a line out.

It imports llguidance alone, so that it starts at once and stays small.
"""

import json
import resource
import signal
import sys

from llguidance import LLMatcher, LLTokenizer

_MAX_MEMORY_BYTES = 4 << 30  # of addresses, most of which are never touched


def main() -> None:
    """Answer until the input ends. Ends itself by SIGALRM when a grammar takes too long."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    setting = json.loads(sys.stdin.readline())
    vocabulary = LLTokenizer(
        setting["tokenizer"], n_vocab=setting["vocab_size"], eos_token=setting["eos_token_ids"]
    )
    _answer("ready")
    for line in sys.stdin:
        # The default action of the signal ends the process even inside the library.
        signal.setitimer(signal.ITIMER_REAL, setting["timeout_seconds"])
        problem = _problem(json.loads(line), vocabulary)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(problem)


def _problem(grammar: str, vocabulary: LLTokenizer) -> str:
    problem = LLMatcher.validate_grammar(grammar, vocabulary)
    if problem:
        return str(problem).strip()
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what the first step will ask for
    return str(matcher.get_error()).strip() if matcher.is_error() else ""


def _answer(value: str) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
