"""Baselines of the papers: networks without an equilibrium layer."""
