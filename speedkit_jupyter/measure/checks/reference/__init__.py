"""What a step is set against: in float64, and rounded as each precision rounds."""
