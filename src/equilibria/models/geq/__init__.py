"""GEQ: equilibria whose input acts through a Gaussian kernel; what its paper proves, as numbers."""
