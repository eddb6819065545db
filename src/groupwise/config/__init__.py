"""Every setting of a run and every constraint on it."""
