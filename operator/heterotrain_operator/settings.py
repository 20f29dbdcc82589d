"""Settings of the operator, each stated once: its field gives the command-line option and the environment variable.

The field ``prometheus.poll_s`` is the option ``--prometheus-poll-seconds`` of ``heterotrain-operator run`` and the
variable ``HETEROTRAIN_OPERATOR_PROMETHEUS_POLL_SECONDS``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

ENVIRONMENT_PREFIX = "HETEROTRAIN_OPERATOR"


def _about(text: str, *, at_least: float | None = None, at_most: float | None = None) -> Mapping[str, Any]:
    """Return a field's metadata: its help text and the range of its values, both ends included."""
    return {"help": text, "at_least": at_least, "at_most": at_most}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSettings:
    """How telemetry is read from Prometheus."""

    url: str | None = field(
        default=None, metadata=_about("Base URL of Prometheus; empty for even shares without telemetry.")
    )
    poll_s: float = field(
        default=1.0,
        metadata=_about("Seconds between two reads of one job; about the scrape interval is best.", at_least=0.1),
    )
    timeout_s: float = field(default=5.0, metadata=_about("Seconds to wait for an answer."))
    auth_dir: Path | None = field(
        default=None,
        metadata=_about("Folder (a mounted Secret) with the file token, or the files username and password."),
    )
    ca_file: Path | None = field(default=None, metadata=_about("Certificate authority of a private Prometheus."))
    stale_s: float = field(
        default=30.0,
        metadata=_about(
            "Seconds without a new sample after which telemetry is stale; three scrape intervals where that is longer.",
            at_least=1.0,
            at_most=600.0,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one operator process."""

    namespace: str = field(default="default", metadata=_about("Namespace of the operator itself; it holds the Lease."))
    identity: str = field(default="heterotrain-operator", metadata=_about("Name of this replica in the Lease."))
    watch_namespaces: str = field(
        default="", metadata=_about("Namespaces to watch, separated by commas; empty for all.")
    )
    kubeconfig: str | None = field(
        default=None, metadata=_about("Kubeconfig to use outside a cluster; empty for KUBECONFIG or ~/.kube/config.")
    )
    # Passes mostly wait for the API server: on two processors, sixteen workers made no more passes a second than four.
    workers: int = field(
        default=4,
        metadata=_about(
            "Jobs to reconcile at the same time; as many more while urgent ones wait.", at_least=1, at_most=64
        ),
    )
    relist_s: float = field(
        default=300.0, metadata=_about("Seconds between two full lists, which make up for missed events.")
    )
    foreign_pods_s: float = field(
        default=30.0, metadata=_about("Seconds between two lists of other pods, which use capacity of the nodes.")
    )
    gather_s: float = field(
        default=5.0, metadata=_about("Longest time in seconds that a ready worker waits for starting ones.")
    )
    status_interval_s: float = field(
        default=2.0,
        metadata=_about(
            "Least seconds between two status updates of a job that only bring new numbers; all jobs together write 20 "
            "a second."
        ),
    )
    namespace_weights: str = field(
        default="",
        metadata=_about("Shares of namespaces in nodes that jobs compete for, as NAMESPACE=WEIGHT,…; others have 1."),
    )
    node_announcements: str = field(
        default="",
        metadata=_about("Further taint keys and types of node conditions that announce a node's end, with commas."),
    )
    network_policy: bool = field(
        default=False,
        metadata=_about("Give each job a NetworkPolicy: only its own workers reach its workers, others their metrics."),
    )
    egress: str = field(
        default="",
        metadata=_about(
            "With a NetworkPolicy for each job, what its workers may reach besides each other and DNS: a JSON list of "
            "egress rules. Empty: everything."
        ),
    )
    worker_defaults: str = field(
        default="",
        metadata=_about("Labels, annotations and env of workers whose template does not have them, as a JSON object."),
    )
    health_port: int = field(default=8080, metadata=_about("Port of the health probes."))
    metrics_port: int = field(default=9090, metadata=_about("Port of the operator's own metrics."))
    metrics_tls_dir: Path | None = field(
        default=None,
        metadata=_about("Folder (a mounted Secret) with tls.crt and tls.key: metrics are served by TLS then."),
    )
    metrics_auth: bool = field(
        default=False,
        metadata=_about("Serve metrics only to tokens that may get /metrics, by TokenReview and SubjectAccessReview."),
    )
    listen: str = field(
        default="",
        metadata=_about("Address to listen on for probes and scrapes; empty for all, of IPv4 and IPv6."),
    )
    leader_election: bool = field(
        default=True, metadata=_about("Act only while holding the Lease. Switch it off only to debug a single replica.")
    )
    lease_name: str = field(
        default="heterotrain-operator", metadata=_about("Lease that elects the acting replica; one for each release.")
    )
    # Answers that take 5 s must not depose the leader: see kube/lease.py.
    lease_duration_s: float = field(
        default=12.0, metadata=_about("Seconds after which a silent leader is replaced.", at_least=5.0, at_most=300.0)
    )
    prometheus: PrometheusSettings = PrometheusSettings()

    @property
    def watched(self) -> tuple[str, ...]:
        """The namespaces to watch; empty for all."""
        return namespaces(self.watch_namespaces)


def namespaces(text: str) -> tuple[str, ...]:
    """Return the namespaces in a text such as ``team-a, team-b``, each once."""
    return tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))


_ANNOUNCEMENT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,314}[A-Za-z0-9])?")


def announcements(text: str) -> tuple[str, ...]:
    """Return the entries of a text such as ``example.com/retiring, MaintenanceScheduled``, each once.

    Raises:
        ValueError: an entry is neither the key of a taint nor the type of a condition, or it holds on healthy nodes.
    """
    found = namespaces(text)
    for entry in found:
        if not _ANNOUNCEMENT.fullmatch(entry):
            raise ValueError(f"node announcements: {entry!r} is neither the key of a taint nor the type of a condition")
        if entry == "Ready":
            raise ValueError(
                "node announcements: Ready holds on every healthy node, and workers would leave it: remove it"
            )
    return found


def egress_rules(text: str) -> list[dict[str, Any]] | None:
    """Return the rules in a text; ``None`` for an empty one.

    Raises:
        ValueError: it is not a JSON list of objects.
    """
    if not text:
        return None
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"egress: {text!r} is not a JSON list of rules as in a NetworkPolicy")
    return found


LEAST_WEIGHT, MOST_WEIGHT = 0.01, 1000.0


def namespace_weights(text: str) -> dict[str, float]:
    """Return the weights in a text such as ``team-a=3,team-b=0.5``.

    Raises:
        ValueError: an entry is not ``NAMESPACE=WEIGHT`` with a weight from 0.01 to 1000.
    """
    weights: dict[str, float] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = entry.partition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = 0.0
        if not name or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise ValueError(f"namespace weights: {entry!r} is not NAMESPACE=WEIGHT with a weight from 0.01 to 1000")
        weights[name] = weight
    return weights


class CommandLineOption(NamedTuple):
    """One setting as a command-line option.

    Attributes:
        name: without the leading dashes, such as ``prometheus-poll-seconds``.
        kind: type of its values; an empty text stands for ``None`` where ``default`` is ``None``.
        at_least: smallest value, ``None`` for any.
        at_most: largest value, ``None`` for any.
    """

    name: str
    kind: type
    default: Any
    help: str
    at_least: Any
    at_most: Any

    @property
    def parameter(self) -> str:
        """The option's name as a Python identifier."""
        return self.name.replace("-", "_")


def setting_options(kind: type = Settings, prefix: str = "") -> Iterator[CommandLineOption]:
    """Yield an option for every setting."""
    for each, value_type in _typed_fields(kind):
        if is_dataclass(value_type):
            yield from setting_options(value_type, f"{prefix}{each.name}-")
        else:
            yield CommandLineOption(_option_name(prefix, each), value_type, each.default, **each.metadata)


def settings_from(values: Mapping[str, Any]) -> Settings:
    """Return the settings for the options' values, given by parameter name."""
    return Settings(**_arguments(Settings, "", values))


def _arguments(kind: type, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each, value_type in _typed_fields(kind):
        if is_dataclass(value_type):
            found[each.name] = value_type(**_arguments(value_type, f"{prefix}{each.name}-", values))
            continue
        value = values[_option_name(prefix, each).replace("-", "_")]
        found[each.name] = None if each.default is None and value in (None, "") else value_type(value)
    return found


def _typed_fields(kind: type) -> Iterator[tuple[Field[Any], type]]:
    """Yield a dataclass's fields with the types of their values; for optional ones, of the values besides ``None``."""
    hints = get_type_hints(kind)
    for each in fields(kind):
        yield (
            each,
            next((member for member in get_args(hints[each.name]) if member is not type(None)), hints[each.name]),
        )


def _option_name(prefix: str, setting: Field[Any]) -> str:
    return prefix + re.sub(r"_s$", "_seconds", setting.name).replace("_", "-")
