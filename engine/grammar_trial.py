"""Trying a grammar in a process of its own first, because some take for ever to build.

The library's own limits are counted in steps, and a small grammar with many intersections makes
each step huge; nothing interrupts it. So it is built once where it can be ended: the process ends
itself when the time is up, and takes whatever it had allocated with it.
"""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_CHILD = Path(__file__).with_name("grammar_child.py")


class TrialTimeoutError(Exception):
    """The grammar was not built in time, or the memory did not suffice."""


class GrammarTrials:
    """Builds grammars for one vocabulary in a process that is started when it is first needed.

    Thread-safe; one trial at a time. timeout_seconds bounds each trial.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        self._setting = {
            "tokenizer": tokenizer_json,
            "vocab_size": vocab_size,
            "eos_token_ids": list(eos_token_ids),
            "timeout_seconds": timeout_seconds,
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def problem(self, grammar: str) -> str:
        """What is wrong with a grammar in the library's own form; "" when it can be used.

        Raises TrialTimeoutError.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # something else ended it
            if self._process is None:
                self._process = self._start()
            answer = _ask(self._process, grammar)
            if answer is None:
                self._end()
                raise TrialTimeoutError
            return answer

    def close(self) -> None:
        """End the process; a later trial starts another."""
        with self._lock:
            self._end()

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-I", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is for the server
        )
        if _ask(process, self._setting) != "ready":
            process.kill()
            raise RuntimeError("the process that tries grammars does not start")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a question that was not read
                    stream.close()


def _ask(process: "subprocess.Popen[str]", question: object) -> str | None:
    """The answer; None when the process has ended instead."""
    assert process.stdin is not None  # noqa: S101 - both are pipes
    assert process.stdout is not None  # noqa: S101
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    line = process.stdout.readline()
    return None if not line.endswith("\n") else str(json.loads(line))
