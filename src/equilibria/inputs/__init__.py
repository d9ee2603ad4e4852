"""Searches over inputs: joint inference and input optimization, attacks, latents, restoration."""
