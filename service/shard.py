"""A process of `torchrun ... tandem serve` that serves nobody: it holds a shard of the target."""

import logging
import os
import signal

from service.models import resolve_model
from service.settings import ServiceSettings

_log = logging.getLogger(__name__)


def rank_of(settings: ServiceSettings) -> int:
    """0 for the process that serves. Raises ValueError when torchrun and the setting disagree."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if settings.tensor_parallel == 1 and started > 1:
        raise ValueError(
            f"tensor_parallel: {started} processes were started and each would serve on its own; "
            f"set TANDEM_TENSOR_PARALLEL={started}"
        )
    return int(os.environ.get("RANK", "0")) if settings.tensor_parallel > 1 else 0


def serve_shard(settings: ServiceSettings) -> int:
    """Follow the leader until it stops; the exit status. Signals are the leader's to answer:
    it drains first. Raises what loading raises."""
    from engine.shard_follower import follow

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    target = resolve_model(settings.target, settings.home.expanduser())
    try:
        follow(settings.engine_config(target, None))
    except RuntimeError as error:
        _log.error("the leader is gone: %s", error)
        return 1
    return 0
