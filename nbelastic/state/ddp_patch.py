"""Makes DistributedDataParallel inside an elastic function without counting as a change of the tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from nbelastic.state.tensor_snapshot import TensorSnapshot


@contextlib.contextmanager
def unchanged_by_ddp(tensors: TensorSnapshot) -> Iterator[None]:
    """Inside this context, DDP's constructor does not count as a change: it sends rank 0's values, which all ranks have.

    Without this, each change of the world would look like parameters changed by hand, which commits have to copy.
    """
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> None:
        with tensors.unchanged():
            original(*args, **kwargs)

    DistributedDataParallel.__init__ = patched
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = original
