"""The notebook's part: `%load_ext nbelastic` provides the magics of `magics.py` and the dashboard of `dashboard.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbelastic.notebook.magics import ElasticMagics

_loaded: dict[int, ElasticMagics] = {}  # by id of the shell; a kernel has one


def load_ipython_extension(ip: InteractiveShell) -> None:
    """Register the magics and their tab completion. IPython calls this for `%load_ext nbelastic`."""
    from nbelastic.notebook.magics import ElasticMagics

    if id(ip) not in _loaded:
        magics = ElasticMagics(ip)
        _loaded[id(ip)] = magics
        magics.register()


def unload_ipython_extension(ip: InteractiveShell) -> None:
    """Close the cluster that the magics use, and remove the magics. IPython calls this for `%unload_ext nbelastic`."""
    magics = _loaded.pop(id(ip), None)
    if magics is not None:
        magics.unregister()
