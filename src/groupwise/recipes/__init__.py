"""Training procedures around the trainer (iterative GRPO), and adapters of environment libraries."""
