"""Models that restore images by minimizing an explicit objective."""
