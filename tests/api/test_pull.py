"""``kvalet pull`` against a hub on loopback: what is fetched, what is said when it cannot be, and that it can be served then.
Each run is a process of its own, because huggingface_hub reads its environment once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinyfolder
from hubserver import COMMIT, Hub, hub
from kvalet.api.model_place import ModelPlace, NoModel, find_model
from kvalet.api.pull_command import PullError, pull

FILES = {
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Hub]:
    """A hub with owner/tiny: a model, and beside it what nobody needs."""
    folder = tmp_path / "repository"
    tinyfolder.write(folder, shards=2)
    (folder / "original").mkdir()
    (folder / "original" / "more.safetensors").write_bytes(b"x")
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "model.gguf", ".gitattributes"):
        (folder / name).write_bytes(b"x")
    with hub() as made:
        made.repositories["owner/tiny"] = folder
        yield made


def python(served: Hub, home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": served.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **more}
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        if name not in more:
            environment.pop(name, None)
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)


def pulled(served: Hub, home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return python(served, home, "-m", "kvalet", "pull", *arguments, **more)


FIND = "import sys; from kvalet.api.model_place import find_model; p = find_model(sys.argv[1]); print(p.path); print(p.name)"


def test_what_a_model_needs_is_fetched_once_and_served_by_its_name(served: Hub, tmp_path: Path) -> None:
    first = pulled(served, tmp_path / "home", "owner/tiny")
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.partition(":")[0])
    assert {path.name for path in folder.iterdir()} == FILES
    assert first.stdout.endswith("serve it: kvalet serve owner/tiny\n")
    assert "Fetching" in first.stderr, "progress"
    for name in FILES:
        assert (folder / name).read_bytes() == (served.repositories["owner/tiny"] / name).read_bytes()
        assert len(served.downloads(name)) == 1
    found = python(served, tmp_path / "home", "-c", FIND, "owner/tiny", HF_HUB_OFFLINE="1")
    assert found.stdout.splitlines() == [str(folder), "owner/tiny"], found.stderr
    served.requests.clear()
    again = pulled(served, tmp_path / "home", "owner/tiny")
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert not any(served.downloads(name) for name in FILES)


def test_a_broken_download_is_taken_up_where_it_broke(served: Hub, tmp_path: Path) -> None:
    folder = served.repositories["owner/tiny"]
    data = os.urandom(1 << 20) * 13  # the package writes in pieces of 10 MiB
    (folder / SECOND).write_bytes(data)
    served.cut[SECOND] = 12 << 20
    done = pulled(served, tmp_path / "home", "owner/tiny")
    assert done.returncode == 0, done.stderr
    asked = served.downloads(SECOND)
    assert asked[0] == ""
    assert asked[1] == f"bytes={10 << 20}-", asked
    assert Path(done.stdout.partition(":")[0], SECOND).read_bytes() == data


def test_a_revision_into_a_folder(served: Hub, tmp_path: Path) -> None:
    done = pulled(served, tmp_path / "home", "owner/tiny", "--revision", "v1", "--dir", str(tmp_path / "here"))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "here").iterdir() if path.is_file()} == FILES
    assert done.stdout.endswith(f"serve it: kvalet serve {tmp_path / 'here'}\n")
    assert any("/revision/v1" in path or f"/{COMMIT}/" in path for _, path, _ in served.requests)
    assert find_model(str(tmp_path / "here")) == ModelPlace(tmp_path / "here", "here")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["owner/none"], "there is no repository owner/none at http://127.0.0.1"),
        (["owner/gated"], "owner/gated is gated: accept its terms at http://127.0.0.1"),
        (["owner/tiny", "--revision", "nope"], "owner/tiny has no revision 'nope'"),
        (["two words"], "'two words' is no repository: write OWNER/NAME"),
        (["owner/data"], "owner/data has no config.json"),
        (
            ["owner/experts"],
            "config.json of owner/experts has num_experts 8, a mixture of experts, which is not supported; nothing",
        ),
        (["owner/pickled"], "owner/pickled has no safetensors files"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_one_sentence_says_what_is_wrong(served: Hub, tmp_path: Path, arguments: list[str], words: str) -> None:
    served.gated.add("owner/gated")
    for name in ("data", "experts", "pickled"):
        served.repositories[f"owner/{name}"] = tmp_path / name
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "README.md").write_text("rows")
    (tmp_path / "pickled" / "config.json").write_text(json.dumps(tinyfolder.CONFIG))
    tinyfolder.write(tmp_path / "experts", {"num_experts": 8})
    done = pulled(served, tmp_path / "home", *arguments)
    assert done.returncode == 2, done
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith(f"kvalet: {words}"), done.stderr
    assert "Traceback" not in done.stderr
    assert not served.downloads("model.safetensors"), "weights of what cannot be served are not fetched"


def test_without_a_network_and_without_the_package(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline = pulled(served, tmp_path / "home", "owner/tiny", HF_HUB_OFFLINE="1")
    assert offline.returncode == 2
    assert "cannot be reached for owner/tiny: HF_HUB_OFFLINE is set" in offline.stderr
    assert served.requests == []
    unknown = python(served, tmp_path / "home", "-c", FIND, "owner/tiny")
    assert "NoModel: there is no file or folder owner/tiny, and it was not pulled: `kvalet pull owner/tiny`" in unknown.stderr
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PullError, match=r"pip install 'kvalet\[hub\]'"):
        pull("owner/tiny")
    with pytest.raises(NoModel, match=r"pip install 'kvalet\[hub\]'"):
        find_model("owner/tiny")


def test_paths_win_and_files_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "Model-1.5B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model("owner/Model-1.5B") == ModelPlace(Path("owner/Model-1.5B"), "Model-1.5B")
    assert find_model("owner/model.Q4_1.gguf") == ModelPlace(Path("owner/model.Q4_1.gguf"), "model.Q4_1")
    with pytest.raises(NoModel, match=r"the default model is not at .*fetch_model"):
        find_model("", {"KVALET_CACHE": str(tmp_path)})
