"""Search of the hub: what is asked for, what comes back, what is said where it fails."""

import pytest
from standin import Repo, StandIn

from mlxinfer.errors import DownloadError
from mlxinfer.hub.remote import search_models


def test_models_come_by_words_and_the_most_downloaded_first(standin: StandIn) -> None:
    standin.repos |= {
        "mlx-community/Qwen3-8B-4bit": Repo({}, downloads=5),
        "mlx-community/Qwen3-4B-4bit": Repo({}, downloads=50),
        "Qwen/Qwen3-8B": Repo({}, downloads=500, tags=("safetensors",)),
    }
    models = search_models("qwen3")
    assert [item.name for item in models] == [
        "mlx-community/Qwen3-4B-4bit",
        "mlx-community/Qwen3-8B-4bit",
    ]
    assert (models[0].downloads, models[0].likes, models[0].parameters) == (50, 3, 1000)
    assert models[0].updated_s == 1790856000.0
    assert search_models("Qwen/Qwen3-8B", mlx_only=False)[0].name == "Qwen/Qwen3-8B"
    assert search_models("no such model") == []


def test_a_hub_that_fails_is_asked_a_few_times_and_named(standin: StandIn) -> None:
    standin.faults.busy = 1
    assert search_models("tiny")
    standin.faults.status = 500
    with pytest.raises(DownloadError, match="cannot be searched"):
        search_models("tiny")
    assert len(standin.asked_for("/api/models")) <= 5


def test_offline_asks_nothing(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        search_models("tiny")
    assert standin.log == []
