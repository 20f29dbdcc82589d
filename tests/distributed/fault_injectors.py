"""Fault injectors: make a worker die, stop, lose its network, leave or wait at a given place of the training."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from distributed.network_cut import cut, refuse
from heterotrain.checkpoints.manager import CheckpointManager, WriteReason
from heterotrain.errors import PeerLost
from heterotrain.exchange.flat.reducer import Reducer
from heterotrain.exchange.interface import Exchange
from heterotrain.membership.consensus.election import Election
from heterotrain.membership.peer_service import PeerService
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Purpose
from heterotrain.parts.pieces.piece_reducer import PieceReducer
from heterotrain.parts.stages.neighbours import Neighbours
from heterotrain.parts.unequal.part_messages import PartExchange
from heterotrain.state import transfer
from heterotrain.steps import formations
from heterotrain.steps.agreement import Agreement
from heterotrain.steps.ending import End
from heterotrain.steps.step import Step
from heterotrain_core.contract import env, keys
from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.plan import Rank

STEP_PLACES = ("step", "launched", "backward", "reducing", "reduced", "applied")
"""Reached in each step, counted by its number: before the step; in backward, with the first bucket on its way; after
backward and the vote; before and after the wait for the buckets; after the commit."""
FORMING_PLACES = ("voting", "building", "built", "giving", "receiving")
"""Reached during a formation: a vote begins, connections are made, all connections exist, state is sent or received."""
PHASE_PLACES = ("prepared", "confirmed")
"""In the second phase of a step of a divided model, counted by the step: this rank has sent that it holds its sums, and
has not heard from the others; and it has heard from all."""
STAGE_PLACES = ("sending",)
"""Before a stage of a pipeline sends a tensor to its neighbour, counted by the step."""
SHARD_PLACES = ("exchanging",)
"""Before a rank of unequal shards sends its part of a unit, or of a unit's gradient; counted by the step."""
HAND_OVER_PLACE = "handing over"
"""A formation ends as agreed, and those that leave are about to pass on what only they hold of a divided model."""
SCRIPT_PLACES = ("between collectives", "in forward", "in a hook")
"""Between two exchanges of the script itself: in a step, in the forward pass (both counted by the step's number), or in
a hook (counted by the epoch)."""
HOOKS_PLACE = "hooks called"
"""This rank has told the others that it has called the hooks of an epoch, and has not heard from them."""
LAST_PLACE = "concluding"
"""All steps are committed, but not all other ranks have confirmed it."""


class FaultInjector:
    """Trigger a fault once in this worker, at a given place and a given visit of it."""

    def __init__(self, spec: dict[str, Any] | None) -> None:
        """Store the specification of the fault; ``None`` injects no fault.

        Args:
            spec: the fault, with these fields:

                * ``place``: one of the places above;
                * ``step``: the step's number, or the number of earlier visits of the place;
                * ``every`` and ``times``: the fault comes so many times, with so many steps in between;
                * ``do``: ``die`` (the default), ``leave`` (SIGTERM), ``stop`` (SIGSTOP), ``cut`` (the network, until
                  the file ``release`` exists), ``part`` (the same, but towards one peer only), ``deafen`` (the same
                  for ever), ``lose`` (a message), ``exhaust`` (the memory), ``wait`` (until the file
                  ``release`` exists) or ``mark`` (only create ``reached``);
                * ``reached``: a file that is created at that time;
                * ``record``: a file to which a line about the fault is appended;
                * ``gates``: waits at other steps, each with ``step``, ``reached`` and ``release``.
        """
        self._spec = spec or {}
        self._gates = {gate["step"]: gate for gate in self._spec.get("gates", ())}

    def at(self, place: str, step: int) -> bool:
        """Trigger the fault if it is specified for this place and step; return whether it is."""
        if place == "step" and step in self._gates:
            Path(self._gates[step]["reached"]).touch()
            while not Path(self._gates[step]["release"]).exists():
                time.sleep(0.01)
        if self._spec.get("place") != place or self._spec.get("step") != step:
            return False
        spec, times = self._spec, self._spec.get("times", 1) - 1
        self._spec = {**spec, "step": step + spec["every"], "times": times} if times else {}
        do = spec.get("do", "die")
        if "record" in spec:
            _record(Path(spec["record"]), step=step, place=place, do=do)
        if do == "cut":
            cut(Path(spec["release"]))
        elif do in ("part", "deafen") and (ports := _peer_ports()):
            cut(Path(spec["release"]), to_port=ports[0])
            if do == "deafen":
                refuse(ports[0])
        if "reached" in spec:
            Path(spec["reached"]).touch()
        number = {"die": signal.SIGKILL, "leave": signal.SIGTERM, "stop": signal.SIGSTOP}.get(do)
        if number is not None:
            os.kill(os.getpid(), number)
        while do in ("wait", "lose") and "release" in spec and not Path(spec["release"]).exists():
            time.sleep(0.01)
        if do == "exhaust":
            raise torch.OutOfMemoryError("injected fault: out of memory")
        if do == "lose":
            raise PeerLost("injected fault: the last message is lost")
        return True


