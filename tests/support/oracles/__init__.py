"""Scalar-loop references in float64, written from the papers, and the inputs that they are compared on."""
