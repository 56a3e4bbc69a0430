"""Shorthands for the marks by which ``conftest.py`` leaves tests out of launches."""

import pytest

any_transport = pytest.mark.any_transport
one_or_two = pytest.mark.ranks(1, 2)
two = pytest.mark.ranks(2)
several = pytest.mark.ranks(2, 4)


def few(*everywhere, once, sizes=(2,)):
    """Values of a parametrization: a few that run in every launch, as a level with payloads of floats and one with
    integers, and those that run once, in the first launch on each of ``sizes``."""
    marks = [any_transport, pytest.mark.ranks(*sizes)]
    return [*everywhere, *(pytest.param(value, marks=marks) for value in once)]
