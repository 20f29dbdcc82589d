"""The version of all packages; images have no package metadata, so the number is stated here only."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
