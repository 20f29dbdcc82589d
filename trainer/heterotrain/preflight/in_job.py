"""Checks of a worker before it trains in a job: those that cost the training no time. The job's status has the result.

A check that fails ends nothing: a store that is away costs checkpoints only. The status says so at the start, not only
after the first interval. Checks that may wait for other machines have a thread of their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from heterotrain_core.contract import metrics as names
from heterotrain_core.uris import redacted

from heterotrain.checkpoints.storage import call_with_timeout
from heterotrain.identity import Identity, Mode
from heterotrain.preflight import machine
from heterotrain.preflight.result import Check, Verdict
from heterotrain.telemetry.report import RankMetrics

_log = logging.getLogger(__name__)

ANSWER_S: Final = 30.0
"""Time of a store, or of name servers, to answer."""
PROBE_BYTES: Final = 1 << 16
_MOST_ERROR = 120
Checks = Mapping[str, Callable[[], Check]]
"""By the name that a result has."""
_VALUES = {Verdict.WARNING: names.PREFLIGHT_WARNING, Verdict.FAILED: names.PREFLIGHT_FAILURE}


def start(identity: Identity, device: torch.device, checkpoint_uri: str | None, report: RankMetrics) -> None:
    """Check the device now, the rest in a thread, and report what was found; without an operator, do nothing."""
    if identity.mode is not Mode.OPERATED:
        return
    now: Checks = {
        "driver": machine.driver,
        "kernels": lambda: machine.kernels(device),
        "GPU memory": lambda: machine.gpu_memory(device),
        "NCCL": lambda: machine.nccl(device),
    }
    later: Checks = {}
    if identity.local_rank == 0:  # once for each machine
        later = {
            "shared memory": machine.shared_memory,
            "DNS": _names,
            "store": lambda: _store(checkpoint_uri, identity),
        }
    found = _results(now)

    def finish() -> None:
        report_checks([*found, *_results(later)], report)

    threading.Thread(target=finish, name="heterotrain-preflight", daemon=True).start()


def _results(checks: Checks) -> list[Check]:
    """Return what the checks have found; one that has an error of its own ends neither the worker nor the others."""
    found = []
    for name, check in checks.items():
        try:
            found.append(check())
        except Exception as error:  # noqa: BLE001  # drivers and libraries raise anything
            text = f"this could not be checked ({type(error).__name__}: {str(error)[:_MOST_ERROR]})"
            found.append(Check(name=name, verdict=Verdict.WARNING, message=redacted(text)))
    return found


def report_checks(checks: Sequence[Check], report: RankMetrics) -> None:
    """Report what the checks have found, and log their problems."""
    problems = [check for check in checks if check.verdict in _VALUES]
    for check in problems:
        _log.warning("check before training: %s: %s", check.name, check.message)
    passed = sum(check.verdict is Verdict.OK for check in checks)
    report.preflight(passed, [(check.name, check.message, _VALUES[check.verdict]) for check in problems])


def _names() -> Check:
    # Workers connect by address. Only a store or the script needs names, so a job may do without.
    found = _answered("DNS", lambda: machine.names(machine.hosts_to_resolve()))
    return replace(found, verdict=Verdict.WARNING) if found.verdict is Verdict.FAILED else found


def _store(uri: str | None, identity: Identity) -> Check:
    # The same name at each start: what a killed worker leaves behind is written over.
    who = f"{identity.namespace}-{identity.worker}"
    return _answered("store", lambda: machine.store(uri, who=who, probe_bytes=PROBE_BYTES))


def _answered(name: str, check: Callable[[], Check]) -> Check:
    try:
        return call_with_timeout(ANSWER_S, check)
    except TimeoutError:
        text = f"there was no answer for {ANSWER_S:.0f} s: check its address and NetworkPolicies"
        return Check(name=name, verdict=Verdict.FAILED, message=text)
