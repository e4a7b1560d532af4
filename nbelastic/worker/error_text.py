"""What an exception says, in one line."""

from __future__ import annotations

# What torch adds to each error of CUDA.
ADVICE = ("Search for `cuda", "CUDA kernel errors might be asynchronously", "For debugging consider passing CUDA_")


def text_of(error: BaseException) -> str:
    """What the error says, in one line, without torch's advice about CUDA."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001  (a class of the user's)
        text = f"its text cannot be read: {type(failure).__name__}"
    lines = [line.strip() for line in text.splitlines()]
    end = next((number for number, line in enumerate(lines) if line.startswith(ADVICE)), len(lines))
    return " ".join(filter(None, lines[:end]))
