"""Calling reward functions and reward models."""
