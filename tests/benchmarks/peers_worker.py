"""A process that serves one peer: jobs in as lines of JSON, results out.

    python -m tests.benchmarks.peers_worker KIND FOLDER DTYPE MAX_ROWS THREADS

The first answer is {"versions": ...} or {"refused": reason}; then one answer per job, with the
requests' tokens and times and the process's memory.
"""

import importlib
import json
import os
import resource
import sys
from dataclasses import asdict
from typing import Any, TextIO

from tests.benchmarks.peers_jobs import Job, RefusedError

KINDS = {  # kind -> (module, class): imported in the process that runs it, and nowhere else
    "tandem": ("tests.benchmarks.peers_tandem", "Tandem"),
    "transformers_generate": ("tests.benchmarks.peers_transformers", "Generate"),
    "transformers_batching": ("tests.benchmarks.peers_transformers", "ContinuousBatching"),
}


def make_peer(kind: str, folder: str, dtype: str, max_num_rows: int, num_threads: int) -> Any:
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    module, name = KINDS[kind]
    return getattr(importlib.import_module(module), name)(folder, dtype, max_num_rows)


def answer(peer: Any, line: str) -> dict[str, Any]:
    try:
        served = peer.run(Job.from_json(json.loads(line)))
    except RefusedError as reason:
        return {"refused": str(reason)}
    except Exception as error:  # a peer that breaks is reported; the others go on
        return {"refused": _reason(error)}
    return {
        "served": [asdict(request) for request in served],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def main() -> None:
    # Libraries print where they like: the pipe is ours alone, all else goes to stderr.
    pipe: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    kind, folder, dtype, max_num_rows, num_threads = sys.argv[1:]
    try:
        peer = make_peer(kind, folder, dtype, int(max_num_rows), int(num_threads))
    except Exception as error:  # whatever keeps a peer from starting is what is to be reported
        print(json.dumps({"refused": _reason(error)}), file=pipe)
        return
    print(json.dumps({"versions": peer.versions()}), file=pipe)
    for line in sys.stdin:
        print(json.dumps(answer(peer, line)), file=pipe)


if __name__ == "__main__":
    main()
