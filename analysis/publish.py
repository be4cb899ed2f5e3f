"""The report of a sweep in MLflow: the page and its pictures, in one run that each new report of the sweep replaces."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from analysis import report
from analysis.runs import load, select
from experiments.tracking import address, publish

# Pixels of a picture, drawn twice as fine.
_WIDTH, _SCALE = 900, 2
