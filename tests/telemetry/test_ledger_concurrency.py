"""Several servers on one ledger: they start at once, migrate once and write beside each other."""

import subprocess
import sys
from pathlib import Path

import pytest

from telemetry.ledger import models
from telemetry.ledger.queries import check_ledger, ledger_stats
from telemetry.ledger.session import open_ledger
from tests.telemetry.recording_rig import recording_rig

pytestmark = pytest.mark.thorough

NUM_SERVERS = 3
NUM_REQUESTS = 10

SERVER = """
import sys
from pathlib import Path
from tests.telemetry.recording_rig import recording_rig

url, folder, name, number = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
with recording_rig(folder, url=url) as rig:
    for n in range(number):
        request = rig.begin(f"shared-{n}" if n % 2 else f"{name}-{n}", variant=f"v{n % 3}")
        rig.run_step(request.request_id)
        assert rig.finish(request).durable.result(60)
    assert rig.recorder._writer.wait_until_written(60)
"""


def test_servers_that_start_at_once_share_a_ledger(empty_url: str, tmp_path: Path) -> None:
    number = str(NUM_REQUESTS)
    servers = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                SERVER,
                empty_url,
                tmp_path / f"s{n}",
                f"s{n}",
                number,
            ],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(NUM_SERVERS)
    ]
    errors = [server.communicate(timeout=100)[1] for server in servers]
    assert [server.returncode for server in servers] == [0] * NUM_SERVERS, errors
    engine = open_ledger(empty_url, read_only=True)
    stats = ledger_stats(engine)
    findings = check_ledger(engine)
    engine.dispose()
    assert stats.num_by_outcome == {"completed": NUM_SERVERS * NUM_REQUESTS}
    assert stats.num_open == 0
    assert all(finding.is_good for finding in findings), findings
    with recording_rig(tmp_path / "reader", url=empty_url) as rig:
        assert len(rig.rows(models.Variant)) == 3
        assert len({r.ledger_id for r in rig.requests()}) == NUM_SERVERS * NUM_REQUESTS
        shared = [r.attempt for r in rig.requests() if r.request_id == "shared-1"]
        assert sorted(shared) == list(range(1, NUM_SERVERS + 1))
