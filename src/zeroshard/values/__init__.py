"""Whole values of a sharded model: made (zs.init), gathered (zs.gathered), streamed tensor by tensor, given back (zs.close)."""

from .ddp_interface import take_interface
from .gathered_parameters import Gathering, home_of, is_gathered, refuse
from .init_context import BirthHome, cut_module, cut_whole, is_born, values_to_come, whole_births

__all__ = [
    "BirthHome", "Gathering", "cut_module", "cut_whole", "home_of", "is_born", "is_gathered", "refuse", "take_interface",
    "values_to_come", "whole_births",
]  # fmt: skip
