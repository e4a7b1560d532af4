"""What an exception says, in one line, and the exceptions behind it."""

from __future__ import annotations

from collections.abc import Iterator

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


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and all that have caused it or are in its group, each once: `raise a from b` can make two each other's cause."""
    pending, seen = [error], set[int]()
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            pending += [
                one.__cause__,
                one.__context__,
                *(one.exceptions if isinstance(one, BaseExceptionGroup) else ()),
            ]
            yield one
