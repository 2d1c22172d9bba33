"""A record says where it comes from, and nothing about the machine's folders."""

import json
import sys

import pytest
import torch

from flashmap_hf.provenance import provenance


def test_record_is_json_and_names_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/folder/flashmap", "generate", "--drafter", "/home/me/secret/drafter"])
    record = json.loads(json.dumps(provenance()))
    assert record["command"] == "flashmap generate --drafter drafter"
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["threads"] == torch.get_num_threads() and record["machine"]["processor"]
    assert "secret" not in json.dumps(record)


def test_commit_is_the_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = provenance()["commit"]
    assert commit is None or len(commit.rstrip("+")) == 40
