"""Runs: composed from conf, trained with Lightning, logged to MLflow and to a local record."""

from __future__ import annotations
