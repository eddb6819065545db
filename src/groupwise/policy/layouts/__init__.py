"""Sequence layouts: conversion of a batch to model inputs, and of model outputs to log-probs."""
