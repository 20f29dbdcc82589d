"""The sentence for a user whose installation lacks an extra: ``pip install heterotrain`` alone has only numpy."""

from __future__ import annotations

OWN = (
    "heterotrain", "heterotrain_core", "heterotrain_planner", "heterotrain_operator", "heterotrain_cli",
    "heterotrain_client",
)  # fmt: skip


def missing_extra(error: ModuleNotFoundError, *, what: str, extra: str) -> str:
    """Return what to install, in one sentence; empty when one of the project's own modules is missing: that is a bug.

    Args:
        error: the failed import.
        what: the part that was used, as the start of the sentence.
        extra: the extra of the distribution that it needs.
    """
    package = (error.name or "").partition(".")[0]
    if not package or package in OWN:
        return ""
    return f"{what} needs the package {package}, which is not installed: run pip install 'heterotrain[{extra}]'"
