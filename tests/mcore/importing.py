"""What is called first on every rank."""

from __future__ import annotations

import importlib
from typing import Any


def import_megatron(rank: int, group: Any) -> None:
    """Import Megatron-Core, which takes longer than any test."""
    importlib.import_module("programs")
