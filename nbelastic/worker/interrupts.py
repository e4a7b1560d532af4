"""What ends a call of the elastic function from outside: raised in the main thread, in a commit or a collective."""


class WorldAborted(BaseException):
    """The generation is broken. It is not an `Exception`, so that user code which catches those lets it pass."""


class WorldLeft(BaseException):
    """All ranks leave the generation at this commit, as agreed."""
