"""Generators of images from latent vectors."""
