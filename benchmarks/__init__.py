"""Benchmarks: scripts run on request that print tables of ratios."""
