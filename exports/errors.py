"""Why an export stopped. Whatever is raised, the published tables are still the previous ones."""


class ExportError(RuntimeError):
    """Base of this package's errors. `exit_code` is what the command line returns."""

    exit_code = 1


class LockedError(ExportError):
    """Another export is writing to the same target."""

    exit_code = 3


class SourceError(ExportError):
    """The ledger cannot be read, or its schema is not the one this version reads."""

    exit_code = 4


class TargetError(ExportError):
    """The target cannot be written, or holds something that this version does not understand."""

    exit_code = 5


class ReconciliationError(ExportError):
    """What was written differs from what the ledger holds. Nothing was published."""

    exit_code = 6
