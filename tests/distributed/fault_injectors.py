"""Places in a training run where a worker can be made to die, stop, lose its cable, be told to go, or wait."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from distributed.network_cut import cut, refuse
from heterotrain.checkpoints.manager import CheckpointManager
from heterotrain.errors import PeerLost
from heterotrain.membership.consensus.election import Election
from heterotrain.network.group import Group
from heterotrain.numerics.reducer import Reducer
from heterotrain.state import transfer
from heterotrain.steps.step import Step
from heterotrain_core.contract import env, keys
from heterotrain_core.contract.codec import Refused, decode_plan

STEP_PLACES = ("step", "launched", "backward", "reducing", "reduced", "applied")
"""Reached in each step: before it, while backward runs and the first bucket travels, after backward, before and after the
wait for the buckets, after the commit. They are counted by the step's number."""
FORMING_PLACES = ("voting", "building", "built", "giving", "receiving")
"""Reached on the way to a formation: a vote begins, connections are made, they stand, state is sent, state arrives."""
LAST_PLACE = "concluding"
"""Everything is committed, and the others have not all said so."""


class FaultInjector:
    """Makes this worker do something once, at the given place, when it comes there for the given time."""

    def __init__(self, spec: dict[str, Any] | None) -> None:
        """Set no fault without a specification.

        Args:
            spec: ``place``; ``step``, its number or how often the place was reached before; ``do``: ``die`` (the default),
                ``go`` (as if told by SIGTERM), ``stop`` (SIGSTOP), ``cut`` (until ``release`` exists), ``part`` (the same, but
                from one peer only, and one way), ``deafen`` (the same for good), ``lose`` (a message),
                ``wait`` (until ``release`` exists), ``tell`` (nothing more than below); ``reached``: a file that appears
                then.
        """
        self._spec = spec or {}

    def at(self, place: str, step: int) -> None:
        """Do what the specification says for this place and step."""
        if self._spec.get("place") != place or self._spec.get("step") != step:
            return
        spec, self._spec = self._spec, {}
        do = spec.get("do", "die")
        if do == "cut":
            cut(Path(spec["release"]))
        elif do in ("part", "deafen") and (ports := _peer_ports()):
            cut(Path(spec["release"]), to_port=ports[0])
            if do == "deafen":
                refuse(ports[0])
        if "reached" in spec:
            Path(spec["reached"]).touch()
        number = {"die": signal.SIGKILL, "go": signal.SIGTERM, "stop": signal.SIGSTOP}.get(do)
        if number is not None:
            os.kill(os.getpid(), number)
        while do in ("wait", "lose") and "release" in spec and not Path(spec["release"]).exists():
            time.sleep(0.01)
        if do == "lose":
            raise PeerLost("as if the last message had been lost")


def _peer_ports() -> list[int]:
    """Return the ports of the others in the newest plan, by rank."""
    plan = decode_plan((Path(os.environ[env.PLAN_DIR]) / keys.PLAN_KEY).read_text(), job_uid=os.environ[env.JOB_UID])
    own = int(os.environ[env.PEER_PORT])
    return [] if isinstance(plan, Refused) else [m.peer_port for m in plan.members if m.peer_port != own]


def install_faults(fault: FaultInjector) -> None:
    """Reach the places inside the library; those of ``FORMING_PLACES`` count how often this process was there."""
    launch, wait, enter = Reducer._launch, Reducer.wait, Step.__enter__
    vote, build, exchange, write_final = Election.vote, Group.build, transfer.exchange, CheckpointManager.write_final
    been = dict.fromkeys((*FORMING_PLACES, LAST_PLACE), 0)
    running = [-1]

    def come(place: str) -> None:
        been[place] += 1
        fault.at(place, been[place] - 1)

    def launched(self: Reducer, bucket: Any) -> None:
        launch(self, bucket)
        if self._next == 1:
            fault.at("launched", running[0])

    def waited(self: Reducer) -> None:
        fault.at("reducing", running[0])
        wait(self)
        fault.at("reduced", running[0])

    def entered(self: Step) -> Step:
        running[0] = self.number
        return enter(self)

    async def voted(self: Election, *arguments: Any) -> Any:
        come("voting")
        return await vote(self, *arguments)

    def built(self: Group, **options: Any) -> None:
        come("building")
        build(self, **options)
        come("built")

    def exchanged(group: Group, who: transfer.Roles, own: Any) -> Any:
        if who.receivers:
            come("receiving" if group.rank in who.receivers else "giving")
        return exchange(group, who, own)

    def written(self: CheckpointManager, *arguments: Any) -> None:
        come(LAST_PLACE)
        write_final(self, *arguments)

    Reducer._launch, Reducer.wait, Step.__enter__ = launched, waited, entered  # type: ignore[method-assign]  # put around it on purpose
    Election.vote, Group.build = voted, built  # type: ignore[method-assign]  # put around it on purpose
    transfer.exchange, CheckpointManager.write_final = exchanged, written  # type: ignore[method-assign]  # put around it on purpose
