"""`minbert publish`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..settings.wording import counted


def publish(
    model: Annotated[
        Path,
        typer.Argument(
            help="The folder of a finished run, or of another saved model.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ],
    repo_id: Annotated[str, typer.Argument(help="Its name on the Hub, owner/name.", show_default=False)],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as private.")] = False,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Upload the adapter without its base model.")
    ] = False,
    base_model: Annotated[
        str | None,
        typer.Option(help="The Hub id of the base model, if the recipe names a folder.", show_default=False),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(help="Licence of the weights, by the Hub's identifier, such as apache-2.0.", show_default=False),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            help="Language of the texts, by its code, such as de. The data of the package is known to be English.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be uploaded, and upload nothing.")
    ] = False,
    card: Annotated[
        Path | None, typer.Option(help="With --dry-run: write the model card to this file.", show_default=False)
    ] = None,
) -> None:
    """Upload a model to the Hub, with a model card made from its run. It then loads without this package."""
    from ..errors import MinBertError
    from ..io import check_writable, write_atomically
    from ..publishing.publish import prepare, push

    if card is not None:
        if not dry_run:
            raise MinBertError(
                "--card is for --dry-run. Add it, or leave --card out: the card is uploaded with the model."
            )
        check_writable(card)
    publication = prepare(
        model, repo_id, adapter_only=adapter_only, base_model=base_model, license=license, language=language
    )
    if not dry_run:
        url = push(publication, private=private)
        typer.echo(f"{counted(len(publication.uploads), 'file', 'is', 'are')} at {url}")
        return
    if card is None:
        typer.echo(publication.card)
    else:
        write_atomically(card, publication.card)
    total = sum(upload.size for upload in publication.uploads)
    typer.echo(f"Would be uploaded to {repo_id}: {counted(len(publication.uploads), 'file')}, {total:,} bytes.")
    for upload in publication.uploads:
        typer.echo(f"  {upload.size:>13,}  {upload.path}")
    typer.echo(f"Not uploaded: {', '.join(publication.left) or 'nothing'}.")
