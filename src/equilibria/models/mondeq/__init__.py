"""monDEQ (Winston and Kolter, NeurIPS 2020)."""
