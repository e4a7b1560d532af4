"""The notebook's side: `%load_ext nbelastic` gives the magics of `magics.py` and the live view of `dashboard.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbelastic.notebook.magics import ElasticMagics

_loaded: dict[int, ElasticMagics] = {}  # by id of the shell; a kernel has one


def load_ipython_extension(ip: InteractiveShell) -> None:
    """What `%load_ext nbelastic` calls: registers the magics and their tab completion."""
    from nbelastic.notebook.magics import ElasticMagics

    if id(ip) not in _loaded:
        magics = ElasticMagics(ip)
        _loaded[id(ip)] = magics
        magics.register()


def unload_ipython_extension(ip: InteractiveShell) -> None:
    """What `%unload_ext nbelastic` calls: stops the cluster that the magics started and takes the magics away."""
    magics = _loaded.pop(id(ip), None)
    if magics is not None:
        magics.unregister()
