"""Uploads a model's folder to the Hub in one commit. If the Hub refuses it, the error is one line."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MinBertError
from .card import model_card
from .files import CARD, Upload, collect, is_listed, left_here
from .saved import SavedModel

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, RepoUrl

logger = logging.getLogger(__name__)

GO_ON = "Run the same command to continue: complete files are not sent again."


@dataclass(frozen=True)
class Publication:
    """The files to upload, with the card last, and the names of the files that are not uploaded."""

    folder: Path
    repo_id: str
    uploads: list[Upload]
    left: list[str]

    @property
    def card(self) -> str:
        return self.uploads[-1].read().decode()


def check_repo_id(repo_id: str) -> None:
    """Raises `MinBertError` unless this is a valid name for a model on the Hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise MinBertError(f"{repo_id!r} is no name on the Hub: {said}. Give owner/name.") from error


def prepare(
    folder: str | Path,
    repo_id: str,
    *,
    adapter_only: bool = False,
    base_model: str | None = None,
    license: str | None = None,
    language: str | None = None,
) -> Publication:
    """Collects everything to upload. Nothing is written or sent.

    Args:
        folder: the folder of a run, or of another model that this package saved.
        repo_id: `owner/name`, or `name` for the owner of the token.
        adapter_only: upload the adapter in the folder, not the model's weights.
        base_model, license, language: see `card.model_card`.

    Raises:
        MinBertError: the name is invalid, or the folder has no complete model.
    """
    check_repo_id(repo_id)
    folder = Path(folder)
    if not folder.is_dir():
        raise MinBertError(f"There is no folder {folder}. Give that of a finished run or of another saved model.")
    saved = SavedModel.of(folder)
    if saved.recipe and not saved.metrics:
        logger.warning("%s has no metrics.json: its run did not finish, and the card has no scores.", folder)
    uploads = collect(folder, adapter_only, base_model)
    card = model_card(saved, repo_id, uploads, base_model=base_model, license=license, language=language)
    uploads.append(Upload(CARD, card.encode()))
    return Publication(folder, repo_id, uploads, [name for name in left_here(folder, uploads) if name != CARD])


def push(publication: Publication, *, private: bool = False, token: str | None = None) -> str:
    """Creates the repository if necessary and uploads everything in one commit. Returns the model's address.

    Files of an earlier upload that are not in this one are deleted by the same commit. Files with other names are
    kept.

    Args:
        private: whether a new repository is private. An existing repository is not changed.
        token: by default, the token of `hf auth login` or `$HF_TOKEN`.

    Raises:
        MinBertError: there is no token, no permission or no network; `private` is set and the repository is public; or
            the upload was interrupted.
    """
    from huggingface_hub import HfApi

    url = create(publication.repo_id, publication.folder, private=private, token=token)
    with in_words(url.repo_id, publication.folder):
        commit(HfApi(token=token), url.repo_id, publication.uploads, "Publish with hf_minbert")
    return str(url)


def create(repo_id: str, folder: Path, *, private: bool = False, token: str | None = None) -> RepoUrl:
    """Creates the repository if it does not exist. An existing repository is not changed. See `push`."""
    from huggingface_hub import HfApi, get_token

    if not (token or get_token()):
        raise MinBertError("There is no token for the Hub. Log in with `hf auth login`, or set $HF_TOKEN.")
    check_repo_id(repo_id)
    api = HfApi(token=token)
    with in_words(repo_id, folder):
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.model_info(url.repo_id).private:
            raise MinBertError(
                f"{url.repo_id} already exists and is public. Only a new repository can be made private: change it on "
                "its page, or give another name."
            )
    return url


def commit(
    api: Any, repo_id: str, uploads: Iterable[Upload], message: str, *, revision: str | None = None, **given: Any
) -> CommitInfo:
    """Makes the repository's listed files equal to these in one commit. `given` is passed to `HfApi.create_commit`."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    sent = {upload.path: upload.content for upload in uploads}
    there = api.list_repo_files(repo_id, revision=revision)
    stale = [path for path in there if is_listed(path) and path not in sent]
    operations = [
        *(CommitOperationAdd(path, content) for path, content in sent.items()),
        *(CommitOperationDelete(path) for path in stale),
    ]
    return api.create_commit(repo_id, operations, commit_message=message, revision=revision, **given)


@contextmanager
def in_words(repo_id: str, folder: Path, go_on: str = GO_ON) -> Generator[None]:
    """Turns the errors of the Hub's libraries into one line with the reason.

    Args:
        go_on: a sentence that says how to try again.
    """
    try:
        yield
    except MinBertError:
        raise
    except KeyboardInterrupt:
        logger.warning("Interrupted: %s on the Hub and the folder %s are unchanged. %s", repo_id, folder, go_on)
        raise
    except Exception as error:  # those of HTTP are of another package in each version
        raise MinBertError(_in_words(error, repo_id, folder, go_on)) from error


def _in_words(error: Exception, repo_id: str, folder: Path, go_on: str) -> str:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    if any(isinstance(link, OfflineModeIsEnabled) for link in chain):
        return "HF_HUB_OFFLINE is set, so nothing is sent. Unset it."
    answered = next((link for link in chain if isinstance(link, HfHubHTTPError) and link.response is not None), None)
    if answered is not None:
        status, said = answered.response.status_code, answered.server_message or ""
        if status == 401:
            return "The Hub refuses the token. Log in again with `hf auth login`, or set $HF_TOKEN to a valid one."
        if status in (403, 404):
            return (
                f"The token may not write to {repo_id}: {said.rstrip('.') or status}. Give a name of your own, or a "
                f"token with the right to write there."
            )
        return f"The Hub refused {repo_id}: {status} {said}".rstrip(". ") + f". Nothing is lost. {go_on}"
    if isinstance(error, ValueError):  # the library's own checks, such as of the card's metadata
        return f"The Hub refused {repo_id}: {str(error).rstrip('.')}. Nothing is lost."
    said = str(chain[-1]).rstrip(".") or type(chain[-1]).__name__
    return (
        f"The Hub does not answer, or the connection to it was lost ({said}). {repo_id} and the folder {folder} are "
        f"unchanged. {go_on}"
    )
