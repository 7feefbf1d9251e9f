"""The writer: everything submitted is in the ledger once, whatever happens to the database."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from telemetry.ledger import models
from telemetry.ledger.journal import Journal, JournalError, JournalFullError
from telemetry.ledger.queries import ledger_stats
from telemetry.ledger.records import Outcome, Record, decode_record, encode_record
from telemetry.ledger.session import migrate, open_ledger
from telemetry.ledger.store import LedgerStore
from telemetry.ledger.writer import LedgerWriter
from telemetry.ledger.writer_status import WriterConfig
from tests.telemetry.ledger_records import request_record, start_record
from tests.telemetry.postgres_server import PostgresServer, running_postgres

QUICK = WriterConfig(first_retry_seconds=0.02, last_retry_seconds=0.05)


@contextmanager
def writing(
    url: str, folder: Path, config: WriterConfig = QUICK, max_bytes: int = 1 << 30
) -> Iterator[LedgerWriter]:
    engine = open_ledger(url)
    writer = LedgerWriter(LedgerStore(engine), Journal(folder, max_bytes=max_bytes), config)
    try:
        yield writer
    finally:
        writer.close()
        engine.dispose()


def rows_of(url: str, entity: type[models.Base]) -> list[models.Base]:
    engine = open_ledger(url, read_only=True)
    with Session(engine) as session:
        found = list(session.scalars(select(entity)))
        session.expunge_all()
    engine.dispose()
    return found


def count(url: str, entity: type[models.Base]) -> int:
    engine = open_ledger(url, read_only=True)
    with Session(engine) as session:
        number = session.scalar(select(func.count()).select_from(entity))
    engine.dispose()
    return number or 0


def test_a_row_holds_what_the_record_says(ledger_url: str, tmp_path: Path) -> None:
    record = request_record()
    with writing(ledger_url, tmp_path / "j") as writer:
        assert writer.submit(start_record(record)).result(10)
        assert count(ledger_url, models.RequestStart) == 1
        assert writer.submit(record).result(10)
        assert writer.wait_until_written(10)
    (row,) = rows_of(ledger_url, models.Request)
    for part in (record, record.latency, record.counts, record.cost, record.sampling):
        for name in type(part).__dataclass_fields__:
            if hasattr(models.Request, name) and not name.startswith("_"):
                assert getattr(row, name) == getattr(part, name), name
    assert row.finished_on == record.finished_at.date()
    assert row.guarantee == "bit_exact"
    assert [
        (a.request_ledger_id, a.position, a.num_drafted, a.num_accepted, a.num_accepted_of_length)
        for a in rows_of(ledger_url, models.RequestAcceptance)
    ] == [(row.ledger_id, 0, 5, 3, 1), (row.ledger_id, 1, 4, 1, 3)]
    assert count(ledger_url, models.RequestStart) == 0
    (tenant,) = rows_of(ledger_url, models.Tenant)
    assert (row.tenant_key, tenant.pseudonym) == (tenant.tenant_key, "aa11")


def test_the_same_record_twice_is_one_row(ledger_url: str, tmp_path: Path) -> None:
    record = request_record()
    with writing(ledger_url, tmp_path / "j") as writer:
        for _ in range(3):
            assert writer.submit(record).result(10)
    assert count(ledger_url, models.Request) == 1
    assert count(ledger_url, models.RequestAcceptance) == 2


def test_a_request_id_used_again_is_a_further_attempt(ledger_url: str, tmp_path: Path) -> None:
    with writing(ledger_url, tmp_path / "j") as writer:
        for _ in range(3):
            assert writer.submit(request_record("same")).result(10)
    attempts = [row.attempt for row in rows_of(ledger_url, models.Request)]
    assert attempts == [1, 2, 3]


def test_a_real_row_supersedes_the_one_that_closed_it_as_an_orphan(
    ledger_url: str, tmp_path: Path
) -> None:
    record = request_record()
    orphan = replace(record, outcome=Outcome.ORPHANED, status_code="UNKNOWN")
    with writing(ledger_url, tmp_path / "j") as writer:
        for item in (orphan, record, orphan, record):
            assert writer.submit(item).result(10)
    first, second = rows_of(ledger_url, models.Request)
    assert (first.outcome, second.outcome) == ("orphaned", "completed")
    assert (second.revision, second.supersedes_ledger_id) == (1, first.ledger_id)
    engine = open_ledger(ledger_url)
    with engine.connect() as connection:
        current = connection.exec_driver_sql("SELECT outcome FROM current_requests").scalars().all()
    engine.dispose()
    assert current == ["completed"]


def test_a_correction_is_a_further_row_and_the_one_that_counts(
    ledger_url: str, tmp_path: Path
) -> None:
    record = request_record()
    with writing(ledger_url, tmp_path / "j") as writer:
        assert writer.submit(record).result(10)
        (first,) = rows_of(ledger_url, models.Request)
        corrected = replace(
            record, revision=1, supersedes_ledger_id=first.ledger_id, outcome=Outcome.FAILED
        )
        for _ in range(2):
            assert writer.submit(corrected).result(10)
    assert [row.revision for row in rows_of(ledger_url, models.Request)] == [0, 1]
    engine = open_ledger(ledger_url)
    assert ledger_stats(engine).num_by_outcome == {"failed": 1}
    engine.dispose()


def test_ledger_ids_only_grow(ledger_url: str, tmp_path: Path) -> None:
    with writing(ledger_url, tmp_path / "j") as writer:
        for number in range(50):
            writer.submit(request_record(f"r{number}"))
        assert writer.wait_until_written(10)
    found = [(row.ledger_id, row.request_id) for row in rows_of(ledger_url, models.Request)]
    assert [name for _, name in sorted(found)] == [f"r{number}" for number in range(50)]


def test_one_bad_record_is_set_aside_and_the_others_go_on(ledger_url: str, tmp_path: Path) -> None:
    bad = request_record("bad", labels={"x": "\x00"}, error="a\x00b", trace_id=None)
    bad = replace(bad, counts=replace(bad.counts, num_prompt_tokens=2**70))
    with writing(ledger_url, tmp_path / "j") as writer:
        records = [request_record(f"r{n}") for n in range(20)]
        futures = [writer.submit(record) for record in [*records[:10], bad, *records[10:]]]
        wait(futures, 10)
        assert writer.wait_until_written(10)
        assert writer.status().num_set_aside == 1
    assert count(ledger_url, models.Request) == 20
    (aside,) = (tmp_path / "j").glob("aside-refused-*.txt")
    assert decode_record(aside.read_bytes().rstrip(b"\n")) == bad


def test_a_database_that_is_away_costs_nothing_and_is_replayed_once(tmp_path: Path) -> None:
    """SQLite: the file's folder does not exist yet, then it does."""
    url = f"sqlite:///{tmp_path}/later/ledger.db"
    records = [request_record(f"r{n}") for n in range(100)]
    with writing(url, tmp_path / "j") as writer:
        for record in records:
            writer.submit(start_record(record))
        assert all(writer.submit(record).result(10) for record in records)
        status = writer.status()
        assert status.is_database_away
        assert status.num_spilled == 200
        assert status.lag_seconds > 0
        migrate(url)
        assert writer.wait_until_written(10)
        assert writer.status().lag_seconds == 0
        assert writer.status().journal_bytes == 0
        assert writer.submit(request_record("after")).result(10)
    assert count(url, models.Request) == 101
    assert count(url, models.RequestStart) == 0
    assert not list((tmp_path / "j").glob("segment-*"))


