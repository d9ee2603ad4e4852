"""Entry point of `python -m equilibria`."""

from equilibria.cli import main

if __name__ == "__main__":
    main()
