"""The peers' processes: started, asked, put to sleep and ended here."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.benchmarks.peers_jobs import Job, Served

_ROOT = Path(__file__).resolve().parents[2]
_LOGS = _ROOT / "build" / "peers" / "logs"
_START_SECONDS, _JOB_SECONDS = 600.0, 900.0  # some compile for minutes when they start


class PeerProcess:
    """One peer. refusal says why it did not start; then it cannot be asked.

    It is stopped but while it works: libraries' threads would spin or poll beside the others.
    """

    def __init__(
        self,
        worker_class: str,
        model: str,
        dtype: str,
        max_num_rows: int,
        num_threads: int,
        *,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.versions: dict[str, str] = {}
        self.refusal: str | None = None
        self.peak_bytes = 0
        self._process: subprocess.Popen[str] | None = None
        arguments = [worker_class, model, dtype, str(max_num_rows), str(num_threads)]
        if options:
            arguments.append(json.dumps(dict(options)))
        variables = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(num_threads),
            "TOKENIZERS_PARALLELISM": "false",
            **(environment or {}),
        }
        _LOGS.mkdir(parents=True, exist_ok=True)
        self._log = _LOGS / f"{name or worker_class}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", "tests.benchmarks.peers_worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=_ROOT,
                env=variables,
                text=True,
                start_new_session=True,
            )
        first = self._read(_START_SECONDS)
        self.refusal = first.get("refused")
        self.versions = first.get("versions", {})
        if self.refusal is not None:
            self.close()
        else:
            self._signal(signal.SIGSTOP)

    def ask(self, job: Job) -> list[Served] | str:
        """What was served, or the reason why not."""
        if self._process is None or self._process.stdin is None:
            return self.refusal or "the process has ended"
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps(job.to_json()), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return "the process died"
        answer = self._read(_JOB_SECONDS)
        self._signal(signal.SIGSTOP)
        if "refused" in answer:
            return str(answer["refused"])
        self.peak_bytes = answer["peak_bytes"]
        served = [Served(**{**r, "token_ids": tuple(r["token_ids"])}) for r in answer["served"]]
        for request, num_tokens in zip(served, job.max_tokens, strict=True):
            if len(request.token_ids) != num_tokens:
                return f"gave {len(request.token_ids)} tokens where {num_tokens} were asked for"
        return served

    def close(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # what a dead process did not read
                        pipe.close()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        """To the process and to those that it started."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self, timeout_seconds: float) -> dict[str, Any]:
        """The next line; a process that gives none in time is killed."""
        assert self._process is not None
        assert self._process.stdout is not None
        # Nothing is ever left in the buffer: a line is an answer, and no other comes unasked.
        if not select.select([self._process.stdout], [], [], timeout_seconds)[0]:
            self._signal(signal.SIGKILL)
            self._process.wait()
            return {"refused": f"gave no answer for {timeout_seconds:.0f} s"}
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()
            last = f": {said[-1][:300]}" if said else ""
            return {"refused": f"the process died with {self._process.wait()}{last}"}
        answer: dict[str, Any] = json.loads(line)
        return answer
