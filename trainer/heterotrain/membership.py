"""From a standing to a working formation: who takes part, connected, with one plan and one state."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from heterotrain_core.contract.codec import Refused, decode_plan, encode_plan
from heterotrain_core.contract.plan import Boundary, BoundaryKind, Member, Plan
from heterotrain_core.split.proportion import evenly

from heterotrain import transfer
from heterotrain.assembly import Assembly, Entry, Standing
from heterotrain.control import HEADER, Slot, Verdict, to_row, verdict
from heterotrain.errors import PeerLost, UsageError
from heterotrain.group import Address, Group
from heterotrain.identity import Identity
from heterotrain.peers import PeerService
from heterotrain.plan_source import Held, PlanSource
from heterotrain.progress import Progress
from heterotrain.rendezvous import c10d, connect_store, host_store
from heterotrain.roster import FormationId, Roster, roster_of
from heterotrain.training import Training
from heterotrain.transfer import Holding

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Formed:
    """A formation in which this rank can train.

    Attributes:
        standing: who takes part.
        roster: their shares.
        rank: this rank in the process group.
        group: the connections; ``None`` for a process that is alone.
        agreed: the newest plan that all ranks hold; its shares may still wait for a boundary.
    """

    standing: Standing
    roster: Roster
    rank: int
    group: Group | None
    agreed: Held

    @property
    def member(self) -> Member:
        """This rank's entry in the plan."""
        return self.roster.members[self.rank]


class Checkpoints(Protocol):
    """What a fresh start needs of the checkpoints."""

    def best(self) -> tuple[int, int]:
        """Return (generation, step) of the best checkpoint that this rank can see, (-1, -1) for none."""

    def load_into(self, training: Training) -> bool:
        """Restore the best good checkpoint; ``False`` when there is none."""


class Membership(Protocol):
    """Finds formations."""

    def form(self, previous: Standing | None) -> Formed | None:
        """Return the next formation, or ``None`` when this rank leaves as announced or nobody needs it any more."""

    def newest(self) -> Held | None:
        """Return the newest plan that this rank has heard of."""

    def offer(self, text: str) -> None:
        """Take a plan from a peer."""

    def leave_soon(self, within_s: float) -> None:
        """Do not wait longer than this for a formation."""

    def everything_committed(self) -> None:
        """From now on this rank is needed only by those who have not committed everything."""

    def close(self) -> None:
        """Let go of everything."""


