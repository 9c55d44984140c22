"""Classes with one base of the library and one of the user (utils/joined_class.py): made once, and found again by copies and pickles."""

import copy
import pickle

from torch import nn

from zeroshard.utils.joined_class import Joined, joined_class, new_joined


class Doubled(Joined):
    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(nn.Module):
    def forward(self, x):
        return x + 1


def test_copies_and_pickles_are_of_the_same_class():
    module = Shifted()
    module.__class__ = joined_class(Doubled, Shifted)
    module.mark = [1]
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is joined_class(Doubled, Shifted) and isinstance(other, Shifted)
        assert other(3) == 8 and other.mark == [1] and other.mark is not module.mark


def test_a_new_object_has_no_state():
    made = new_joined(Doubled, Shifted)
    assert type(made) is type(new_joined(Doubled, Shifted)) and made.stands_for is Shifted and not vars(made)
