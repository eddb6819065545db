"""Programs around a trainer: command line, sweeps, replay, reports, iterative GRPO."""
