"""How each data set is laid out on disk, one file a family."""
