"""POptEqs and MOptEqs (Li et al.): branches, cells, networks, named models."""