@pytest.mark.thorough
def test_postgresql_killed_under_load_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with running_postgres() as server:
        if server is None:
            pytest.skip("no PostgreSQL binaries on this machine")
        migrate(server.url)
        with writing(server.url, tmp_path / "j") as writer:
            futures = [writer.submit(request_record(f"a{n}")) for n in range(500)]
            server.stop()
            futures += [writer.submit(request_record(f"b{n}")) for n in range(500)]
            wait(futures, 30)
            assert all(future.result() for future in futures)
            _come_back(server, writer)
            futures += [writer.submit(request_record(f"c{n}")) for n in range(500)]
            assert all(future.result(10) for future in futures)
            assert writer.wait_until_written(10)
        assert count(server.url, models.Request) == 1500
        assert count(server.url, models.RequestAcceptance) == 3000


def _come_back(server: PostgresServer, writer: LedgerWriter) -> None:
    server.start()
    assert writer.wait_until_written(30)


def test_closing_over_a_slow_database_leaves_the_rest_in_the_journal(tmp_path: Path) -> None:
    class SlowStore(LedgerStore):
        def write(self, records: Sequence[Record], *, may_exist: bool) -> None:
            time.sleep(0.2)
            super().write(records, may_exist=may_exist)

    url = f"sqlite:///{tmp_path}/ledger.db"
    migrate(url)
    engine = open_ledger(url)
    config = replace(QUICK, max_batch_records=1)
    writer = LedgerWriter(SlowStore(engine), Journal(tmp_path / "j"), config)
    futures = [writer.submit(request_record(f"r{n}")) for n in range(100)]
    writer.close(timeout_seconds=2.0)
    assert all(future.result(0) for future in futures)
    engine.dispose()
    assert 0 < count(url, models.Request) < 100
    with writing(url, tmp_path / "j") as second:
        assert second.wait_until_written(30)
    assert count(url, models.Request) == 100


