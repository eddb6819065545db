"""Optimizations that only CPU runs use."""
