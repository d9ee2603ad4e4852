"""Linear solvers for backward passes."""
