"""Benchmarks against TorchDEQ: both libraries in one process, and a table of ratios.

    python -m benchmarks                    # the whole suite
    python -m benchmarks --quick            # small sizes, less than a minute
    python -m benchmarks --list             # the rows
    python -m benchmarks.markdown FILE      # convert the JSON of a run to Markdown

`docs/benchmarks.md` describes what is measured and how. Each row is an entry in the `ROWS` of a
module of `benchmarks.rows`.
"""
