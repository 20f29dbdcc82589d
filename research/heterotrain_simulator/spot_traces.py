"""Recorded spot capacity: added and removed nodes.

Source: Bamboo (NSDI 2023), repository uclasystem/bamboo at 8080929, ``traces/p3-trace.csv`` and
``traces/g4dn-trace.csv``: 11.4 h of p3 and 10.8 h of g4dn instances, one row for each added or removed node, at a
resolution of one minute. Here the rows of one minute are one entry (minute, nodes added, nodes removed), without
the nodes' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heterotrain_simulator.scenario import Change

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Minute:
    """Nodes added and removed in one minute."""

    at_s: float
    added: int
    removed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A recorded trace.

    Attributes:
        name: short name.
        what: the instances.
        minutes: in order of time; the first ones are the initial nodes.
        end_s: end of the recording.
    """

    name: str
    what: str
    minutes: tuple[Minute, ...]
    end_s: float

    @property
    def peak(self) -> int:
        """Largest number of nodes."""
        nodes = most = 0
        for minute in self.minutes:
            nodes += minute.added - minute.removed
            most = max(most, nodes)
        return most

    @property
    def mean_nodes(self) -> float:
        """Mean number of nodes over the recorded time, from the first change on."""
        total = 0.0
        nodes, since = 0, self.minutes[0].at_s
        for minute in self.minutes:
            total += nodes * (minute.at_s - since)
            nodes, since = nodes + minute.added - minute.removed, minute.at_s
        total += nodes * (self.end_s - since)
        return total / (self.end_s - self.minutes[0].at_s)


def as_changes(trace: Trace, pool: str) -> tuple[Change, ...]:
    """Return the trace as changes of one pool's workers, one worker for each node."""
    return tuple(
        Change(pool=pool, at_s=minute.at_s, joined=minute.added, lost=minute.removed) for minute in trace.minutes
    )


def _trace(name: str, what: str, rows: tuple[tuple[int, int, int], ...]) -> Trace:
    minutes = tuple(Minute(at_s=minute * MINUTE_S, added=added, removed=removed) for minute, added, removed in rows)
    return Trace(name=name, what=what, minutes=minutes, end_s=minutes[-1].at_s)


P3 = _trace(
    "p3",
    "AWS p3 spot instances (V100)",
    (
        (0, 18, 0), (1, 1, 0), (3, 4, 0), (5, 1, 0), (6, 1, 0), (7, 2, 0), (11, 2, 0), (13, 1, 0), (24, 1, 0),
        (25, 1, 0), (34, 0, 4), (43, 4, 0), (51, 0, 6), (53, 0, 3), (54, 0, 1), (55, 0, 1), (57, 0, 3), (59, 0, 3),
        (61, 6, 0), (65, 2, 0), (67, 1, 0), (69, 1, 0), (70, 3, 0), (71, 4, 0), (77, 0, 1), (79, 0, 2), (80, 1, 0),
        (81, 1, 0), (83, 1, 0), (85, 0, 3), (87, 0, 1), (89, 0, 2), (90, 1, 0), (96, 1, 0), (97, 4, 0), (105, 0, 1),
        (107, 0, 1), (121, 1, 0), (122, 1, 0), (140, 0, 1), (141, 0, 5), (142, 0, 1), (143, 0, 2), (150, 4, 0),
        (153, 1, 0), (154, 1, 0), (160, 2, 0), (161, 1, 0), (164, 0, 1), (167, 1, 0), (168, 0, 1), (171, 1, 0),
        (178, 0, 6), (182, 0, 3), (190, 3, 0), (192, 0, 1), (193, 1, 0), (199, 5, 0), (201, 1, 0), (218, 0, 2),
        (219, 1, 0), (230, 0, 1), (234, 2, 0), (235, 0, 3), (236, 0, 3), (237, 0, 3), (241, 3, 0), (245, 0, 3),
        (256, 2, 0), (261, 0, 1), (262, 1, 0), (265, 0, 1), (267, 0, 1), (269, 0, 4), (277, 3, 0), (278, 6, 0),
        (279, 1, 0), (280, 3, 0), (283, 0, 6), (284, 1, 0), (285, 0, 1), (294, 2, 0), (295, 3, 0), (296, 1, 0),
        (299, 0, 1), (300, 1, 0), (305, 0, 2), (309, 2, 0), (338, 0, 3), (340, 0, 3), (342, 0, 1), (346, 0, 2),
        (348, 0, 1), (351, 2, 0), (352, 1, 0), (354, 0, 4), (356, 0, 1), (357, 1, 0), (363, 2, 0), (366, 7, 0),
        (367, 2, 0), (374, 0, 1), (376, 1, 0), (382, 0, 3), (395, 1, 0), (399, 2, 0), (402, 0, 1), (404, 0, 6),
        (406, 0, 4), (408, 0, 3), (416, 3, 0), (420, 1, 0), (424, 0, 1), (431, 8, 0), (435, 3, 0), (443, 0, 1),
        (449, 0, 4), (451, 0, 1), (455, 0, 3), (463, 0, 2), (467, 0, 1), (469, 0, 2), (489, 2, 0), (491, 1, 0),
        (492, 1, 0), (495, 1, 0), (496, 1, 0), (500, 0, 4), (502, 0, 4), (504, 0, 2), (506, 0, 2), (508, 0, 1),
        (511, 1, 0), (512, 1, 0), (514, 0, 1), (515, 1, 0), (519, 1, 0), (521, 4, 0), (524, 1, 0), (527, 0, 3),
        (529, 0, 1), (537, 2, 0), (543, 1, 0), (545, 0, 2), (547, 0, 1), (549, 0, 1), (559, 1, 0), (562, 1, 0),
        (563, 2, 0), (567, 1, 0), (573, 0, 1), (576, 1, 0), (585, 0, 1), (587, 0, 1), (591, 0, 1), (594, 1, 0),
        (595, 1, 0), (607, 0, 2), (611, 0, 1), (613, 0, 1), (666, 0, 1), (680, 0, 2), (682, 0, 1),
    ),
)  # fmt: skip

