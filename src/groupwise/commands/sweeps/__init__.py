"""Many runs on one base model: turns of the runs, adapters per row, the shared sampler, the scheduler."""
