"""What probably made copies of the state differ, from what each rank says about its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from heterotrain.state.comparison import Difference


@dataclass(frozen=True, slots=True)
class Account:
    """What one rank says about its copy.

    Attributes:
        joined: committed steps when it took the state over from running ranks; -1 if it did not.
        formats: types of the optimizers' state by its name.
    """

    joined: int
    formats: Mapping[str, str]


def formats_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, str]:
    """Return the types of the optimizers' state by its name."""
    found: dict[str, set[str]] = {}
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items() if isinstance(state, Mapping) else ():
                kind = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
                found.setdefault(str(key), set()).add(kind)
    return {key: " and ".join(sorted(kinds)) for key, kinds in found.items()}


def likely_cause(
    difference: Difference, accounts: Sequence[Account], *, names: Collection[str], frozen: Collection[str]
) -> str:
    """Return a sentence with what probably made the copies differ, and what to do; empty if nothing points to a cause.

    Args:
        difference: the copies that differ.
        accounts: by rank.
        names: the tensors that differ.
        frozen: the model's frozen parameters.
    """
    good = accounts[difference.donor].formats
    for rank in difference.others:
        own = accounts[rank].formats
        for key in sorted({*good, *own}):
            if good.get(key) != own.get(key):
                return (
                    f"Probably the optimizer's load_state_dict changes formats: its {key} is "
                    f"{own.get(key, 'not there')} on rank {rank} and {good.get(key, 'not there')} on rank "
                    f"{difference.donor}. "
                )
    if names and set(names) <= set(frozen):
        return (
            "Probably code changes frozen parameters by values of its own rank: make the change the same on every "
            "rank; for one in forward passes, job.buffers(name, rule) says how ranks combine it. "
        )
    last = max(account.joined for account in accounts)
    joined = {rank for rank, account in enumerate(accounts) if account.joined == last}
    if last >= 0 and joined in ({*difference.others}, {*range(len(accounts))} - {*difference.others}):
        which = f"rank {', '.join(map(str, sorted(joined)))}"
        return (
            f"Probably something is missing on {which}, which took the state over after step {last - 1}: what the "
            "script or an optimizer keeps outside of state_dict(), such as a count in an attribute, did not come with "
            "it. Return it from state_dict(), or pass its object to job.register. "
        )
    return ""
