"""The training state: what a commit holds, how it reaches newcomers, checkpoints, the sampler."""
