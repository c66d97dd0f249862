"""What commands that have to do with a drafter's weights have in common."""

from __future__ import annotations

import click

from kerngen.runtime.config import DRAFT_WEIGHTS

draft_weights_option = click.option(
    "--draft-weights",
    type=click.Choice(DRAFT_WEIGHTS),
    default=DRAFT_WEIGHTS[0],
    show_default=True,
    help="The drafter's matrices: as they are stored, or made int4 as they are loaded. The output is the same; fewer "
    "drafts may be accepted.",
)
