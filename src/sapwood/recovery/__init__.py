"""Recovery: a short training that brings the accuracy back."""

from sapwood.recovery.recover import Recovered, recover
from sapwood.recovery.session import Point

__all__ = ["Point", "Recovered", "recover"]
