"""DistributedDataParallel inside an elastic function."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from nbelastic.state.snapshot import Part


@contextlib.contextmanager
def unchanged_by_ddp(tensors: Part) -> Iterator[None]:
    """Inside, making a DDP is no change of `tensors`: its constructor sends rank 0's values to all, who have them already.

    Without this every change of the world would look like parameters changed by hand, which have to be copied.
    """
    make = DistributedDataParallel.__init__

    @functools.wraps(make)
    def watched(*args: Any, **kwargs: Any) -> None:
        with tensors.unchanged():
            make(*args, **kwargs)

    DistributedDataParallel.__init__ = watched
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = make
