"""Entry point of `python -m benchmarks`, `make bench`, and `equilibria bench`."""

from benchmarks.command import main

if __name__ == "__main__":
    raise SystemExit(main())
