"""The key of a cluster is made once, and again where a power cut has left an empty file."""

from pathlib import Path

from corun.runtime.cluster.state_dir import make_state_dir
from corun.runtime.config.cluster import ClusterConfig


def test_a_key_is_made_and_kept(tmp_path: Path) -> None:
    config = ClusterConfig(state_dir=str(tmp_path / "state"))
    directory, key = make_state_dir(config)
    assert make_state_dir(config) == (directory, key)
    path = directory / "cluster.key"
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"")
    path.chmod(0o644)
    _, other = make_state_dir(config)
    assert len(other) == len(key) and other != key
    assert path.stat().st_mode & 0o777 == 0o600
