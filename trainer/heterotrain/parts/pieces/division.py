"""How the ranks of a formation agree on the pieces of a divided model."""

from __future__ import annotations

import json
from dataclasses import dataclass

from heterotrain.errors import UsageError
from heterotrain.network.group import Group
from heterotrain.network.texts import gather_texts
from heterotrain.state.layout import ModelLayout, checksum, is_whole, sizes_of
from heterotrain.state.ranges import Holding, OwnedRange, TensorRange, pieces_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceDivision:
    """The pieces of the model in one formation.

    Attributes:
        names: of all trainable parameters of the whole model, in its order.
        pieces: of these parameters.
        holding: what this rank holds of them.
    """

    names: tuple[str, ...]
    pieces: tuple[OwnedRange, ...]
    holding: Holding


def divide(group: Group, layout: ModelLayout) -> PieceDivision | None:
    """Return the pieces of the model among the ranks of a new formation; ``None`` if each rank holds everything.

    Every rank has to call this at the same point.

    Raises:
        PeerLost: the group broke meanwhile.
        UsageError: ranks have different models, or train different parameters; or the model has too many.
    """
    if not any(row[0] for row in group.gather_now([float(not is_whole(layout.shapes, layout.holding))])):
        return None
    sizes = sizes_of(layout.shapes)
    trained = {name for name, parameter in layout.named_parameters() if parameter.requires_grad}
    own = json.dumps({
        "model": checksum(layout.shapes),
        "held": {name: [own.start, own.stop, name in trained] for name, own in layout.holding.items()},
    }).encode()  # fmt: skip
    found = [json.loads(text) for text in gather_texts(group, own, "what each rank holds of the model")]
    for rank, other in enumerate(found):
        if other["model"] != found[group.rank]["model"]:
            raise UsageError(
                f"rank {rank} has another model than rank {group.rank}: build the same model on every rank, with the "
                "same names and shapes of parameters"
            )
    trains: dict[str, bool] = {}
    for other in found:
        for name, (_, _, is_trained) in other["held"].items():
            if trains.setdefault(name, is_trained) != is_trained:
                raise UsageError(f"parameter {name!r} is frozen on some ranks only: freeze it on all, or on none")
    names = tuple(name for name in sizes if trains.get(name))
    holdings = [
        {name: TensorRange(name, start, stop) for name, (start, stop, _) in other["held"].items() if name in sizes}
        for other in found
    ]
    pieces = tuple(piece for piece in pieces_of(sizes, holdings) if trains[piece.name])
    division = PieceDivision(
        names=names, pieces=pieces, holding={name: e for name, e in holdings[group.rank].items() if trains[name]}
    )
    group.connect_owners([piece.owners for piece in sorted(pieces, key=lambda piece: piece.owners)])
    return division
