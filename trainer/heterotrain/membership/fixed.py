"""Membership without an operator: a single process, or the processes started by torchrun."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.plan import Boundary, BoundaryKind, Layout, LayoutKind, Member, Plan, Rank
from heterotrain_core.split.proportion import evenly

from heterotrain.errors import PeerLost, UsageError
from heterotrain.membership.agreement import agree_on_state
from heterotrain.membership.devices import BackendChoice, DeviceIds, choose_backend, device_ids
from heterotrain.membership.formation import FormationMembership
from heterotrain.membership.interface import ActiveGroup, OwnSide
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.membership.roster import FormationId, roster_of
from heterotrain.network.authentication import Credentials
from heterotrain.network.connection_setup import c10d
from heterotrain.network.group import Group
from heterotrain.network.hang import HangWatch
from heterotrain.network.peer_sockets import SocketFilter

_log = logging.getLogger(__name__)

MOST_REASON = 500
"""Characters of an error that other ranks repeat."""
_FAILED = "failed"
_TRAININGS = itertools.count()
ROUNDS = 4
"""Micro-batches of a pipeline for each of its stages; a fifth of the time is then spent on filling and emptying it."""


def store_prefix() -> str:
    """Return what the next training of this process puts before its keys.

    The store outlives a training, and a second one, as of another fold, must not read the first one's addresses. All
    ranks run the same script, so they count alike.
    """
    return f"heterotrain-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{next(_TRAININGS)}"


class Fixed:
    """Membership without an operator: even shares throughout, and no recovery from a lost rank."""

    def __init__(
        self, own: OwnSide, *, batch_samples: int, shards: int = 1, settings: Mapping[str, Any] | None = None
    ) -> None:
        """Plan even members.

        Args:
            own: this rank.
            batch_samples: global batch.
            shards: ranks that divide the model among themselves, with consecutive numbers; 1 for whole models.
            settings: those of ``heterotrain.init``, the same on every rank.

        Raises:
            UsageError: the ranks do not make whole members.
        """
        self._own, self._identity = own, own.identity
        self._settings = dict(settings or {})
        self._batch_samples = batch_samples
        self._held = self._plan(Layout(kind=LayoutKind.SHARDED, shards=shards) if shards > 1 else Layout())
        self._done = False
        self._group: Group | None = None
        self._store: Any = None
        self._watch: HangWatch | None = None

    def divide(self, layout: Layout) -> None:
        """Divide the model this way on all members, before the first formation.

        Raises:
            UsageError: the ranks do not make whole members.
        """
        self._held = self._plan(layout)

    def _plan(self, layout: Layout) -> HeldPlan:
        """Return a plan with even members of this layout.

        Raises:
            UsageError: the ranks do not make whole members.
        """
        world_size, size = self._identity.world_size or 1, layout.ranks
        if world_size % size:
            raise UsageError(
                f"{world_size} ranks cannot be members of {size}: with a divided model, torchrun has to start "
                "the same number of ranks on each host"
            )
        members = tuple(
            Member(
                index=index, pool="local", share_samples=share, layout=layout,
                micro_batch_samples=-(-share // (ROUNDS * layout.stages)) if layout.stages > 1 else 0,
            )
            for index, share in enumerate(evenly(self._batch_samples, world_size // size))
        )  # fmt: skip
        ranks = tuple(
            Rank(
                rank=rank, member=rank // size, worker=f"rank-{rank}", worker_uid=f"rank-{rank}",
                address="127.0.0.1", peer_port=0, on_demand=True, stage=rank % size // layout.shards,
                shard=rank % size % layout.shards,
            )
            for rank in range(world_size)
        )  # fmt: skip
        plan = Plan(
            job_uid=self._identity.job_uid, generation=1, revision=0, members=members, ranks=ranks,
            global_batch_samples=self._batch_samples, boundary=Boundary(kind=BoundaryKind.NEVER),
            reason="no operator: even shares",
        )  # fmt: skip
        return HeldPlan(plan=plan, text=encode_plan(plan))

    def form(self, previous: FormationMembership | None) -> ActiveGroup | None:
        """Return the only formation.

        Raises:
            PeerLost: it has ended, and the processes have to be started again from outside.
        """
        if previous is not None:
            if previous.leaving or self._done:
                return None
            raise PeerLost(
                f"a rank was lost and is not replaced without an operator: start the job again{self._first_failure()}"
            )
        group = None
        if self._identity.rank is not None and self._identity.world_size is not None:
            store, _, _ = next(iter(c10d.rendezvous("env://")))
            group = self._group = Group(
                rank=self._identity.rank,
                world_size=self._identity.world_size,
                sockets=SocketFilter(members=frozenset(), excluded_ports=frozenset({self._identity.metrics_port or 0})),
                clock=self._own.clock,
            )
            prefixed = self._store = c10d.PrefixStore(store_prefix(), store)
            self._check_settings(prefixed)
            choice = self._choose(prefixed)
            group.build(
                connect=lambda: prefixed,
                topology=choice.topology,
                own_address="127.0.0.1" if self._is_one_host() else None,
                credentials=Credentials(secret=self._identity.secret or self._secret_of_store(prefixed)),
            )
            self._watch = self._own.watch_waits(lambda: self._group, list)
        ranks = tuple(range(len(self._held.plan.ranks)))
        place = partial(self._own.place, self._held.plan, self._identity.rank or 0)
        agree_on_state(group, self._own.training, self._own.checkpoints, place=place)
        membership = FormationMembership(
            held=self._held, formation=FormationId(generation=1, number=0), plan_ranks=ranks
        )
        roster = roster_of(self._held.plan, plan_ranks=ranks, formation=membership.formation)
        rank = self._identity.rank or 0
        return ActiveGroup(membership=membership, roster=roster, rank=rank, group=group, agreed=self._held)

    def _is_one_host(self) -> bool:
        """Return whether all ranks run on this host: then no other host has to reach their ports."""
        return self._identity.local_world_size == self._identity.world_size

    def _secret_of_store(self, store: Any) -> bytes:
        """Return a secret that rank 0 draws for this run. It is as safe as torchrun's own store, which has no lock."""
        if self._identity.rank == 0:
            store.set("secret", secrets.token_hex(keys.SECRET_BYTES))
        return bytes(store.get("secret"))

    def _first_failure(self) -> str:
        """Return the error of the rank that has failed first, as the end of a sentence; empty where it is not known."""
        with contextlib.suppress(Exception):  # the store may have ended with its rank
            if self._store is not None and self._store.check([_FAILED]):
                return f". The first error was that of {self._store.get(_FAILED).decode(errors='replace')}"
        return ""

    def _check_settings(self, store: Any) -> None:
        """Check that all ranks call ``heterotrain.init`` with the same settings.

        Raises:
            UsageError: they do not.
        """
        store.set(f"settings-{self._identity.rank}", json.dumps(self._settings))
        first = json.loads(store.get("settings-0"))
        for rank in range(self._identity.world_size or 1):
            other = json.loads(store.get(f"settings-{rank}"))
            for name in (name for name in first if other.get(name) != first[name]):
                raise UsageError(
                    f"ranks call heterotrain.init with different settings: {name} is {other.get(name)!r} on rank "
                    f"{rank} and {first[name]!r} on rank 0: give every rank the same"
                )

    def _choose(self, store: Any) -> BackendChoice:
        """Return the backend for gradients, after every rank has put its devices into the store.

        Raises:
            UsageError: NCCL is required, but the ranks' devices cannot use it.
        """
        ranks = range(len(self._held.plan.ranks))
        store.set(f"device-{self._identity.rank}", json.dumps(device_ids(self._own.device)))
        devices: list[DeviceIds] = [tuple(json.loads(store.get(f"device-{rank}"))) for rank in ranks]
        choice = choose_backend(self._own.backend, devices, [rank.worker for rank in self._held.plan.ranks])
        if choice.reason and self._identity.rank == 0:
            _log.info("%s", choice)
        return choice

    def adopt(self, membership: FormationMembership) -> bool:
        """Return that there is no other generation."""
        return membership.plan.generation == self._held.plan.generation

    def newest(self) -> HeldPlan | None:
        """Return the only plan."""
        return self._held

    def offer(self, text: str) -> None:
        """Do nothing: there are no other plans."""

    def leave_soon(self, within_s: float) -> None:
        """Do nothing: there is no wait for a formation."""

    def everything_committed(self) -> None:
        """Note that a rank lost from now on is not missed."""
        self._done = True

    def abandon(self, reason: str) -> None:
        """Break all connections at once; the other ranks can tell why, unless one of them has failed before."""
        if self._store is not None:
            with contextlib.suppress(Exception):  # the store may have ended with its rank
                self._store.compare_set(_FAILED, "", f"rank {self._identity.rank}: {reason[:MOST_REASON]}")
        if self._group is not None:
            self._group.cut(reason)
        self.close()

    def close(self) -> None:
        """Stop the hang watch."""
        if self._watch is not None:
            self._watch.close()
