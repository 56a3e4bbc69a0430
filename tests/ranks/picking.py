"""Shorthands for the marks by which ``conftest.py`` leaves tests out of launches."""

import pytest

any_transport = pytest.mark.any_transport
one_or_two = pytest.mark.ranks(1, 2)
two = pytest.mark.ranks(2)
several = pytest.mark.ranks(2, 4)


def few(*everywhere, once, rarely=(), sizes=(2,)):
    """Values of a parametrization: a few that run in every launch, as a level with payloads of floats and one with
    integers, those that run once, in the first launch on each of ``sizes``, and those that run once, before a
    release."""
    marks = [any_transport, pytest.mark.ranks(*sizes)]
    seldom = [pytest.param(value, marks=[*marks, pytest.mark.rarely]) for value in rarely]
    return [*everywhere, *(pytest.param(value, marks=marks) for value in once), *seldom]
