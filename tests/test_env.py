"""`jaxpaged env` names what is here."""

import json

from jaxpaged.cli import main


def test_it_prints_versions_devices_settings_and_caches(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("MY_API_KEY", "secret")
    assert main(["env", "--json"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    assert found["versions"]["jax"]
    assert [device["platform"] for device in found["devices"]] == ["cpu"] * 8
    assert found["settings"]["NCCL_DEBUG"] == "WARN"
    assert found["caches"]["programs"].endswith("jaxpaged")
    assert "secret" not in printed
    assert main(["env"]) == 0
    lines = capsys.readouterr().out
    for part in ("versions\n", "devices\n", "links\n", "settings\n", "caches\n", "NCCL_DEBUG"):
        assert part in lines
