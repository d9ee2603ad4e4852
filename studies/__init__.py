"""Experiments that hold a theorem of the papers against what training does."""
