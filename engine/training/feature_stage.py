"""The cache stage: what the target computes over its answers, kept for training."""

from engine.training.capture import Capturer
from engine.training.conversations import read_conversations
from engine.training.feature_cache import CacheInput, build_cache
from engine.training.provenance import write_provenance
from engine.training.run import Run
from engine.training.status import StatusLog


def make_features(run: Run) -> None:
    """RUN/features: what the target computes over the conversations, captured by the main
    process."""
    run.on_main(lambda: _capture(run))


def _capture(run: Run) -> None:
    status = StatusLog(run.folder / "features")
    conversations = list(read_conversations(run.folder / "data"))
    inputs = [
        CacheInput(c.key, c.source, c.temperature, c.token_ids, len(c.prompt_token_ids))
        for c in conversations
    ]
    total = sum(len(item.token_ids) for item in inputs)
    done = [0]

    def heard(num_tokens: int) -> None:
        done[0] += num_tokens
        status.line(f"features | {done[0]} new of {total} tokens")

    capturer = Capturer(run.target.model, run.captured_layers)
    try:
        build_cache(
            run.folder / "features",
            inputs,
            capturer.capture,
            identity=run.identity,
            max_bytes=int(run.recipe.features.max_gigabytes * 1e9),
            on_tokens=heard,
        )
    finally:
        capturer.close()
    write_provenance(run.folder / "features", **run.identity)