class Elastic:
    """The operator names generations; survivors make formations."""

    def __init__(
        self, identity: Identity, training: Training, checkpoints: Checkpoints, *, timeout_s: float, backend: str
    ) -> None:
        if identity.peer_port is None:
            raise UsageError("an operated job needs a peer port")
        self._identity = identity
        self._training = training
        self._checkpoints = checkpoints
        self._backend = backend
        self._timeout_s = timeout_s
        self._group: Group | None = None
        self._source = PlanSource(identity.plan_dir, job_uid=identity.job_uid)
        self._peers = PeerService(identity, self._source, timeout_s=timeout_s)
        self._assembly = Assembly(
            self._peers, has_cuda=torch.cuda.is_available(), host_store=host_store, on_broken=self._on_broken
        )
        self._source.on_change = self._peers.nudge
        self._peers.start()
        self._source.start()

    def form(self, previous: Standing | None) -> Formed | None:
        """Return the next formation; tries again for as long as members are lost on the way."""
        standing = previous
        while True:
            entry = self._assembly.next_formation(standing, patience_s=2 * self._timeout_s)
            if entry is None:
                return None
            standing = entry.standing
            formed = self._connect(entry)
            if formed is not None:
                return formed
            del entry  # and with it the store: whoever still waits for its keys is woken

    def newest(self) -> Held | None:
        """Return the newest plan that this rank has heard of."""
        return self._source.newest

    def offer(self, text: str) -> None:
        """Take a plan from a peer."""
        self._source.offer(text)

    def leave_soon(self, within_s: float) -> None:
        """Do not wait longer than this for a formation."""
        self._assembly.leave_soon(within_s)

    def everything_committed(self) -> None:
        """From now on this rank is needed only by those who have not committed everything."""
        self._assembly.finish()

    def close(self) -> None:
        """Let go of everything."""
        self._source.close()
        self._peers.close()

    def _connect(self, entry: Entry) -> Formed | None:
        standing = entry.standing
        members = [standing.plan.members[rank] for rank in standing.plan_ranks]
        me = (self._identity.worker_uid, self._identity.local_rank)
        rank = next(i for i, m in enumerate(members) if (m.worker_uid, m.local_rank) == me)
        address = Address(
            members=frozenset(m.address for m in members), spare_ports=frozenset(m.peer_port for m in members)
        )
        group = self._group = Group(rank=rank, world_size=len(members), address=address, hosted=entry.hosted)
        if self._assembly.is_broken(standing.formation):
            group.cut("given up before it was built")
        try:
            group.build(
                connect=lambda: connect_store(entry.store_address, entry.store_port),
                backend=backend_of(self._backend, all_cuda=entry.all_cuda), own_address=self._identity.address,
            )  # fmt: skip
            held = self._source.newest
            mine = held if held and held.plan.generation == standing.plan.generation else standing.held
            agreed = _agree_on_plan(group, mine, job_uid=self._identity.job_uid)
            _agree_on_state(group, self._training, self._checkpoints)
        except PeerLost as lost:
            _log.warning("formation %s failed: %s", standing.formation, lost)
            group.cut(str(lost))
            group.close()
            return None
        progress = self._training.progress
        roster = roster_of(
            agreed.plan, plan_ranks=standing.plan_ranks, formation=standing.formation,
            epoch=progress.epoch, epoch_step=progress.epoch_steps,
        )  # fmt: skip
        _log.info("formation %s: rank %d of %d, shares %s", standing.formation, rank, len(members), list(roster.shares))
        return Formed(standing=standing, roster=roster, rank=rank, group=group, agreed=agreed)

    def _on_broken(self, reason: str) -> None:
        if self._group is not None:
            self._group.cut(reason)


class Fixed:
    """No operator: one process, or what torchrun started; even shares for ever, and no survivors."""

    def __init__(
        self, identity: Identity, training: Training, checkpoints: Checkpoints, *, batch_samples: int, backend: str
    ) -> None:
        world_size = identity.world_size or 1
        members = tuple(
            Member(
                rank=rank, worker=f"rank-{rank}", worker_uid=f"rank-{rank}", address="127.0.0.1", peer_port=0,
                pool="local", on_demand=True, share_samples=share,
            )
            for rank, share in enumerate(evenly(batch_samples, world_size))
        )  # fmt: skip
        plan = Plan(
            job_uid=identity.job_uid, generation=1, revision=0, members=members, global_batch_samples=batch_samples,
            boundary=Boundary(kind=BoundaryKind.NEVER), reason="no operator: even shares",
        )  # fmt: skip
        self._held = Held(plan=plan, text=encode_plan(plan))
        self._done = False
        self._identity = identity
        self._training = training
        self._checkpoints = checkpoints
        self._backend = backend

    def form(self, previous: Standing | None) -> Formed | None:
        """Return the only formation there is.

        Raises:
            PeerLost: it is over: whoever started the processes has to start them again.
        """
        if previous is not None:
            if previous.leaving or self._done:
                return None
            raise PeerLost("a rank was lost, and without an operator nobody replaces it: start the job again")
        group = None
        if self._identity.rank is not None and self._identity.world_size is not None:
            store, _, _ = next(iter(c10d.rendezvous("env://")))
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            group = Group(
                rank=self._identity.rank, world_size=self._identity.world_size,
                address=Address(members=frozenset(), spare_ports=frozenset()),
            )  # fmt: skip
            prefixed = c10d.PrefixStore(f"heterotrain-{attempt}", store)
            backend = backend_of(self._backend, all_cuda=torch.cuda.is_available())
            group.build(connect=lambda: prefixed, backend=backend, own_address=None)
        _agree_on_state(group, self._training, self._checkpoints)
        ranks = tuple(range(len(self._held.plan.members)))
        standing = Standing(held=self._held, formation=FormationId(generation=1, number=0), plan_ranks=ranks)
        roster = roster_of(self._held.plan, plan_ranks=ranks, formation=standing.formation)
        rank = self._identity.rank or 0
        return Formed(standing=standing, roster=roster, rank=rank, group=group, agreed=self._held)

    def newest(self) -> Held | None:
        """Return the only plan there is."""
        return self._held

    def offer(self, text: str) -> None:
        """Nobody offers plans here."""

    def leave_soon(self, within_s: float) -> None:
        """Nobody waits here."""

    def everything_committed(self) -> None:
        """A rank that is lost from now on is no loss."""
        self._done = True

    def close(self) -> None:
        """Nothing to let go of."""


