"""Fixtures of more than one package's tests."""

from __future__ import annotations

from model_fixture import smollm2_folder as smollm2_folder
