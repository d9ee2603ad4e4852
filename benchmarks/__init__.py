"""Benchmarks against TorchDEQ: both libraries in one process, and a table of ratios.

    python -m benchmarks                    # the whole suite
    python -m benchmarks --quick            # small sizes, less than a minute
    python -m benchmarks --list             # the rows
    python -m benchmarks.markdown FILE      # the JSON of a run as Markdown

`docs/benchmarks.md` says what is measured and how. A row is an entry in the `ROWS` of a module of
`benchmarks.rows`.
"""
