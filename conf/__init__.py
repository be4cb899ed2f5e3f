"""The configs: YAML only. Hydra finds them as pkg://conf."""

from __future__ import annotations
