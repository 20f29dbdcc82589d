"""These tests need the packages of ``make test-all PART=stores``."""

from __future__ import annotations

from support.s3_server import HAS_S3

collect_ignore_glob = [] if HAS_S3 else ["test_*.py"]
