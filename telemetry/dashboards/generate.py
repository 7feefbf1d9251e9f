"""Writes grafana.json and alerts.yaml beside this file: python -m telemetry.dashboards.generate"""

from pathlib import Path

from telemetry.dashboards.alerts import alert_rules
from telemetry.dashboards.grafana import dashboard

FOLDER = Path(__file__).parent


def generated_files() -> dict[str, str]:
    """File names with their content, from telemetry.names as it is now."""
    return {"grafana.json": dashboard(), "alerts.yaml": alert_rules()}


def main() -> None:
    """Write the files."""
    for name, content in generated_files().items():
        (FOLDER / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
