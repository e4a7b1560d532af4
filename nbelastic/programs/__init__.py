"""In each training process: boot, the elastic loop, programs and cells of jobs."""
