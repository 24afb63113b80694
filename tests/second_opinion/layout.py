"""What every layout is made of."""

import dataclasses

import numpy


@dataclasses.dataclass
class Buffer:
    """A tensor of one rank.

    `unread`: the worker has it and uses it for nothing, or it repeats another tensor (a tied head). As a source it
    must not be looked at; as a destination, `optional`, it may be left out.
    `left_alone`: so many elements more of a vector, which a refit leaves alone.
    """

    dtype: str
    bits: numpy.ndarray
    unread: bool = False
    optional: bool = False
    left_alone: int = 0


def even_part(tensor, index, count, dim):
    """Part `index` of `count` equal parts along `dim`."""
    extent = tensor.shape[dim]
    assert extent % count == 0, (tensor.shape, dim, count)
    return numpy.take(tensor, range(index * (extent // count), (index + 1) * (extent // count)), axis=dim)


def heads_part(tensor, heads, index, count):
    """The rows of part `index` of `count` of the heads; each has as many."""
    by_head = tensor.reshape(heads, -1, tensor.shape[1])
    assert heads % count == 0
    mine = [by_head[head] for head in range(heads) if head // (heads // count) == index]
    return numpy.concatenate(mine)


def round_up(number, unit):
    return -(-number // unit) * unit


def rows_with_padding(tensor, rows, padding):
    return numpy.concatenate([tensor, padding(rows - tensor.shape[0], *tensor.shape[1:])])
