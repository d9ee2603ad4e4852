"""What the papers compare with: networks without an equilibrium."""
