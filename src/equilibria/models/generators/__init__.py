"""Generators of JIIO (Gurumurthy et al., NeurIPS 2021): decoders, autoencoders and densities."""
