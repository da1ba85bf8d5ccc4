"""What can go wrong in `kernels`, as one small tree.

Every message says what is wrong, what was given, what is allowed and what to do. Errors about arguments are also
ValueError, errors about the machine are also RuntimeError, so a caller without our names still catches the right kind.
"""


class KernelError(Exception):
    """Base of all errors of this package."""

    def __init__(self, reason: str, *, given: str, allowed: str, action: str) -> None:
        super().__init__(f"{reason}: given {given}; allowed: {allowed}; {action}")
        self.reason = reason
        self.given = given
        self.allowed = allowed
        self.action = action


class ArgumentError(KernelError, ValueError):
    """A shape, dtype, stride, alignment or option that the call does not take. Nothing ran."""


class WidthError(ArgumentError):
    """A row width that the codec cannot take at all (below 8, or too wide for its tables)."""


class UncompiledWidthError(WidthError):
    """A GPU kernel was asked for at a width that none is compiled for."""


class MixedWidthsError(WidthError):
    """K and V are each fine alone, but no attention kernel takes the two different widths together."""


class UnmeasuredDefaultError(WidthError):
    """A default would have picked a width and preset without a recorded hardware run."""


class RowError(ArgumentError):
    """The values of a row cannot be packed."""


class NonFiniteRowError(RowError):
    """A row holds NaN or an infinity."""


class NormTooLargeError(RowError):
    """A row's norm is above the largest that packs to a finite result."""


class LayoutError(ArgumentError):
    """Bytes do not have the size, alignment or layout version that the reader knows."""


class MachineError(KernelError, RuntimeError):
    """The arguments were right, but this machine could not do it."""
