"""The peers' processes: started, asked and ended here."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.benchmarks.peers_jobs import Job, Served

_ROOT = Path(__file__).resolve().parents[2]


class PeerProcess:
    """One peer. refusal says why it did not start; then it cannot be asked."""

    def __init__(
        self, kind: str, folder: str, dtype: str, max_num_rows: int, num_threads: int
    ) -> None:
        self.kind = kind
        self.versions: dict[str, str] = {}
        self.refusal: str | None = None
        self.peak_bytes = 0
        self._process: subprocess.Popen[str] | None = None
        arguments = [kind, folder, dtype, str(max_num_rows), str(num_threads)]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(num_threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.peers_worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=_ROOT,
            env=environment,
            text=True,
        )
        first = self._read()
        self.refusal = first.get("refused")
        self.versions = first.get("versions", {})
        if self.refusal is not None:
            self.close()

    def ask(self, job: Job) -> list[Served] | str:
        """What was served, or the reason why not."""
        if self._process is None or self._process.stdin is None:
            return self.refusal or "the process has ended"
        try:
            print(json.dumps(job.to_json()), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return "the process died"
        answer = self._read()
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
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # what a dead process did not read
                        pipe.close()
            self._process = None

    def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return {"refused": f"the process died with {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer
