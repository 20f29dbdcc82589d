"""Jobs whose connections are encrypted: exact training, losses and joins, and strangers with another certificate."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed.harness import JOB_UID, Gate, Operator, assert_same_weights, reference
from heterotrain.data.sample_log import lineage
from heterotrain.network.authentication import Credentials, authenticate, peer_role
from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Ending
from support.certificates import put_certificate
from support.tap import Tap

Operate = Callable[..., Operator]


@pytest.mark.parametrize("encryption", ["TLS", "None"])
def test_a_job_loses_a_worker_and_gets_another_and_a_reader_sees_nothing(
    operate: Operate, tmp_path: Path, encryption: str
) -> None:
    """The tap is between a rank's peer port and the others: heartbeats, plans and the formation's store."""
    operator = operate(epochs=4, encryption=encryption)
    gate = Gate(tmp_path, 7)
    faults = [gate.fault, {"place": "reducing", "step": 4}, None]
    workers = [operator.start(f"w{i}", fault=fault) for i, fault in enumerate(faults)]
    tap = Tap()
    tap.target, workers[2].peer_port = workers[2].peer_port, tap.port
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish([workers[1]])
    operator.until(gate.reached, "the survivors continue by themselves")

    # A process with the job's secret, and the certificate of another job.
    victim = workers[0]
    refused = victim.metric("heterotrain_refused_connections_total") or 0.0
    (other := tmp_path / "other").mkdir()
    credentials = Credentials(secret=(tmp_path / keys.SECRET_KEY).read_bytes(), tls=put_certificate(other))
    stranger = socket.create_connection(("127.0.0.1", victim.peer_port), 30)
    with pytest.raises(ConnectionError, match="certificate" if encryption == "TLS" else "does not encrypt"):
        authenticate(stranger, credentials, role=peer_role(victim.uid, 0), listens=False, end_s=time.monotonic() + 30)
    operator.until(lambda: (victim.metric("heterotrain_refused_connections_total") or 0.0) > refused, "it is counted")

    replacement = operator.start("w1", incarnation=1)
    operator.until_ready(replacement)
    trained = [workers[0], workers[2], replacement]
    operator.plan(trained)
    text = f"plan {operator.generation}.{operator.revision}"
    operator.until(lambda: all(text in worker.log() for worker in trained[:2]), f"{text} is read")
    gate.open()
    operator.finish(trained)
    expected, ids = reference(epochs=4)
    for worker in trained:
        assert worker.outcome is not None, operator.evidence()
        assert worker.outcome.ending is Ending.FINISHED, operator.evidence()
        assert_same_weights(operator.weights(worker), expected)
    assert lineage(tmp_path / "samples") == ids
    seen = bytes(tap.seen)
    assert len(seen) > 1000
    for word in (JOB_UID, workers[2].uid, '"op":"beat"'):
        assert (word.encode() in seen) is (encryption == "None"), word
    tap.close()


def test_a_worker_without_a_certificate_never_trains_in_plain_text(operate: Operate, tmp_path: Path) -> None:
    """The job asks for encryption, and its Secret is of an older operator: the worker ends and says what to do."""
    operator = operate(encryption="TLS")
    (tmp_path / keys.SECRET_KEY).write_bytes(b"s" * keys.SECRET_BYTES)  # so that no certificate is put beside it
    worker = operator.start("w0")
    operator.finish([worker])
    assert worker.outcome is not None
    assert worker.outcome.ending is Ending.FAILED
    assert "asks for encryption, but its certificate cannot be used" in worker.outcome.reason
