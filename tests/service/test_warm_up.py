"""A server whose model cannot answer never serves, says why and ends with an error."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.assembly import SetUpError, warm_up
from tests.fakes import FakeEngine
from tests.ports import free_port
from tests.tiny import tiny_llama, tiny_tokenizer

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def broken_model(tmp_path: Path) -> Path:
    """Loads like any other, and its logits are no numbers."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "broken")
    tiny_tokenizer().save_pretrained(tmp_path / "broken")
    return tmp_path / "broken"


@pytest.mark.thorough
def test_a_broken_model_never_serves_and_ends_the_process_with_the_reason(
    broken_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    server = subprocess.Popen(
        [Path(sys.executable).with_name("tandem"), "serve"],
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "TANDEM_TARGET": str(broken_model),
            "TANDEM_HOME": str(tmp_path),
            "TANDEM_PORT": str(port),
        },
    )
    seen = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        while server.poll() is None:
            try:
                seen.add(health.Check(health_pb2.HealthCheckRequest(), timeout=1).status)
            except grpc.RpcError as error:
                seen.add(error.code())
    _, said = server.communicate()
    assert server.returncode == 1
    assert SERVING not in seen
    assert "serving on" not in said
    assert f"error: {broken_model}: its logits are not finite" in said
    for noise in ("Traceback", "never awaited", "Event loop is closed"):
        assert noise not in said


def test_a_warm_up_request_that_fails_stops_the_start_with_the_reason() -> None:
    with pytest.raises(SetUpError, match="warm-up request failed: planted"):
        warm_up(_fake(FakeEngine(fail_token_id=0)))
    crashing = FakeEngine()
    crashing.crash = True
    with pytest.raises(SetUpError, match="warm-up request failed: the fake engine was told to"):
        warm_up(_fake(crashing))


def _fake(engine: FakeEngine) -> Any:
    return engine