def _record(path: Path, **fault: Any) -> None:
    victim = f"{os.environ[env.WORKER]}/{os.environ[env.LOCAL_RANK]}"
    with path.open("a") as file:
        file.write(json.dumps(fault | {"victim": victim}) + "\n")


def stop_gossip() -> None:
    """Let this rank neither take nor offer a plan because of a peer's heartbeat or reply."""

    async def keep_quiet(service: PeerService, _peer: Rank, reply: Mapping[str, Any]) -> None:
        service.on_reply(reply)

    PeerService._gossip = keep_quiet  # type: ignore[method-assign]  # a deliberate wrapper


def _peer_ports() -> list[int]:
    """Return the ports of the other members of the newest plan, by rank."""
    plan = decode_plan((Path(os.environ[env.PLAN_DIR]) / keys.PLAN_KEY).read_text(), job_uid=os.environ[env.JOB_UID])
    own = int(os.environ[env.PEER_PORT])
    return [] if isinstance(plan, Refused) else [rank.peer_port for rank in plan.ranks if rank.peer_port != own]


def install_faults(fault: FaultInjector) -> None:  # noqa: C901, PLR0915  # one wrapper for each place
    """Wrap the library's functions so that they call the injector; visits of ``FORMING_PLACES`` are counted."""
    launch, wait, enter = Exchange._launch, Reducer.wait, Step.__enter__
    vote, build, exchange, write = Election.vote, Group.build, transfer.exchange, CheckpointManager.write
    wait_pieces, gather, confirm = PieceReducer.wait, Group.gather, Agreement.confirm
    send, part, hand_over = Neighbours.send, PartExchange.receive, formations.hand_over
    end_of_hooks = End.agree
    visits = dict.fromkeys((*FORMING_PLACES, HAND_OVER_PLACE, HOOKS_PLACE, LAST_PLACE), 0)
    running, is_hook = [-1], [False]

    def visit(place: str) -> None:
        visits[place] += 1
        fault.at(place, visits[place] - 1)

    def launched(self: Exchange, transfer: Any) -> None:
        launch(self, transfer)
        if self.started == 1:
            fault.at("launched", running[0])

    def waited(self: Reducer) -> None:
        fault.at("reducing", running[0])
        wait(self)
        fault.at("reduced", running[0])

    def waited_pieces(self: PieceReducer) -> None:
        fault.at("reducing", running[0])
        wait_pieces(self)
        fault.at("reduced", running[0])

    def gathered(self: Group, data: bytes, purpose: Purpose = Purpose.LIBRARY) -> Any:
        started = gather(self, data, purpose)
        if purpose is Purpose.CONFIRM:
            fault.at("prepared", running[0])
        if is_hook[0]:
            visit(HOOKS_PLACE)
        return started

    def ended(self: End, group: Group | None) -> None:
        is_hook[0] = True
        try:
            end_of_hooks(self, group)
        finally:
            is_hook[0] = False

    def confirmed(self: Agreement, *arguments: Any) -> Any:
        found = confirm(self, *arguments)
        fault.at("confirmed", running[0])
        return found

    def sent(self: Neighbours, *arguments: Any) -> None:
        fault.at("sending", running[0])
        send(self, *arguments)

    def parted(self: PartExchange) -> None:
        fault.at("exchanging", running[0])  # its messages are on their way
        part(self)

    def entered(self: Step) -> Step:
        running[0] = self.number
        return enter(self)

    async def voted(self: Election, *arguments: Any) -> Any:
        visit("voting")
        return await vote(self, *arguments)

    def built(self: Group, **options: Any) -> None:
        visit("building")
        build(self, **options)
        visit("built")

    def exchanged(group: Group, who: transfer.Roles, own: Any, **named: Any) -> Any:
        if who.receivers:
            visit("receiving" if group.rank in who.receivers else "giving")
        return exchange(group, who, own, **named)

    def handed_over(*arguments: Any, **named: Any) -> bool:
        visit(HAND_OVER_PLACE)
        return hand_over(*arguments, **named)

    def written(self: CheckpointManager, reason: WriteReason, *arguments: Any, **named: Any) -> None:
        if reason is WriteReason.END:
            visit(LAST_PLACE)
        write(self, reason, *arguments, **named)

    Exchange._launch, Reducer.wait, Step.__enter__ = launched, waited, entered  # type: ignore[method-assign]  # a deliberate wrapper
    End.agree = ended  # type: ignore[method-assign]  # a deliberate wrapper
    formations.hand_over = handed_over
    PartExchange.receive = parted  # type: ignore[method-assign]  # a deliberate wrapper
    Neighbours.send = sent  # type: ignore[method-assign]  # a deliberate wrapper
    PieceReducer.wait, Group.gather, Agreement.confirm = waited_pieces, gathered, confirmed  # type: ignore[method-assign]  # a deliberate wrapper
    Election.vote, Group.build = voted, built  # type: ignore[method-assign]  # a deliberate wrapper
    transfer.exchange, CheckpointManager.write = exchanged, written  # type: ignore[method-assign]  # a deliberate wrapper
