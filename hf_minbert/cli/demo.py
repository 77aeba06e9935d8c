"""`minbert demo`"""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Annotated

import typer

from ..errors import MinBertError


def demo(
    model: Annotated[str, typer.Argument(help="A finished run's folder, or a model's Hub id.", show_default=False)],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page.")] = 7860,
    host: Annotated[str, typer.Option(help="127.0.0.1 serves this machine only, 0.0.0.0 also others.")] = "127.0.0.1",
    export_space: Annotated[
        Path | None,
        typer.Option(
            help="Instead of serving it, write the page as a Hugging Face Space to this folder.", show_default=False
        ),
    ] = None,
) -> None:
    """Serve a page to try a model. It shows the answer of each task to your text, and the words that influenced it."""
    if importlib.util.find_spec("gradio") is None:
        raise MinBertError("The page needs gradio, which is not installed. Run: pip install 'hf_minbert[demo]'")
    if export_space is not None:
        from ..publishing.space import export_space as export

        export(model, export_space)
        typer.echo(
            f"The Space is in {export_space}. To see it here: python {export_space}/app.py. To publish it, make a "
            f"Gradio Space on huggingface.co/new-space, then: hf upload NAME/SPACE {export_space} . --repo-type space"
        )
        return
    _check_free(host, port)
    from ..pretrained.prediction import Predictor
    from ..publishing.demo import launch, make_page

    predictor = Predictor.from_pretrained(model)
    page = make_page(predictor.model, predictor.tokenizer, Path(model).resolve().name)
    launch(page, server_name=host, server_port=port, quiet=True, prevent_thread_lock=True)
    typer.echo(f"The page is at http://{host}:{port}. Ctrl-C ends it.")
    page.block_thread()


def _check_free(host: str, port: int) -> None:
    """Checks the port before weights are loaded. The server's own error would only say that it found no port."""
    try:
        with socket.create_server((host, port)):
            return
    except OSError as error:
        raise MinBertError(
            f"--host {host} --port {port} cannot be served: {error.strerror or error}. Give another port."
        ) from error
