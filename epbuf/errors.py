"""The exception tree.

Every message says what was asked, what was found, and what to do.
"""

from __future__ import annotations


class EpbufError(Exception):
    """Base of every error that epbuf raises.

    Attributes:
        refusal: the number by which an op tells the peers why this rank refuses; 0 outside ops.
    """

    refusal: int = 0


class ConfigError(EpbufError, ValueError):
    """A size, format, dtype, shape or policy that the caller can correct."""


class CapacityError(EpbufError):
    """More rows were routed to a rank than its receive capacity holds."""


class LeaseError(EpbufError, RuntimeError):
    """A frame or workspace used early, twice, too late, or differently on another rank."""


class CaptureError(EpbufError):
    """A call that cannot be captured was made while a graph is being captured."""


class StaleGraphError(EpbufError):
    """A captured graph refers to memory of an older generation of its arena."""


class PlanMismatchError(EpbufError):
    """Ranks of one group brought different plans."""


class PeerTimeoutError(EpbufError):
    """A peer did not arrive within `timeout_s`, or abandoned the arena."""


class NativeError(EpbufError):
    """The native module, CUDA, NCCL or a compiler's copy of a region failed a check."""