G4DN = _trace(
    "g4dn",
    "AWS g4dn spot instances (T4)",
    (
        (8, 1, 0), (9, 1, 0), (10, 19, 0), (12, 2, 0), (15, 1, 0), (24, 0, 5), (26, 0, 4), (28, 0, 1), (29, 1, 0),
        (30, 2, 0), (44, 0, 1), (50, 0, 4), (66, 0, 1), (71, 0, 2), (119, 0, 1), (120, 0, 2), (123, 1, 0),
        (124, 1, 0), (126, 1, 0), (127, 1, 0), (148, 0, 1), (151, 1, 0), (152, 1, 0), (158, 0, 1), (164, 0, 1),
        (166, 1, 0), (192, 0, 2), (194, 0, 2), (196, 0, 2), (198, 0, 1), (200, 0, 1), (202, 2, 0), (206, 1, 0),
        (210, 1, 0), (212, 1, 0), (214, 1, 0), (216, 2, 0), (222, 0, 1), (225, 1, 0), (232, 0, 2), (235, 4, 0),
        (239, 2, 0), (246, 0, 1), (256, 1, 0), (264, 0, 3), (265, 1, 0), (292, 0, 1), (310, 0, 2), (313, 1, 0),
        (324, 0, 2), (326, 0, 1), (332, 1, 0), (336, 1, 0), (337, 3, 0), (360, 0, 1), (362, 1, 0), (363, 1, 0),
        (364, 0, 1), (378, 0, 1), (381, 1, 0), (395, 0, 1), (400, 1, 0), (404, 1, 0), (406, 1, 0), (410, 1, 0),
        (412, 1, 0), (413, 0, 1), (421, 1, 0), (425, 1, 0), (460, 1, 0), (465, 0, 1), (485, 0, 1), (488, 1, 0),
        (497, 0, 1), (499, 1, 0), (503, 0, 2), (505, 1, 0), (511, 0, 1), (522, 1, 0), (526, 1, 0), (547, 0, 1),
        (549, 0, 1), (553, 0, 1), (557, 1, 0), (565, 0, 1), (569, 1, 0), (571, 1, 0), (583, 0, 2), (584, 1, 0),
        (607, 0, 1), (610, 0, 1), (612, 1, 0), (616, 1, 0), (621, 0, 2), (626, 0, 1), (638, 0, 1), (642, 0, 3),
        (644, 0, 2), (646, 0, 1),
    ),
)  # fmt: skip

TRACES: Mapping[str, Trace] = {trace.name: trace for trace in (P3, G4DN)}