def test_a_full_journal_says_so_and_counts_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path}/never/ledger.db"
    with writing(url, tmp_path / "j", max_bytes=10_000) as writer:
        results = [writer.submit(request_record(f"r{n}")).result(10) for n in range(30)]
        assert results[0]
        assert not results[-1]
        assert writer.status().num_lost == results.count(False)
    assert any("raise the cap" in r.message for r in caplog.records if r.levelname == "CRITICAL")


def test_a_queue_beyond_its_bound_refuses_rather_than_grows(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    migrate(url)
    config = replace(QUICK, max_queued_records=10)
    blocker = open_ledger(url)
    with writing(url, tmp_path / "j", config) as writer:
        with blocker.begin():  # holds the write lock
            futures = [writer.submit(request_record(f"r{n}")) for n in range(50)]
        wait(futures, 10)
        lost = sum(not future.result() for future in futures)
        assert lost >= 40 - 1
        assert writer.status().num_lost == lost
        assert writer.wait_until_written(10)
    blocker.dispose()
    assert count(url, models.Request) == 50 - lost


def test_what_an_earlier_process_left_is_written_at_the_next_start(
    ledger_url: str, tmp_path: Path
) -> None:
    records = [request_record(f"r{n}") for n in range(5)]
    with Journal(tmp_path / "j") as journal:
        journal.append(records)
        journal.append(records[:2])  # sent twice: the acknowledgement was lost
    with writing(ledger_url, tmp_path / "j") as writer:
        assert writer.wait_until_written(10)
    assert count(ledger_url, models.Request) == 5


def test_a_torn_tail_is_dropped_and_damage_is_set_aside(tmp_path: Path) -> None:
    records = [request_record(f"r{n}") for n in range(3)]
    with Journal(tmp_path / "j") as journal:
        journal.append(records)
        (segment,) = journal.segments()
        lines = segment.read_bytes().splitlines(keepends=True)
        flipped = lines[1].replace(b'"r1"', b'"r7"')  # still good JSON, another request
        segment.write_bytes(lines[0] + flipped + lines[2] + lines[0][:50])
        content = journal.read(segment)
    assert [r.request_id for r in content.records] == ["r0", "r2"]  # type: ignore[union-attr]
    assert content.damaged_lines == (flipped,)
    assert content.torn_tail_bytes == 50


def test_an_append_returns_only_after_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    with Journal(tmp_path / "j") as journal:
        for _ in range(3):
            journal.append([request_record()])
            assert synced[-1] == journal.num_bytes


def test_a_write_that_fails_half_way_leaves_nothing_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append([request_record("whole")])
        real = os.write

        def half_then_full_disk(descriptor: int, data: bytes) -> int:
            real(descriptor, bytes(data[: len(data) // 2]))
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", half_then_full_disk)
        with pytest.raises(OSError, match="No space"):
            journal.append([request_record("half")])
        monkeypatch.setattr(os, "write", real)
        journal.append([request_record("next")])
        contents = [journal.read(segment) for segment in journal.segments()]
    assert [r.request_id for c in contents for r in c.records] == ["whole", "next"]  # type: ignore[union-attr]
    assert not any(c.damaged_lines or c.torn_tail_bytes for c in contents)


def test_two_servers_cannot_share_a_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal, pytest.raises(JournalError, match="of its own"):
        Journal(tmp_path / "j")
    assert Journal(tmp_path / "j").node == journal.node


def test_a_journal_never_grows_beyond_its_cap(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", max_bytes=3_000) as journal:
        journal.append([request_record()])
        with pytest.raises(JournalFullError):
            journal.append([request_record() for _ in range(10)])
        assert journal.num_bytes == sum(p.stat().st_size for p in journal.segments()) < 3_000


def test_records_survive_the_journal_unchanged() -> None:
    record = request_record(finished_at=request_record().started_at + timedelta(microseconds=1))
    assert decode_record(encode_record(record)) == record
    assert decode_record(encode_record(start_record(record))) == start_record(record)
    with pytest.raises(ValueError, match="not a ledger record"):
        decode_record(b'{"kind":"request","unknown":1}')


def test_a_journal_from_before_drafts_were_counted_by_length_leaves_null(
    ledger_url: str, tmp_path: Path
) -> None:
    line = json.loads(encode_record(request_record()))
    del line["accepted_per_length"]
    old = decode_record(json.dumps(line).encode())
    with writing(ledger_url, tmp_path / "j") as writer:
        assert writer.submit(old).result(10)
        assert writer.wait_until_written(10)
    found = [
        (row.num_drafted, row.num_accepted_of_length)
        for row in rows_of(ledger_url, models.RequestAcceptance)
    ]
    assert found == [(5, None), (4, None)]


@pytest.mark.parametrize("accepted_per_length", [(4,), (1, 4)])
def test_counts_by_length_that_do_not_add_up_are_refused(
    accepted_per_length: tuple[int, ...],
) -> None:
    with pytest.raises(ValueError, match="accepted_per_length does not add up"):
        request_record(accepted_per_length=accepted_per_length)
