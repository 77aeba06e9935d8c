"""Progress bars of the libraries in a run: hidden if every process would show one, and closed on an error."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import transformers
from transformers import ProgressCallback, Trainer


def hide_bars() -> None:
    """Hides the progress bars of loading and tokenizing, which every process would show."""
    import datasets

    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


@contextmanager
def bar_closed(trainer: Trainer) -> Generator[None]:
    """Ends the line of the progress bar in any case, so that the next message starts on a new line."""
    try:
        yield
    finally:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.close()
