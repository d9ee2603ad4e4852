"""GEQ: equilibria whose input acts through a Gaussian kernel."""
