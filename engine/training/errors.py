"""What a training command refuses, said so that its user can act on it."""


class TrainingError(ValueError):
    """An input of training that cannot be used; the message names the field or the file."""
