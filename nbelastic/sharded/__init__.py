"""The training state of sharded models (FSDP2, HSDP, DTensor): commits, copies on other ranks, re-sharding, checkpoints."""
