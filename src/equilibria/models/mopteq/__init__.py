"""POptEqs and MOptEqs, equilibrium models with several branches (Li et al.)."""
