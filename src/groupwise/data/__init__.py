"""Prompts of a step, their order, and the split of rows into micro-batches."""
