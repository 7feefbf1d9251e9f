"""Experiments on live traffic."""
