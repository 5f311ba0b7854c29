"""``kvalet pull OWNER/NAME``: fetch a model's files from the Hugging Face hub (or a mirror, ``HF_ENDPOINT``).

The ``huggingface_hub`` package does it all: cache shared with other programs, files in parallel, interrupted downloads taken up
again, its token and its environment variables. Here is decided which files a model needs, and how errors are said. The
configuration is fetched first: a model that cannot be served costs no download.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvalet.api.model_place import HUB_MISSING, NEEDED, NOT_NEEDED
from kvalet.runtime.errors import ModelError
from kvalet.runtime.hf_config import spec_of_config
from kvalet.runtime.hf_folder import CONFIG, read_config

EXIT_USAGE = 2


class PullError(Exception):
    """One sentence for a person. What was downloaded by then stays and is not downloaded again."""


def pull(repository: str, revision: str | None = None, folder: str | None = None) -> Path:
    """The folder that holds the model's files: ``folder``, or the package's cache. Prints progress to standard error.

    PullError for a repository, revision or network that is not there, a model that is not supported or has no safetensors."""
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        raise PullError(HUB_MISSING) from None
    config = _said(lambda: hf_hub_download(repository, CONFIG, revision=revision, local_dir=folder), repository, revision)
    try:
        spec_of_config(read_config(Path(config).parent), f"{CONFIG} of {repository}", repository)
    except ModelError as error:
        raise PullError(f"{error}; nothing else was downloaded") from None
    found = _said(
        lambda: snapshot_download(
            repository, revision=revision, local_dir=folder, allow_patterns=NEEDED, ignore_patterns=NOT_NEEDED
        ),
        repository,
        revision,
    )
    if not any(Path(found).glob("*.safetensors")):
        raise PullError(f"{repository} has no safetensors files; other formats of weights may run code and are not loaded")
    return Path(found)


def _said(fetch: Callable[[], str], repository: str, revision: str | None) -> str:
    """``fetch()``, its errors as PullError. The order counts: the package's errors derive from each other."""
    from huggingface_hub import constants, errors

    try:
        return fetch()
    except errors.HFValidationError:
        raise PullError(f"{repository!r} is no repository: write OWNER/NAME") from None
    except errors.GatedRepoError:
        raise PullError(
            f"{repository} is gated: accept its terms at {constants.ENDPOINT}/{repository}, then log in with `hf auth login`"
            " or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise PullError(
            f"there is no repository {repository} at {constants.ENDPOINT}; if it is private, log in with `hf auth login` or"
            " set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise PullError(f"{repository} has no revision {revision or constants.DEFAULT_REVISION!r}") from None
    except errors.RemoteEntryNotFoundError:
        raise PullError(f"{repository} has no {CONFIG}: it is no model folder of the kind that is served") from None
    except errors.LocalEntryNotFoundError:
        how = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "check the connection and HF_ENDPOINT"
        raise PullError(f"{constants.ENDPOINT} cannot be reached for {repository}: {how}") from None
    except errors.HfHubHTTPError as error:
        raise PullError(f"{constants.ENDPOINT} answers for {repository}: {_first_line(error)}") from None
    except OSError as error:
        raise PullError(f"{repository} could not be stored or fetched: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Exit status: 0 the model is there, 2 it is not (one sentence on standard error), 130 interrupted."""
    parser = argparse.ArgumentParser("kvalet pull", description="Fetch a model from the Hugging Face hub.")
    parser.add_argument("repository", metavar="OWNER/NAME")
    parser.add_argument("--revision", help="branch, tag or commit; none = main")
    parser.add_argument("--dir", help="folder for the files; none = the cache of huggingface_hub (HF_HOME)")
    asked = parser.parse_args(list(arguments))
    try:
        folder = pull(asked.repository, asked.revision, asked.dir)
    except PullError as error:
        print(f"kvalet: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("kvalet: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    files = [path for path in folder.iterdir() if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    name = asked.dir or asked.repository + (f"@{asked.revision}" if asked.revision else "")
    print(f"{folder}: {len(files)} files, {size / 1e6:,.1f} MB\nserve it: kvalet serve {name}")
    return 0
