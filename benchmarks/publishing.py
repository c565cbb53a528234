"""What a run found, made public: tables to the terminal and a file, plots to a directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import typer
from pydantic import BaseModel

from dcpfs.errors import ConfigError

from .figures import Figure, Missing, StepFigure
from .manifest import Manifest
from .planning import CASES as PLANNING
from .planning import RanksFigure, SimulationFigure
from .planning import markdown as planning_markdown
from .plots import NothingToPlotError, draw
from .records import recording_of
from .report import markdown as report_markdown
from .stall import CASE as STALL
from .stall import StallFigure
from .stall import markdown as stall_markdown

__all__ = ["Outputs", "check_outputs", "publish", "tables"]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where results go beside the terminal; None: nowhere."""

    markdown_path: Path | None = None
    plots_directory: Path | None = None


def tables(manifest: Manifest, results: Sequence[BaseModel], baselines: Mapping[str, str]) -> str:
    """All tables of a run, in Markdown.

    Args:
        manifest: Of the run.
        results: Of all kinds.
        baselines: Contender that ratios are to, by place.
    """
    at_places = [
        each
        for each in results
        if isinstance(each, Figure | StepFigure | Missing) and not _is_missing(each, (*PLANNING, STALL))
    ]
    text = report_markdown(manifest, at_places, baselines)
    planning = [
        each for each in results if isinstance(each, SimulationFigure | RanksFigure) or _is_missing(each, PLANNING)
    ]
    if planning:
        text += planning_markdown(planning)
    if stalls := [each for each in results if isinstance(each, StallFigure) or _is_missing(each, (STALL,))]:
        text += stall_markdown(stalls)
    return text


def _is_missing(result: BaseModel, cases: Sequence[str]) -> TypeGuard[Missing]:
    return isinstance(result, Missing) and result.entry.case in cases


def check_outputs(json_path: Path | None, outputs: Outputs) -> None:
    """Find out that results can't be written before they are measured. What is there already stays as it is.

    Args:
        json_path: Where figures go as JSON lines, or None.
        outputs: Where tables and plots go.

    Raises:
        ConfigError: A file or directory can't be written.
    """
    for path in (json_path, outputs.markdown_path):
        if path is not None:
            new = not path.exists()
            try:
                path.open("ab").close()
                if new:
                    path.unlink()
            except OSError as error:
                raise _unwritable(path, error) from error
    if outputs.plots_directory is not None:
        try:
            outputs.plots_directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(outputs.plots_directory, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"Can't write results to {path}: {error.strerror or error}; name a place that can be written")


def publish(manifest: Manifest, results: Sequence[BaseModel], baselines: Mapping[str, str], outputs: Outputs) -> None:
    """Print the tables and write what was asked for."""
    text = tables(manifest, results, baselines)
    typer.echo(text)
    if outputs.markdown_path is not None:
        outputs.markdown_path.write_text(text)
    if outputs.plots_directory is not None:
        try:
            for path in draw(recording_of(Path("this run"), manifest, results), outputs.plots_directory):
                typer.echo(f"Plot: {path}", err=True)
        except NothingToPlotError as error:
            typer.echo(str(error), err=True)
