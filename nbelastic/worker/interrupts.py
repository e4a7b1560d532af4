"""What ends a call of the elastic function from outside: raised in the main thread, in a commit or a collective."""


class WorldAborted(BaseException):
    """The generation is broken. It is not an `Exception`, so that user code which catches those lets it pass."""


class WorldLeft(BaseException):
    """All ranks leave the generation at this commit, as agreed."""


class ProgramRejected(BaseException):
    """The new program that this worker tries has failed on another worker: return to the old one."""


class ProgramReplaced(BaseException):
    """The new program has ended, and the old one with it: with this value, or with this error."""

    def __init__(self, value: object = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.value, self.error = value, error
