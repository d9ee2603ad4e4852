"""Minimizing the hidden objective itself, which converges where the fixed-point map does not."""
