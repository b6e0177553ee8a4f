"""Recovery: a short training that brings the accuracy back."""

from sapwood.recovery.loaders import TensorLoader
from sapwood.recovery.mending import refit_, refresh_norms_
from sapwood.recovery.recover import Recovered, recover
from sapwood.recovery.session import Point

__all__ = ["Point", "Recovered", "TensorLoader", "recover", "refit_", "refresh_norms_"]
