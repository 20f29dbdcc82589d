"""PromQL queries for one job, and for all jobs. Pure.

The queries read raw sums instead of rates: ``rate()`` needs two samples of a series, and a share in use for a few
steps may have only one.
"""

from __future__ import annotations

from collections.abc import Iterable

from heterotrain_core.contract import metrics

from heterotrain_operator.prom.accepted import PLAUSIBLE
from heterotrain_operator.prom.vector import VectorSample

_TIME = "time_of"


def everything_of(job_uid: str) -> str:
    """Return the query for all series of a job that the operator reads."""
    return f'{{__name__=~"{"|".join(PLAUSIBLE)}",{metrics.LABEL_JOB_UID}="{job_uid}"}}'


def series_and_times_of(job_uid: str) -> str:
    """Return the query for all series of a job and the time of each member's newest scrape.

    ``or`` leaves out rows on the right with the labels of a row on the left, names of metrics aside, so the times need
    a label that no series has. The times have no name.
    """
    times = f'timestamp({metrics.READY}{{{metrics.LABEL_JOB_UID}="{job_uid}"}})'
    return f'{everything_of(job_uid)} or label_replace({times}, "{_TIME}", "scrape", "", "")'


def scrapes_of(job_uids: Iterable[str]) -> str:
    """Return the query for a number of each job that changes with each scrape: one row for each, whoever exports it."""
    uids = "|".join(sorted(job_uids))
    scraped = f'timestamp({metrics.READY}{{{metrics.LABEL_JOB_UID}=~"{uids}"}})'
    return f"sum by ({metrics.LABEL_JOB_UID}) ({scraped})"


def parse_scrapes(rows: Iterable[VectorSample]) -> dict[str, float]:
    """Return that number by the job's uid."""
    return {labels.get(metrics.LABEL_JOB_UID, ""): value for labels, value in rows}
