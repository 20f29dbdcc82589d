"""A process reads its identity from its environment; contradictions give one clear message."""

from __future__ import annotations

from pathlib import Path

import pytest
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode, read_config, read_identity
from heterotrain_core.contract import env, keys
from heterotrain_core.contract.config import TrainingConfig, encode_config

POD = {
    env.JOB_UID: "j",
    env.JOB_NAME: "digits",
    env.WORKER: "digits-w1",
    env.WORKER_UID: "u",
    env.WORKER_ADDRESS: "10.1.2.3",
}


def test_alone() -> None:
    """No environment: one process, no ports, no files."""
    assert read_identity({}) == Identity(mode=Mode.ALONE)


def test_in_a_pod_ports_follow_the_local_rank() -> None:
    """Local rank r listens on the port plus r."""
    found = read_identity(POD | {env.LOCAL_RANK: "2", env.NUM_PROC_PER_WORKER: "4"})
    assert (found.mode, found.name, found.metrics_port, found.peer_port) == (Mode.OPERATED, "digits-w1/2", 9402, 29402)
    assert found.termination_path == env.DEFAULT_TERMINATION_PATH


def test_under_torchrun() -> None:
    """RANK and WORLD_SIZE determine everything."""
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    found = read_identity(given)
    assert (found.mode, found.rank, found.world_size, found.local_rank) == (Mode.TORCHRUN, 3, 4, 1)
    with pytest.raises(UsageError, match="not 4 of 4: start the script with torchrun"):
        read_identity(given | {"RANK": "4"})
    with pytest.raises(UsageError, match="MASTER_PORT is not: start the script with torchrun"):
        read_identity({name: value for name, value in given.items() if name != "MASTER_PORT"})


def test_an_incomplete_pod_environment() -> None:
    """The missing variable is named."""
    with pytest.raises(UsageError, match=env.WORKER_UID):
        read_identity({name: value for name, value in POD.items() if name != env.WORKER_UID})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a100":"3.67","t4":"0.30"}', {"a100": 3.67, "t4": 0.3}),
        ('{"a100":"nan","t4":"-1","v100":"1e300","l4":"1"}', {"l4": 1.0}),
        ('{"a100":"much"}', {}),
        ('["a100"]', {}),
        ('{"a100":{}}', {}),
        ("{", {}),
    ],
)
def test_prices_that_cannot_be_read_are_left_out(text: str, expected: dict[str, float]) -> None:
    """They are for a line of the log: no training may end because of them."""
    assert read_identity(POD | {env.PRICES: text}).prices_per_hour == expected
    assert hash(read_identity(POD | {env.PRICES: text})) == hash(read_identity(POD))


def test_a_port_that_is_not_a_number() -> None:
    """The variable and its value are named."""
    with pytest.raises(UsageError, match=r"HETEROTRAIN_PEER_PORT.*'x'"):
        read_identity(POD | {env.PEER_PORT: "x"})


def test_configuration() -> None:
    """As written by the operator, or absent, or refused with a clear message."""
    config = TrainingConfig(epochs=9)
    assert read_config({env.CONFIG: encode_config(config)}) == config
    assert read_config({}) is None
    with pytest.raises(UsageError, match="does not know future: use an image of the operator's version"):
        read_config({env.CONFIG: '{"future": 1}'})


def test_the_mounted_secret_is_read_and_not_shown(tmp_path: Path) -> None:
    """Without the variable, as with an older operator, there is none; a damaged one is refused."""
    assert read_identity(POD).secret == b""
    with pytest.raises(UsageError, match="cannot be read"):
        read_identity(POD | {env.SECRET_DIR: str(tmp_path)})
    (tmp_path / keys.SECRET_KEY).write_bytes(b"short")
    with pytest.raises(UsageError, match="5 bytes instead of 32"):
        read_identity(POD | {env.SECRET_DIR: str(tmp_path)})
    (tmp_path / keys.SECRET_KEY).write_bytes(b"q" * 32)
    found = read_identity(POD | {env.SECRET_DIR: str(tmp_path)})
    assert found.secret == b"q" * 32
    assert "qqq" not in repr(found)


def test_a_secret_given_to_torchrun_is_not_too_short() -> None:
    """It becomes a key; without one, the ranks draw one."""
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert read_identity(given).secret == b""
    assert len(read_identity(given | {env.SECRET: "sixteen letters!"}).secret) == 32
    with pytest.raises(UsageError, match="at least 16"):
        read_identity(given | {env.SECRET: "hunter2"})
