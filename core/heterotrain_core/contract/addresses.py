"""Addresses of workers."""

from __future__ import annotations


def family_of(address: str) -> str:
    """Return ``IPv6`` or ``IPv4``; only IPv6 addresses have colons."""
    return "IPv6" if ":" in address else "IPv4"


def of_family(addresses: str, family: str) -> str:
    """Return the first of a pod's addresses that is of a family; empty when it has none.

    Args:
        addresses: separated by commas, as Kubernetes' downward API gives them.
        family: ``IPv4`` or ``IPv6``.
    """
    return next((each for each in addresses.split(",") if each and family_of(each) == family), "")