def agreed_plan(group: Group, decision: Verdict, mine: Held, *, job_uid: str) -> Held:
    """Return the newest plan that anybody holds; whoever holds it sends its bytes when somebody lacks it.

    Raises:
        PeerLost: the group broke meanwhile.
    """
    if decision.everybody_holds:
        return mine
    text = mine.text.encode() if group.rank == decision.holder else None
    received = group.broadcast_bytes(text, size=decision.plan_bytes, source=decision.holder).decode()
    plan = decode_plan(received, job_uid=job_uid)
    if isinstance(plan, Refused):
        raise UsageError(f"a peer sent a plan that this rank refuses: {plan.reason}")
    return Held(plan=plan, text=received)


def plan_slot(held: Held, *, vote: bool, steps: int, leaving: bool, weight: float) -> Slot:
    """Return a slot that says which plan this rank holds."""
    return Slot(
        vote=vote, steps=steps, generation=held.plan.generation, revision=held.plan.revision,
        plan_bytes=len(held.text.encode()), plan_checksum=held.checksum, leaving=leaving, weight=weight,
    )  # fmt: skip


def _agree_on_plan(group: Group, mine: Held, *, job_uid: str) -> Held:
    row = to_row(plan_slot(mine, vote=True, steps=0, leaving=False, weight=0.0))
    decision = verdict(group.gather_now(row[:HEADER]))
    return agreed_plan(group, decision, mine, job_uid=job_uid)


def _agree_on_state(group: Group | None, training: Training, checkpoints: Checkpoints) -> None:
    """Give everybody the newest state that anybody holds: a survivor's, else a checkpoint's, else a fresh one."""
    progress = training.progress
    best = (-1, -1) if training.has_state else checkpoints.best()
    steps, evaluated = progress.order if training.has_state else (-1, -1)
    rows = [[float(steps), float(evaluated), float(best[0]), float(best[1]), float(progress.stopped)]]
    if group is not None:
        rows = group.gather_now(rows[0])
    holdings = [
        Holding(
            steps=int(r[0]),
            evaluated=int(r[1]),
            checkpoint_generation=int(r[2]),
            checkpoint_step=int(r[3]),
            stopped=r[4] == 1.0,
        )
        for r in rows
    ]
    who = transfer.roles(holdings)
    rank = group.rank if group is not None else 0
    if who.fresh and rank == who.leader:
        if not checkpoints.load_into(training):
            training.progress = Progress()
        training.has_state = True
    if group is not None:
        received = transfer.exchange(group, who, training.flat)
        if received is not None:
            training.restore_flat(received)
    if not who.fresh:  # of those who had committed the same steps, some may be a hook or a farewell ahead
        stopped = any(holdings[donor].stopped for donor in who.donors)
        training.progress = replace(training.progress, evaluated=holdings[who.leader].evaluated, stopped=stopped)


def backend_of(setting: str, *, all_cuda: bool) -> str:
    """Return the backend for gradients: as set, or NCCL where every member can, else gloo."""
    if setting != "auto":
        return setting
    return "nccl" if all_cuda else "gloo"


def device_of(identity: Identity) -> torch.device:
    """Return the accelerator of this local rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", identity.local_rank % torch.cuda.device_count())
    return torch.device("cpu")
