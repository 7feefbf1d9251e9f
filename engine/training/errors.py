"""What a training command refuses, said so that its user can act on it."""

EXIT_STOPPED = 75  # sysexits' EX_TEMPFAIL: run it again and it goes on


class TrainingError(ValueError):
    """An input of training that cannot be used; the message names the field or the file."""


class StoppedError(Exception):
    """The process was asked to end; everything up to the latest step is saved."""
