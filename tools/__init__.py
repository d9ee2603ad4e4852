"""Programs for maintainers of the project, run from a checkout."""
