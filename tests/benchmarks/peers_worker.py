"""A process that serves one peer: jobs in as lines of JSON, results out.

    python -m tests.benchmarks.peers_worker CLASS MODEL DTYPE MAX_ROWS THREADS [OPTIONS]

OPTIONS is JSON, for this class alone. The first answer is {"versions": ...} or {"refused": reason};
then one answer per job, with the requests' tokens and times and the process's memory.
"""

import ctypes
import importlib
import json
import os
import resource
import sys
from dataclasses import asdict
from typing import Any, TextIO

from tests.benchmarks.peers_jobs import Job, RefusedError

CLASSES = {  # name -> (module, class): imported in the process that runs it, and nowhere else
    "tandem": ("tests.benchmarks.peers_tandem", "Tandem"),
    "transformers_generate": ("tests.benchmarks.peers_transformers", "Generate"),
    "transformers_batching": ("tests.benchmarks.peers_transformers", "ContinuousBatching"),
    "vllm": ("tests.benchmarks.peers_vllm", "Vllm"),
    "openvino": ("tests.benchmarks.peers_openvino", "OpenVino"),
    "llama_cpp": ("tests.benchmarks.peers_llama_cpp", "LlamaCpp"),
    "ctranslate2": ("tests.benchmarks.peers_ctranslate2", "CTranslate2"),
}
_DIE_WITH_PARENT, _SIGKILL = 1, 9  # of prctl(2)


def make_peer(arguments: list[str]) -> Any:
    kind, model, dtype, max_num_rows, num_threads = arguments[:5]
    options = json.loads(arguments[5]) if len(arguments) > 5 else {}
    module, name = CLASSES[kind]
    made = getattr(importlib.import_module(module), name)
    return made(model, dtype, int(max_num_rows), int(num_threads), **options)


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
    if sys.platform == "linux":
        # A stopped process would outlive a parent that was killed.
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, _SIGKILL)
    try:
        peer = make_peer(sys.argv[1:])
    except Exception as error:  # whatever keeps a peer from starting is what is to be reported
        print(json.dumps({"refused": _reason(error)}), file=pipe)
        return
    print(json.dumps({"versions": peer.versions()}), file=pipe)
    for line in sys.stdin:
        print(json.dumps(answer(peer, line)), file=pipe)


if __name__ == "__main__":
    main()
