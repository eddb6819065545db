"""Settings of a run and the constraints on them."""
