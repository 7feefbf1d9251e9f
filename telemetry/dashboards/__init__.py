"""Grafana dashboard and Prometheus alert rules, generated from telemetry.names."""
