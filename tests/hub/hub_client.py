"""The real client, in this process, pointed at a Hub of ours, with a cache and tokens of its own."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_server import Hub, serve
from huggingface_hub import close_session, constants


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """What HF_ENDPOINT, HF_HUB_CACHE and the others set when the client is imported, set for one test."""
    with serve() as hub:
        template = "/{repo_id}/resolve/{revision}/{filename}"
        settings = {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + template,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "no token"),
            "HF_HUB_DISABLE_XET": True,  # another protocol, for big files
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # it remembers the endpoint
        for module in ("utils._http", "file_download"):  # waits of seconds between tries
            monkeypatch.setattr(f"huggingface_hub.{module}.time", SimpleNamespace(sleep=lambda seconds: None))
        close_session()
        yield hub
        close_session()
