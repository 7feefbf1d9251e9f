"""`tandem` whose leader fails in the middle of a forward: the target's, over several processes.

It fails once the file that FAIL_WHEN names is there: python -m tests.k8s.failing_shard serve
"""

import functools
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from engine.shards import Shards
from service.cli import app


def plant() -> None:
    lead = Shards.lead

    def lead_to_failure(shards: Shards, model: PreTrainedModel) -> None:
        forward = model.forward

        @functools.wraps(forward)
        def failing(*args: Any, **kwargs: Any) -> Any:
            if Path(os.environ["FAIL_WHEN"]).exists():
                raise ValueError("planted")
            return forward(*args, **kwargs)

        model.forward = failing
        lead(shards, model)

    Shards.lead = lead_to_failure  # type: ignore[method-assign]


if __name__ == "__main__":
    plant()
    app()
