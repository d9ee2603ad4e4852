"""How the data sets are laid out on disk; what else is to be said of each is in `catalog.yaml`."""
