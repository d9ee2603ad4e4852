"""Reflection networks: classifiers that are 1-Lipschitz by construction, for any weights."""
