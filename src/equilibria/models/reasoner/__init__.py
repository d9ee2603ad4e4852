"""Models that reason: a map whose fixed points are solutions of puzzles."""
