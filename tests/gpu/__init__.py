"""What needs a GPU: `python -m tests.gpu` runs all of it and writes what it found; `pytest -m gpu` runs the rest."""
