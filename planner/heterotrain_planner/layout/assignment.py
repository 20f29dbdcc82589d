"""The assignment problem: one device for each place, at the least total cost (Kuhn 1955, Munkres 1957)."""

from __future__ import annotations

import numpy as np

from heterotrain_planner.layout.costs import Floats


def assign(cost_PD: Floats) -> list[int]:
    """Return for each place the device that it gets, so that the sum of costs is least.

    Places are added one by one; each time the cheapest alternating path by reduced costs decides who moves. Every
    step is one pass over all devices, so the time grows with places² · devices.

    Args:
        cost_PD: finite; at least as many devices as places.
    """
    places, devices = cost_PD.shape
    # Index ``devices`` stands for the place that is being added.
    owner = np.full(devices + 1, -1)
    price_P, price_D = np.zeros(places), np.zeros(devices + 1)
    for place in range(places):
        owner[devices] = place
        at = devices
        least_D = np.full(devices, np.inf)
        came_D = np.full(devices, devices)
        done = np.zeros(devices + 1, dtype=bool)
        while owner[at] >= 0:
            done[at] = True
            current = int(owner[at])
            reduced = cost_PD[current] - price_P[current] - price_D[:devices]
            better = ~done[:devices] & (reduced < least_D)
            least_D[better], came_D[better] = reduced[better], at
            open_D = np.where(done[:devices], np.inf, least_D)
            at = int(np.argmin(open_D))
            delta = float(open_D[at])
            price_P[owner[done]] += delta
            price_D[done] -= delta
            least_D[~done[:devices]] -= delta
        while at != devices:
            before = int(came_D[at])
            owner[at] = owner[before]
            at = before
    found = [-1] * places
    for device in range(devices):
        if owner[device] >= 0:
            found[int(owner[device])] = device
    return found
