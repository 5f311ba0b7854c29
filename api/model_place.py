"""Which files "MODEL" means: a GGUF file, a model folder, a repository that was pulled before, or the default model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvalet.api.fetch_model import model_path

REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,95}))?")
NEEDED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "LICENSE*"]
NOT_NEEDED = ["*/*", "consolidated*.safetensors"]
"""What of a repository a model needs: nothing in folders of its own, and not Mistral's second copy of the weights."""
HUB_MISSING = "huggingface_hub is not installed: pip install 'kvalet[hub]'"


class NoModel(Exception):
    """There is no such model. One sentence for a person that says what to do."""


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """``name``: what the model is called in the API where nobody chose a name."""

    path: Path
    name: str


def find_model(model: str, environment: Mapping[str, str] = os.environ) -> ModelPlace:
    """``model``: a path, or "owner/name" (or "owner/name@revision") of a repository pulled before; "" is the default model. A
    path that exists wins.

    NoModel where there is none. Touches no network."""
    if not model:
        path = model_path(environment=environment)
        if not path.is_file():
            raise NoModel(f"the default model is not at {path}: run `python -m kvalet.api.fetch_model` (or `make model`)")
        return ModelPlace(path, path.stem)
    path = Path(model)
    if path.is_dir():
        return ModelPlace(path, path.absolute().name)
    repository = REPOSITORY.fullmatch(model)
    if path.exists() or repository is None or path.suffix == ".gguf":
        return ModelPlace(path, path.stem)  # if it is not there, whoever opens it says so
    return ModelPlace(pulled_folder(repository[1], repository[2]), model)


def pulled_folder(repository: str, revision: str | None) -> Path:
    """Where ``kvalet pull`` (or any other program that uses the same cache) put the repository. NoModel if it is not there."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise NoModel(f"there is no file or folder {repository}, and {HUB_MISSING} finds pulled models") from None
    try:
        return Path(
            snapshot_download(
                repository, revision=revision, local_files_only=True, allow_patterns=NEEDED, ignore_patterns=NOT_NEEDED
            )
        )
    except (LocalEntryNotFoundError, HFValidationError):
        raise NoModel(f"there is no file or folder {repository}, and it was not pulled: `kvalet pull {repository}`") from None


def folder_report(folder: Path) -> tuple[bool, str]:
    """(whether something is wrong, what was found): its configuration can be served, and every weight file that it lists is
    there. No weight is read."""
    try:
        from kvalet.runtime.errors import ModelError
        from kvalet.runtime.hf_config import spec_of_config
        from kvalet.runtime.hf_folder import CONFIG, read_config
        from kvalet.runtime.safetensors_files import shard_files
    except (ImportError, OSError) as error:
        return True, f"{folder}: {error}"
    try:
        spec = spec_of_config(read_config(folder), str(folder / CONFIG), folder.absolute().name)
        size = sum(path.stat().st_size for path in shard_files(folder)[0])
    except (ModelError, OSError) as error:
        return True, str(error)
    shape = f"{spec.architecture}, {spec.n_layers} layers, {spec.context:,} tokens of context"
    return False, f"{folder}, {shape}, {size / 1e6:,.1f} MB"
