"""MDEQ (Bai et al., NeurIPS 2020): the cell and its layers, the network, named models."""
