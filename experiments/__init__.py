"""Runs: composed from conf, trained with Lightning, logged to MLflow and to a local record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arch.language_model import LanguageModel
    from experiments.corpus.tokenisers import Tokeniser


def load(run: str | Path, runs: str | Path = "runs") -> LanguageModel:
    """The trained model of a run, by its folder or key, on the CPU and in eval mode: see `experiments.resume.load`."""
    # The package is imported by everything in it.
    from experiments import resume

    return resume.load(run, runs)


def tokeniser(run: str | Path, runs: str | Path = "runs") -> Tokeniser:
    """What a run of the task `text` turned text into tokens with: see `experiments.resume.tokeniser`."""
    from experiments import resume

    return resume.tokeniser(run, runs)
