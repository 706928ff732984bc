"""The manifest says what ran and every resume since."""

from __future__ import annotations

import json
import math
import platform
import subprocess
from pathlib import Path

import pytest

from lightning_fuse.records import add_resume, build_manifest, config_changes, read_manifest, sha256_of, write_manifest
from lightning_fuse.records.manifest import git_state


def test_the_manifest_has_what_ran(tmp_path: Path) -> None:
    manifest = build_manifest(
        config={"lr": math.inf, "opt": {"name": "adamw_fused"}}, seed=7, gpus=["H200"], data_hash="x"
    )
    path = tmp_path / "manifest.json"
    write_manifest(path, manifest)
    assert "Infinity" in json.dumps(json.loads(path.read_text()), allow_nan=False)
    back = read_manifest(path)
    assert back["config"] == {"lr": math.inf, "opt": {"name": "adamw_fused"}}
    assert (back["seed"], back["data_hash"], back["resumed_from"]) == (7, "x", [])
    assert back["versions"]["python"] == platform.python_version()
    assert {"torch", "lightning", "lightning_fuse"} <= back["versions"].keys()
    assert back["hardware"]["gpus"] == ["H200"]
    assert back["hardware"]["cpu"]
    assert back["hardware"]["cores"] >= back["hardware"]["usable_cores"] >= 1
    assert back["hardware"]["memory_bytes"] > 2**28


def test_resumes_are_added(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_manifest(path, build_manifest(config={"a": {"lr": 1, "x": math.nan}, "resume": None}))
    add_resume(
        path,
        checkpoint="c/a.ckpt",
        global_step=10,
        config={"a": {"lr": 2, "x": math.nan}, "resume": "c"},
        command=["t"],
    )
    add_resume(path, checkpoint=Path("b.ckpt"), global_step=20)
    first, second = read_manifest(path)["resumed_from"]
    assert first["config_changes"] == {"a.lr": [1, 2], "resume": [None, "c"]}
    assert (first["checkpoint"], first["global_step"], first["command"]) == ("c/a.ckpt", 10, ["t"])
    assert (second["global_step"], second["config_changes"]) == (20, {})


def test_changes_name_missing_keys() -> None:
    assert config_changes({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {}}) == {"b": [None, {}], "b.c": [2, None]}
    assert config_changes({"a": 1}, {"a": 1}) == {}


def test_git_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) is None
    run = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*run, "init", "-q"], check=True)
    (tmp_path / "f").write_text("1")
    subprocess.run([*run, "add", "f"], check=True)
    subprocess.run([*run, "commit", "-q", "-m", "x"], check=True)
    state = git_state(tmp_path)
    assert len(state["revision"]) == 40
    assert state["changed"] is False
    (tmp_path / "f").write_text("2")
    assert git_state(tmp_path)["changed"] is True
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None


def test_data_hash(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abc")
    assert sha256_of(path) == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(FileNotFoundError):
        sha256_of(tmp_path / "nothing")


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense"])
def test_a_foreign_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a manifest"):
        read_manifest(path)
    with pytest.raises(ValueError, match="is not a manifest"):
        add_resume(path, checkpoint="a", global_step=1)
    assert path.read_text() == text
