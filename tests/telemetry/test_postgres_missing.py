"""Where there is no PostgreSQL, its tests say so instead of passing."""

import pytest

from tests.telemetry.conftest import NO_POSTGRES, _admin_url


def test_a_machine_without_postgresql_skips_its_tests_and_says_what_would_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TANDEM_TEST_POSTGRES_URL", raising=False)
    with pytest.raises(pytest.skip.Exception, match="install Debian's `postgresql`, or set"):
        _admin_url(None)
    assert "TANDEM_TEST_POSTGRES_URL" in NO_POSTGRES
    monkeypatch.setenv("TANDEM_TEST_POSTGRES_URL", "postgresql://u@somewhere/x")
    assert _admin_url(None).render_as_string() == "postgresql+psycopg://u@somewhere/x"
